// Precedes every kernel: pointers, vectors of columns, sums, draws, elementary functions.
//
// NVRTC compiles this after `device.cuh`, without any header; a C++ compiler does after
// `emulated/emulator.h`. Results do not depend on the device: there are no atomics, and every sum
// has one order.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

DEVICE float f32(u32 bits) { return __uint_as_float(bits); }
const u32 INFINITE = 0x7f800000u;
DEVICE double f64(u64 bits) { return __longlong_as_double((i64)bits); }

// ---- bf16: the upper half of a float, for storage only; arithmetic is float.

struct bf16 {
    unsigned short bits;

    DEVICE_MEMBER operator float() const { return f32((u32)bits << 16); }
    DEVICE_MEMBER bf16 &operator=(float x) {
        bits = (unsigned short)two_bf16(x, 0.0f);
        return *this;
    }
};

// The two bf16s of a word.
DEVICE float low_of(u32 both) { return f32(both << 16); }
DEVICE float high_of(u32 both) { return f32(both & 0xffff0000u); }

// `InFloats auto x`: an operand of f32 or bf16. `In<float>` is f32 in every program.
template <class P> concept InFloats = requires(P p) { (float)p[0]; };
template <class P> concept OutFloats = requires(P p) { p[0] = 0.0f; };
template <class P> constexpr bool is_bf16 = requires(P p) { p[0].bits; };

// ---- Numbers of a step: seed (low, high), step, first row, then the step scalars.

DEVICE float scalar(In<u32> parameters, int index) { return f32(parameters[FIRST_SCALAR + index]); }

// ---- WIDTH columns of a row: 16 bytes are 8 of bf16 and 4 of f32. One column where no vectors
// are aligned.

template <int WIDTH> struct Wide {
    float v[WIDTH];
};

template <int WIDTH> DEVICE Wide<WIDTH> load_wide(auto x, i64 at) {
    if constexpr (WIDTH == 1) {
        return {{(float)x[at]}};
    } else if constexpr (WIDTH == 4 && !is_bf16<decltype(x)>) {
        float4 four = load_as<float4>(x, at);
        return {{four.x, four.y, four.z, four.w}};
    } else if constexpr (WIDTH == 4) {
        uint2 two = load_as<uint2>(x, at);
        return {{low_of(two.x), high_of(two.x), low_of(two.y), high_of(two.y)}};
    } else if constexpr (!is_bf16<decltype(x)>) {
        Wide<4> low = load_wide<4>(x, at), high = load_wide<4>(x, at + 4);
        return {{low.v[0], low.v[1], low.v[2], low.v[3], high.v[0], high.v[1], high.v[2], high.v[3]}};
    } else {
        uint4 four = load_as<uint4>(x, at);
        return {{low_of(four.x), high_of(four.x), low_of(four.y), high_of(four.y), low_of(four.z), high_of(four.z), low_of(four.w), high_of(four.w)}};
    }
}

template <int WIDTH> DEVICE void store_wide(OutFloats auto y, i64 at, Wide<WIDTH> wide) {
    const float *v = wide.v;
    if constexpr (WIDTH == 1) {
        y[at] = v[0];
    } else if constexpr (WIDTH == 4 && !is_bf16<decltype(y)>) {
        store_as(y, at, make_float4(v[0], v[1], v[2], v[3]));
    } else if constexpr (WIDTH == 4) {
        store_as(y, at, make_uint2(two_bf16(v[0], v[1]), two_bf16(v[2], v[3])));
    } else if constexpr (!is_bf16<decltype(y)>) {
        store_as(y, at, make_float4(v[0], v[1], v[2], v[3]));
        store_as(y, at + 4, make_float4(v[4], v[5], v[6], v[7]));
    } else {
        store_as(y, at, make_uint4(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]), two_bf16(v[6], v[7])));
    }
}

template <int WIDTH, bool ADD> DEVICE void give_wide(OutFloats auto y, i64 at, Wide<WIDTH> wide) {
    if (ADD) {
        Wide<WIDTH> before = load_wide<WIDTH>(y, at);
        for (int k = 0; k < WIDTH; ++k) {
            wide.v[k] = before.v[k] + wide.v[k];
        }
    }
    store_wide(y, at, wide);
}

// The numbers as an operand holds them.
template <int WIDTH> DEVICE Wide<WIDTH> as_stored(OutFloats auto y, Wide<WIDTH> wide) {
    for (int k = 0; k < WIDTH && is_bf16<decltype(y)>; k += 2) {
        u32 both = two_bf16(wide.v[k], k + 1 < WIDTH ? wide.v[k + 1] : 0.0f);
        wide.v[k] = low_of(both);
        if (k + 1 < WIDTH) {
            wide.v[k + 1] = high_of(both);
        }
    }
    return wide;
}

// ---- Groups of four: a thread has four columns of a row.

using Four = Wide<4>;

DEVICE Four fill(float value) { return Four{{value, value, value, value}}; }

template <class F> DEVICE Four map(F of) { return Four{{of(0), of(1), of(2), of(3)}}; }

template <class F> DEVICE void each_of_four(F of) { of(0), of(1), of(2), of(3); }

// Four columns of a row of COLUMNS, at `at`; zeros beyond its end. Written operands may be read.
template <i64 COLUMNS> DEVICE Four load_some(auto x, i64 at, i64 column) {
    if (COLUMNS % 4 == 0) {
        return load_wide<4>(x, at);
    }
    return map([&](int k) { return column + k < COLUMNS ? (float)x[at + k] : 0.0f; });
}

template <i64 COLUMNS> DEVICE void store_some(OutFloats auto y, i64 at, i64 column, Four four) {
    if (COLUMNS % 4 == 0) {
        store_wide(y, at, four);
        return;
    }
    for (int k = 0; k < 4; ++k) {
        if (column + k < COLUMNS) {
            y[at + k] = four.v[k];
        }
    }
}

template <i64 COLUMNS> DEVICE Four load(auto x, i64 row, i64 column) { return load_some<COLUMNS>(x, row * COLUMNS + column, column); }

// Four columns to global memory; see `store_at_once`.
DEVICE void store_four_at_once(OutFloats auto y, i64 at, Four four) {
    const float *v = four.v;
    if constexpr (is_bf16<decltype(y)>) {
        store_at_once(y, at, make_uint2(two_bf16(v[0], v[1]), two_bf16(v[2], v[3])));
    } else {
        store_at_once(y, at, make_float4(v[0], v[1], v[2], v[3]));
    }
}

template <i64 COLUMNS> DEVICE void store(OutFloats auto y, i64 row, i64 column, Four four) {
    if constexpr (COLUMNS % 4 == 0) {
        store_four_at_once(y, row * COLUMNS + column, four);
    } else {
        store_some<COLUMNS>(y, row * COLUMNS + column, column, four);
    }
}

// y = [y +] four.
template <i64 COLUMNS, bool ADD> DEVICE void give(OutFloats auto y, i64 row, i64 column, Four four) {
    if (ADD) {
        Four before = load<COLUMNS>(y, row, column);
        four = map([&](int k) { return before.v[k] + four.v[k]; });
    }
    store<COLUMNS>(y, row, column, four);
}

template <bool ADD> DEVICE void give(OutFloats auto y, i64 at, float value) { y[at] = ADD ? y[at] + value : value; }

// `body(index)` for the index of this thread, if it is below COUNT.
template <i64 COUNT, class F> DEVICE void each_thread(F body) {
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index < COUNT) {
        body(index);
    }
}

// `body(row, column)` for the four columns of this thread, if there are any.
template <i64 ROWS, i64 COLUMNS, class F> DEVICE void each_four(F body) {
    const i64 groups = (COLUMNS + 3) / 4;
    if (ROWS * groups < (1ll << 31)) {
        // A 32-bit division by a constant compiles to a multiplication.
        u32 index = blockIdx.x * blockDim.x + threadIdx.x;
        if (index < (u32)(ROWS * groups)) {
            body((i64)(index / (u32)groups), (i64)(index % (u32)groups * 4));
        }
        return;
    }
    each_thread<ROWS * groups>([&](i64 index) { body(index / groups, index % groups * 4); });
}

// y = [y +] x, with zeros behind the rows and columns of x.
template <i64 ROWS_OF_X, i64 COLUMNS_OF_X, i64 ROWS, i64 COLUMNS, bool ADD> DEVICE void resize(InFloats auto x, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        bool there = row < ROWS_OF_X && column < COLUMNS_OF_X;
        give<COLUMNS, ADD>(y, row, column, there ? load<COLUMNS_OF_X>(x, row, column) : fill(0.0f));
    });
}

// ---- Sums and maxima over the threads of a block; every thread gets the same bits.

DEVICE float larger(float a, float b) { return b > a ? b : a; }

template <class T> DEVICE T warp_sum(T x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    }
    return x;
}

DEVICE float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x = larger(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    }
    return x;
}

template <int THREADS, class T> DEVICE T block_sum(T x) {
    x = warp_sum(x);
    if (THREADS == 32) {
        return x;
    }
    SHARED(T, parts, 32);
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        parts[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = warp_sum(lane < THREADS / 32 ? parts[lane] : (T)0);
    // All threads must have read a part before it is overwritten.
    __syncthreads();
    return x;
}

template <int THREADS> DEVICE float block_max(float x) {
    x = warp_max(x);
    if (THREADS == 32) {
        return x;
    }
    SHARED(float, parts, 32);
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        parts[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = warp_max(lane < THREADS / 32 ? parts[lane] : parts[0]);
    __syncthreads();
    return x;
}

// Sum of `term(column)` over the columns of a row, by the threads of a block.
template <int THREADS, i64 COLUMNS, class F> DEVICE float row_sum(F term) {
    float sum = 0.0f;
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        sum += term(column);
    }
    return block_sum<THREADS>(sum);
}

// ---- Rows of COLUMNS elements that are PITCH apart, by the threads of a block: each thread takes
// a vector at a time if rows begin at vectors, and one element otherwise.

template <i64 PITCH> constexpr int AT_ONCE = PITCH % 4 == 0 ? 4 : 1;

// `of(k)` for those elements of a vector that lie before the end of the row.
template <i64 COLUMNS, i64 PITCH, class F> DEVICE void each_of_vector(i64 column, F of) {
    each_of_four([&](int k) {
        if (k < AT_ONCE<PITCH> && column + k < COLUMNS) {
            of(k);
        }
    });
}

// `body(column)` for the first column of each vector of this thread.
template <int THREADS, i64 COLUMNS, i64 PITCH, class F> DEVICE void each_vector(F body) {
    for (i64 column = AT_ONCE<PITCH> * (i64)threadIdx.x; column < COLUMNS; column += AT_ONCE<PITCH> * THREADS) {
        body(column);
    }
}

// Only the first AT_ONCE elements are read.
template <i64 PITCH> DEVICE Four load_vector_of_row(auto x, i64 row, i64 column) {
    i64 at = row * PITCH + column;
    return AT_ONCE<PITCH> == 4 ? load_wide<4>(x, at) : fill(x[at]);
}

// Writes the elements before the end of the row, and zeros behind it.
template <i64 COLUMNS, i64 PITCH> DEVICE void store_vector_of_row(OutFloats auto y, i64 row, i64 column, Four four) {
    i64 at = row * PITCH + column;
    if (AT_ONCE<PITCH> == 4) {
        store_wide(y, at, map([&](int k) { return column + k < COLUMNS ? four.v[k] : 0.0f; }));
    } else {
        y[at] = four.v[0];
    }
}

// ---- Sums over a whole tensor: one part per block, then all parts in f64.

template <int THREADS, i64 LEN, class F> DEVICE void part_sum(Out<float> parts, F term) {
    float sum = 0.0f;
    i64 end = ((i64)blockIdx.x + 1) * PART;
    for (i64 at = (i64)blockIdx.x * PART + threadIdx.x; at < end && at < LEN; at += THREADS) {
        sum += term(at);
    }
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = sum;
    }
}

template <int THREADS, i64 PARTS> DEVICE double all_parts(In<float> parts) {
    double sum = 0.0;
    for (i64 at = threadIdx.x; at < PARTS; at += THREADS) {
        sum += (double)parts[at];
    }
    return block_sum<THREADS>(sum);
}

// y = [y +] factor * sum of the parts.
template <i64 PARTS, bool ADD> DEVICE void sum_parts(In<float> parts, Out<float> y, double factor) {
    double sum = all_parts<256, PARTS>(parts) * factor;
    if (threadIdx.x == 0) {
        give<ADD>(y, 0, (float)sum);
    }
}

// ---- y . g of each head and position, [b, HEADS, POSITIONS], of ROWS in all: a warp has one.

template <i64 ROWS, i64 POSITIONS, i64 HEADS, i64 SIZE>
DEVICE void head_dots(InFloats auto y, InFloats auto g, Out<float> dots) {
    i64 index = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (index >= ROWS) {
        return;
    }
    i64 unit = index / POSITIONS, t = index % POSITIONS;
    i64 first = ((unit / HEADS * POSITIONS + t) * HEADS + unit % HEADS) * SIZE;
    float sum = 0.0f;
    for (i64 column = threadIdx.x % 32; column < SIZE; column += 32) {
        sum = fmaf(g[first + column], y[first + column], sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) {
        dots[index] = sum;
    }
}

// ---- Weighted sums of the 32 rows of a tile in shared memory, which has H::size columns in rows
// H::pitch apart: a warp has every eighth sum, and a lane every 32nd column.

// Adds to sum[i] the rows weighted by row `line + 8 i` of the weights, or with DOWN by that column.
// Rows of weights are 33 apart.
template <class H, bool DOWN>
DEVICE void add_weighted(float (&sum)[4][H::columns], Shared<float> weights, Shared<float> rows) {
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    for (int row = 0; row < 32; ++row) {
        for (int part = 0; part < H::columns; ++part) {
            int column = lane + 32 * part;
            float value = column < H::size ? rows[row * H::pitch + column] : 0.0f;
            for (int i = 0; i < 4; ++i) {
                int own = line + 8 * i;
                sum[i][part] = fmaf(weights[DOWN ? row * 33 + own : own * 33 + row], value, sum[i][part]);
            }
        }
    }
}

// ---- Sums over rows: a block of 32 columns by 8 rows takes a stretch of rows; then stretches are
// added in order.

// `term(row, column, read(row, column))`, of WIDTH columns, summed over a stretch of rows, for 32
// WIDTH columns: a thread reads AHEAD of its rows before the first of them gives a term. parts:
// [stretches, COLUMNS].
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int WIDTH, class R, class F>
DEVICE void wide_column_parts(Out<float> parts, R read, F term) {
    const int AHEAD = 2;
    SHARED(float, sums, 8 * 32 * WIDTH);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 start = (i64)blockIdx.x * 32 * WIDTH, column = start + lane * WIDTH;
    Wide<WIDTH> sum = {};
    i64 end = ((i64)blockIdx.y + 1) * STRETCH;
    end = end < ROWS ? end : ROWS;
    for (i64 first = (i64)blockIdx.y * STRETCH + line; first < end && column < COLUMNS; first += 8 * AHEAD) {
        decltype(read(first, column)) rows[AHEAD];
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (first + 8 * ahead < end) {
                rows[ahead] = read(first + 8 * ahead, column);
            }
        }
        for (int ahead = 0; ahead < AHEAD && first + 8 * ahead < end; ++ahead) {
            Wide<WIDTH> row = term(first + 8 * ahead, column, rows[ahead]);
            for (int k = 0; k < WIDTH; ++k) {
                sum.v[k] += row.v[k];
            }
        }
    }
    for (int k = 0; k < WIDTH; ++k) {
        sums[line * 32 * WIDTH + lane * WIDTH + k] = sum.v[k];
    }
    __syncthreads();
    if (threadIdx.x < 32 * WIDTH && start + threadIdx.x < COLUMNS) {
        float total = 0.0f;
        for (int other = 0; other < 8; ++other) {
            total += sums[other * 32 * WIDTH + threadIdx.x];
        }
        parts[(i64)blockIdx.y * COLUMNS + start + threadIdx.x] = total;
    }
}

// The same for terms that need no reads ahead of them.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int WIDTH, class F> DEVICE void wide_column_parts(Out<float> parts, F term) {
    wide_column_parts<ROWS, COLUMNS, STRETCH, WIDTH>(parts, term, [](i64, i64, Wide<WIDTH> row) { return row; });
}

// The same for 32 columns, of which `term(row, column)` gives one; may be called again.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, class F> DEVICE void column_parts(Out<float> parts, F term) {
    wide_column_parts<ROWS, COLUMNS, STRETCH, 1>(parts, [&](i64 row, i64 column) { return Wide<1>{{term(row, column)}}; });
    // All threads must have read the sums before they are overwritten.
    __syncthreads();
}

// `body(row, column)` for each four columns of each row; with a STRETCH, what it returns is summed
// over stretches of rows.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, class F> DEVICE void each_four_summed(auto parts, F body) {
    if constexpr (STRETCH == 0) {
        each_four<ROWS, COLUMNS>(body);
    } else {
        wide_column_parts<ROWS, COLUMNS, STRETCH, 4>(parts, body);
    }
}

// y = [y +] sum over stretches of columns FIRST and on, of STRIDE in all: each of LINES lines of a
// block has every LINES-th stretch of its columns.
template <i64 COLUMNS, i64 STRETCHES, i64 FIRST, i64 STRIDE, int LINES, bool ADD>
DEVICE void add_stretches(In<float> parts, OutFloats auto y) {
    const int WIDTH = 256 / LINES;
    int lane = threadIdx.x % WIDTH, line = threadIdx.x / WIDTH;
    i64 column = (i64)blockIdx.x * WIDTH + lane;
    float total = 0.0f;
    if (column < COLUMNS) {
#pragma unroll 8
        for (i64 stretch = line; stretch < STRETCHES; stretch += LINES) {
            total += parts[stretch * STRIDE + FIRST + column];
        }
    }
    if (LINES > 1) {
        SHARED(float, sums, 256);
        sums[threadIdx.x] = total;
        __syncthreads();
        total = 0.0f;
        for (int other = 0; other < LINES && line == 0; ++other) {
            total += sums[other * WIDTH + lane];
        }
    }
    if (line == 0 && column < COLUMNS) {
        give<ADD>(y, column, total);
    }
}

// ---- One launch over many tensors: a block takes a share of one of them. The structure of a
// tensor has its operands, its length and the number of its first block.

// Of COUNT tensors from FIRST on, the one of this block: the last whose first block is not behind
// it. All are kernel arguments, and selecting by constants keeps them there.
template <int FIRST, int COUNT, class T, int TENSORS> DEVICE T tensor_of_block(const T (&tensors)[TENSORS]) {
    if constexpr (COUNT == 1) {
        return tensors[FIRST];
    } else {
        const int HALF = COUNT / 2;
        if ((i64)blockIdx.x < tensors[FIRST + HALF].first_block) {
            return tensor_of_block<FIRST, HALF>(tensors);
        }
        return tensor_of_block<FIRST + HALF, COUNT - HALF>(tensors);
    }
}

// `body(tensor, at)` for each four elements of this block's share.
template <class T, int TENSORS, class F> DEVICE void each_share(const T (&tensors)[TENSORS], F body) {
    const T tensor = tensor_of_block<0, TENSORS>(tensors);
    i64 start = ((i64)blockIdx.x - tensor.first_block) * SHARE;
    for (i64 at = start + 4 * (i64)threadIdx.x; at < start + SHARE && at < tensor.len; at += 4 * 256) {
        body(tensor, at);
    }
}

// Four elements of a tensor; zeros beyond its end.
DEVICE Four load_until(auto x, i64 at, i64 len) {
    if (at + 4 <= len) {
        return load_wide<4>(x, at);
    }
    return map([&](int k) { return at + k < len ? (float)x[at + k] : 0.0f; });
}

DEVICE void store_until(OutFloats auto y, i64 at, i64 len, Four four) {
    if (at + 4 <= len) {
        store_wide(y, at, four);
        return;
    }
    for (int k = 0; k < 4; ++k) {
        if (at + k < len) {
            y[at + k] = four.v[k];
        }
    }
}

template <class T> struct Copied {
    In<float> from;
    Out<T> to;
    i64 len, first_block;
};

// Copies tensors of f32 to tensors of T.
template <class T, int TENSORS> DEVICE void copy_all(const Copied<T> (&tensors)[TENSORS]) {
    each_share(tensors, [&](const Copied<T> &tensor, i64 at) {
        store_until(tensor.to, at, tensor.len, load_until(tensor.from, at, tensor.len));
    });
}

// ---- Draws: Philox 4x32-10, as in `spd_draws`.

struct Words {
    u32 v[4];
};

DEVICE Words philox(In<u32> parameters, u32 block, u32 row, u32 what) {
    u32 key0 = parameters[0], key1 = parameters[1];
    u32 x0 = block, x1 = row, x2 = what, x3 = parameters[2];
    for (int round = 0; round < 10; ++round) {
        u32 high0 = __umulhi(0xD2511F53u, x0), low0 = 0xD2511F53u * x0;
        u32 high1 = __umulhi(0xCD9E8D57u, x2), low1 = 0xCD9E8D57u * x2;
        x0 = high1 ^ x1 ^ key0;
        x1 = low1;
        x2 = high0 ^ x3 ^ key1;
        x3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return Words{{x0, x1, x2, x3}};
}

DEVICE float uniform(u32 word) { return (float)(int)(word >> 8) * (1.0f / 16777216.0f); }

// The number, in the whole batch, of one of ROWS rows of this program.
template <i64 ROWS> DEVICE u32 row_number(In<u32> parameters, i64 row) { return parameters[3] * (u32)ROWS + (u32)row; }

// Draws of four columns of a row of this program.
template <i64 ROWS> DEVICE Four uniforms(In<u32> parameters, i64 row, i64 column, u32 what) {
    Words words = philox(parameters, (u32)(column / 4), row_number<ROWS>(parameters, row), what);
    return map([&](int k) { return uniform(words.v[k]); });
}

template <i64 ROWS> DEVICE float uniform_at(In<u32> parameters, i64 row, u32 column, u32 what) {
    Words words = philox(parameters, column / 4, row_number<ROWS>(parameters, row), what);
    return uniform(words.v[column % 4]);
}

// s = r d + (1 - r): the share of the clean output at a row. Absent operands have no rows.
template <i64 DELTAS, bool ROUTE> DEVICE float share(In<float> delta, In<float> route, i64 row) {
    float d = DELTAS == 0 ? 0.0f : delta[DELTAS == 1 ? 0 : row];
    float r = ROUTE ? route[row] : 1.0f;
    return r * d + (1.0f - r);
}

// ---- Routed rows. A list has room for the numbers of ROOM rows, in order, and then has the place of each row among them. A
// compacted matrix has these rows, then zeros.

const u32 NO_ROW = 0xffffffffu;

// The place of a row in a compacted matrix, or -1.
template <i64 ROOM> DEVICE i64 place_of(In<u32> list, i64 row) {
    u32 place = list[ROOM + row];
    return place < (u32)ROOM ? (i64)place : -1;
}

// Four columns of a row of a compacted matrix: zeros if it is not routed, NaN if there is no room for it.
template <i64 COLUMNS, i64 ROOM> DEVICE Four load_spread(InFloats auto x, In<u32> list, i64 row, i64 column) {
    u32 place = list[ROOM + row];
    return place < (u32)ROOM ? load<COLUMNS>(x, place, column) : fill(place == NO_ROW ? 0.0f : f32(0x7fc00000u));
}

// ---- Elementary functions.

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & INFINITE) != INFINITE; }

template <int TOTALS> DEVICE bool all_finite(const float (&totals)[TOTALS]) {
    bool all = true;
    for (float total : totals) {
        all = all && is_finite(total);
    }
    return all;
}

// Keeps NaN.
DEVICE float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// fmaxf would hide NaN.
DEVICE float relu(float x) { return x < 0.0f ? 0.0f : x; }

// Keeps 0 and NaN.
DEVICE float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// The largest of some numbers, and the sum of the powers of their distances from it.
struct Powers {
    float largest, sum;

    // A power is within 2^-22 + |d| 2^-23 of itself, for d the distance from the largest: rounding
    // of d and of its product, and `fast_exp2`.
    template <int N> DEVICE_MEMBER void add(const Wide<N> &some) {
        const float least = -f32(INFINITE), log2_e = 1.4426950408889634f;
        float most = some.v[0];
        for (int k = 1; k < N; ++k) {
            most = larger(most, some.v[k]);
        }
        if (most > largest) {
            sum *= fast_exp2(log2_e * (largest - most));
            largest = most;
        }
        // Includes NaN, which the sum keeps.
        for (int k = 0; k < N; ++k) {
            sum += some.v[k] == least ? 0.0f : fast_exp2(log2_e * (some.v[k] - largest));
        }
    }
};

// Log-sum-exp of a row by a block, in one pass: each thread keeps its maximum, and rescales its
// sum. Vectors of 16 bytes are aligned in memory, and so do not start with the row if PITCH is no
// multiple of their width: threads have the columns before and after them one by one. A thread
// reads AHEAD vectors before it processes the first of them.
template <int THREADS, i64 COLUMNS, i64 PITCH, int AHEAD = 1> DEVICE float row_log_sum_exp(auto x, i64 row) {
    // A row of two vectors or more has a whole one, wherever it starts.
    constexpr int MOST = is_bf16<decltype(x)> ? 8 : 4, WIDTH = COLUMNS < 2 * MOST ? 1 : MOST;
    const float least = -f32(INFINITE);
    i64 first = row * PITCH, last = first + COLUMNS;
    i64 start = (first + WIDTH - 1) / WIDTH * WIDTH, end = last / WIDTH * WIDTH;
    Powers powers = {least, 0.0f};
    for (i64 at = start + (i64)threadIdx.x * WIDTH; at < end; at += THREADS * WIDTH * AHEAD) {
        Wide<WIDTH> some[AHEAD];
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (at + ahead * THREADS * WIDTH < end) {
                some[ahead] = load_wide<WIDTH>(x, at + ahead * THREADS * WIDTH);
            }
        }
        for (int ahead = 0; ahead < AHEAD && at + ahead * THREADS * WIDTH < end; ++ahead) {
            powers.add(some[ahead]);
        }
    }
    if (first + threadIdx.x < start) {
        powers.add(load_wide<1>(x, first + threadIdx.x));
    }
    if (end + threadIdx.x < last) {
        powers.add(load_wide<1>(x, end + threadIdx.x));
    }
    float largest = powers.largest, sum = powers.sum, all = block_max<THREADS>(largest);
    sum = block_sum<THREADS>(largest == least && sum == 0.0f ? 0.0f : sum * expf(largest - all));
    return all + logf(sum);
}

// x Phi(x), and its slope Phi(x) + x phi(x).
DEVICE float normal_below(float x) { return 0.5f * erfcf(-0.70710678118654752f * x); }

DEVICE float gelu(float x) { return x * normal_below(x); }

DEVICE float gelu_slope(float x) { return normal_below(x) + x * (0.39894228040143268f * expf(-0.5f * x * x)); }

// GPT-2's: x logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
DEVICE float gelu_tanh(float x) { return x * logistic(1.5957691216057308f * x * (1.0f + 0.044715f * x * x)); }

DEVICE float gelu_tanh_slope(float x) {
    float cubic = 0.044715f * x * x;
    float s = logistic(1.5957691216057308f * x * (1.0f + cubic));
    return s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 3.0f * cubic);
}
