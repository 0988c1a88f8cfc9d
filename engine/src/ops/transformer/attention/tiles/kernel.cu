// Attention of bf16 heads on tensor cores. A block of four warps has a tile of rows (queries, or
// keys for their gradients), and a warp 16 M of them. Tiles of the other side pass by in shared
// memory: one is multiplied while the next arrives. Scores and their slopes stay in registers: a
// lane's numbers of a sum are those of a left factor of the next product, once rounded to bf16.
// Products are 16 x 8 x 16 by `multiply_add`, which says the elements that a lane has.

// The next multiple.
DEVICE constexpr int whole(int n, int of) { return (n + of - 1) / of * of; }

// Elements from one row of a tile to the next: the eight rows of a matrix lie in different banks.
DEVICE constexpr int pitch(int columns) { return columns + 8; }

// f32s of shared memory of a tile.
DEVICE constexpr int room(int lines, int columns) { return lines * pitch(columns) / 2; }

// A warp's sum of products: M times 16 rows by N times 8 columns.
template <int M, int N> struct Sums {
    float v[M][N][4];

    // `of(number, m, n, i)` for each number of this lane.
    template <class F> DEVICE_MEMBER void each(F of) {
#pragma unroll
        for (int at = 0; at < 4 * M * N; ++at) {
            int m = at / (4 * N), n = at / 4 % N, i = at % 4;
            of(v[m][n][i], m, n, i);
        }
    }
};

// `of(m, half)` for each row of a sum that a lane has numbers of.
template <int M, class F> DEVICE void each_row(F of) {
#pragma unroll
    for (int row = 0; row < 2 * M; ++row) {
        of(row / 2, row % 2);
    }
}

// The rows of a warp as left factors: the first KEPT of their steps in registers, and others from a
// tile each time.
template <int M, int STEPS, int KEPT> struct Rows {
    Shared<bf16> tile;
    int row;
    u32 kept[KEPT > 0 ? KEPT : 1][M][4];

    DEVICE_MEMBER void load(u32 (&left)[M][4], int step) const {
        int lane = threadIdx.x % 32, at = (row + lane % 16) * pitch(16 * STEPS) + 16 * step + lane / 16 * 8;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            load_matrices<false>(left[m], tile, at + 16 * m * pitch(16 * STEPS));
        }
    }

    DEVICE_MEMBER void keep() {
#pragma unroll
        for (int step = 0; step < KEPT; ++step) {
            load(kept[step], step);
        }
    }

    DEVICE_MEMBER void get(u32 (&left)[M][4], int step) const {
        if (step >= KEPT) {
            load(left, step);
            return;
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                left[m][i] = kept[step][m][i];
            }
        }
    }
};

// Tiles of heads, with zeros in columns up to a multiple of 16; those that pass have PASSING rows.
template <class H, int M, int PASSING> struct Tiles {
    static const int rows = 64 * M, width = whole(H::size, 16), steps = width / 16, passing = PASSING;
    static const int own_room = room(rows, width), passing_room = room(PASSING, width);
    static const int count = (H::positions + rows - 1) / rows;
    typedef Sums<M, width / 8> Result;
    // Left factors of its own rows: of more than eight steps of 16 rows, one has registers beside
    // the sums.
    static const int kept = M * steps <= 8 ? steps : 1;
    typedef Rows<M, steps, kept> Left;
};

// Sums of wide heads leave fewer registers for others.
template <class H> using ForwardTiles = Tiles<H, 2, H::size <= 96 ? 64 : 48>;
template <class H> using GradTiles = Tiles<H, H::size <= 64 ? 2 : 1, 32>;

// The first row of this warp.
template <int M> DEVICE int warp_row() { return threadIdx.x / 32 * (16 * M); }

constexpr float LOG2_OF_E = 1.4426950408889634f, LN_OF_2 = 0.6931471805599453f;

// A head in an operand: its first column, and the columns of the operand.
struct Columns {
    i64 first, all;
};

template <class H> DEVICE Columns q_columns(int head) { return {head * H::step, H::q_stride}; }
template <class H> DEVICE Columns k_columns(int head) { return {H::k_first + head * H::step, H::k_stride}; }
template <class H> DEVICE Columns v_columns(int head) { return {H::v_first + head * H::step, H::k_stride}; }
template <class H> DEVICE Columns y_columns(int head) { return {head * H::size, H::heads * H::size}; }

// Copies rows of a head of batch row `b` from `position` on; zeros beyond the last position.
template <class H, int LINES> DEVICE void copy_head(Shared<bf16> tile, In<bf16> from, Columns columns, int b, int position) {
    const int width = whole(H::size, 16), groups = width / 8, lines = TILE_THREADS / groups;
    int own = threadIdx.x / groups, column = threadIdx.x % groups * 8;
    if (TILE_THREADS % groups != 0 && own >= lines) {
        return;
    }
    i64 first = (b * H::positions + position + own) * columns.all + columns.first + column;
#pragma unroll
    for (int start = 0; start < LINES; start += lines) {
        int line = start + own, at = line * pitch(width) + column;
        if (LINES % lines != 0 && line >= LINES) {
            continue;
        }
        bool there = position + line < H::positions;
        i64 source = first + start * columns.all;
        if (H::size % 8 == 0) {
            copy_later(tile, at, from, source, there && column < H::size);
            continue;
        }
        for (int k = 0; k < 8; ++k) {
            tile[at + k] = there && column + k < H::size ? (float)from[source + k] : 0.0f;
        }
    }
}

// Rotates the rows of a tile by their positions.
template <class H, int LINES> DEVICE void turn_head(Shared<bf16> tile, In<float> table, int position) {
    const int half = H::turned / 2, groups = (half + 3) / 4;
    for (int group = threadIdx.x; group < LINES * groups; group += TILE_THREADS) {
        int line = group / groups, column = group % groups * 4, at = line * pitch(whole(H::size, 16)) + column;
        if (position + line >= H::positions) {
            continue;
        }
        i64 angle = (position + line) * H::turned + column;
        Four low = load_some<half>(tile, at, column), high = load_some<half>(tile, at + half, column);
        Four cosine = load_some<half>(table, angle, column), sine = load_some<half>(table, angle + half, column);
        store_some<half>(tile, at, column, map([&](int k) { return low.v[k] * cosine.v[k] - high.v[k] * sine.v[k]; }));
        store_some<half>(tile, at + half, column, map([&](int k) { return high.v[k] * cosine.v[k] + low.v[k] * sine.v[k]; }));
    }
}

// y = [y +] the sums of a block, through shared memory; with TURN rotated backwards.
template <class H, bool TURN, bool ADD, int M, int N>
DEVICE void store_head(Shared<float> tile, Sums<M, N> &sums, OutFloats auto y, In<float> table, Columns columns, int b,
                       int position) {
    const int p = pitch(8 * N), half = H::turned / 2, groups = (H::size + 3) / 4;
    int lane = threadIdx.x % 32, own = (warp_row<M>() + lane / 4) * p + lane % 4 * 2;
    sums.each([&](float number, int m, int n, int k) { tile[own + (16 * m + k / 2 * 8) * p + 8 * n + k % 2] = number; });
    __syncthreads();
    for (int group = threadIdx.x; group < 64 * M * groups; group += TILE_THREADS) {
        int line = group / groups, column = group % groups * 4;
        if (position + line >= H::positions) {
            continue;
        }
        Four four = load_wide<4>(tile, line * p + column);
        if (TURN) {
            four = map([&](int k) {
                int at = column + k, pair = at < half ? at : at - half;
                if (at >= H::turned) {
                    return four.v[k];
                }
                float other = at < half ? tile[line * p + at + half] : -tile[line * p + pair];
                i64 angle = (position + line) * H::turned + pair;
                return four.v[k] * table[angle] + other * table[angle + half];
            });
        }
        i64 at = (b * H::positions + position + line) * columns.all + columns.first + column;
        if (H::size % 4 == 0) {
            give<4, ADD>(y, at / 4, 0, four);
            continue;
        }
        for (int k = 0; k < 4; ++k) {
            if (column + k < H::size) {
                give<ADD>(y, at + k, four.v[k]);
            }
        }
    }
}

// Products of a left factor by two matrices of eight columns.
template <int M, int N> DEVICE void add_two(Sums<M, N> &sums, int n, const u32 (&left)[M][4], const u32 (&right)[4]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
        multiply_add(sums.v[m][n], left[m], right[0], right[1]);
        multiply_add(sums.v[m][n + 1], left[m], right[2], right[3]);
    }
}

// sums += A B^T, of a warp's rows by those of a tile from `first` on.
template <int M, int N, int STEPS, int KEPT>
DEVICE void add_dots(Sums<M, N> &sums, const Rows<M, STEPS, KEPT> &a, Shared<bf16> b, int first) {
    const int p = pitch(16 * STEPS);
    int lane = threadIdx.x % 32, own = (first + lane / 16 * 8 + lane % 8) * p + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 left[M][4];
        a.get(left, step);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 right[4];
            load_matrices<false>(right, b, own + 8 * n * p + 16 * step);
            add_two(sums, n, left, right);
        }
    }
}

// sums += P B, of a warp's weights, rounded, by the rows of a tile from `first` on.
template <int M, int N, int COLUMNS>
DEVICE void add_rows(Sums<M, N> &sums, const Sums<M, COLUMNS> &weights, Shared<bf16> b, int first) {
    const int p = pitch(8 * N);
    int lane = threadIdx.x % 32, own = (first + lane % 16) * p + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < COLUMNS / 2; ++step) {
        u32 left[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&of)[4] = weights.v[m][2 * step + i / 2];
                left[m][i] = two_bf16(of[i % 2 * 2], of[i % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 right[4];
            load_matrices<true>(right, b, own + 16 * step * p + 8 * n);
            add_two(sums, n, left, right);
        }
    }
}

// The document of a position, or of the last one.
template <class H> DEVICE float document_of(In<float> documents, int b, int t) {
    return documents[(i64)b * H::positions + (t < H::positions ? t : H::positions - 1)];
}

// Scores of keys that a query does not see become -infinity. Rows are queries or, if KEYS, keys.
template <class H, bool KEYS, int M, int N>
DEVICE void mask_scores(Sums<M, N> &scores, In<float> documents, int b, int first_row, int first_column) {
    int lane = threadIdx.x % 32, row = first_row + lane / 4, column = first_column + lane % 4 * 2;
    float of_row[M][2];
    each_row<M>([&](int m, int half) {
        of_row[m][half] = H::documents ? document_of<H>(documents, b, row + 16 * m + 8 * half) : 0.0f;
    });
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            int across = column + 8 * n + k;
            float of_column = H::documents ? document_of<H>(documents, b, across) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * M; ++i) {
                int down = row + 8 * i, query = KEYS ? across : down, key = KEYS ? down : across;
                bool seen = H::sees(query, key) && of_row[i / 2][i % 2] == of_column;
                float &score = scores.v[i / 2][n][i % 2 * 2 + k];
                score = seen ? score : -f32(INFINITE);
            }
        }
    }
}

// Whether all of so many queries see all of so many keys. Documents do not fall along a row.
template <class H> DEVICE bool sees_all(In<float> documents, int b, int query, int queries, int key, int keys) {
    if (!H::sees_all(query, queries, key, keys)) {
        return false;
    }
    int last = query + queries > key + keys ? query + queries : key + keys;
    return !H::documents || document_of<H>(documents, b, query < key ? query : key) == document_of<H>(documents, b, last - 1);
}

// The tiles of ROWS positions that have a part of a range and, if documents are apart, any document
// of `rows` positions from `at` on.
template <class H, int ROWS> DEVICE Range tiles_of(Range range, In<float> documents, int b, int at, int rows) {
    Range tiles = {range.first / ROWS, (range.end + ROWS - 1) / ROWS};
    if (H::documents) {
        float lowest = document_of<H>(documents, b, at), highest = document_of<H>(documents, b, at + rows - 1);
        while (document_of<H>(documents, b, tiles.first * ROWS + ROWS - 1) < lowest) {
            ++tiles.first;
        }
        while (document_of<H>(documents, b, (tiles.end - 1) * ROWS) > highest) {
            --tiles.end;
        }
    }
    return tiles;
}

// One tile of queries of one head. Weights are 2 to the power of scores less the largest so far.
template <class H>
DEVICE void attention_tiles(In<bf16> q, In<bf16> k, In<bf16> v, In<float> table, In<float> documents, OutFloats auto y,
                            Out<float> lse, float scale) {
    typedef ForwardTiles<H> T;
    const int M = 2, KEYS = T::passing;
    LAUNCHED(memory, T::own_room + 4 * T::passing_room);
    Shared<bf16> queries = part_of<bf16>(memory, 0);
    int unit = blockIdx.x / T::count, b = unit / H::heads, head = unit % H::heads, kv = head / H::group;
    // Of causal tiles, the last have the most keys; they start first.
    int position = (T::count - 1 - (int)(blockIdx.x % T::count)) * T::rows, lane = threadIdx.x % 32;
    const float factor = scale * LOG2_OF_E;
    auto passing = [&](int stage, int which) { return part_of<bf16>(memory, T::own_room + (2 * stage + which) * T::passing_room); };
    auto copy = [&](int first, int stage) {
        copy_head<H, KEYS>(passing(stage, 0), k, k_columns<H>(kv), b, first);
        copy_head<H, KEYS>(passing(stage, 1), v, v_columns<H>(kv), b, first);
        close_group();
    };
    Range tiles = tiles_of<H, KEYS>(H::keys_of(position, T::rows), documents, b, position, T::rows);
    copy_head<H, T::rows>(queries, q, q_columns<H>(head), b, position);
    close_group();
    copy(tiles.first * KEYS, 0);
    await_copies<1>();
    __syncthreads();
    if constexpr (H::rotary) {
        turn_head<H, T::rows>(queries, table, position);
        __syncthreads();
    }
    typename T::Left left = {queries, warp_row<M>()};
    left.keep();
    float largest[M][2], total[M][2];
    typename T::Result result = {};
    each_row<M>([&](int m, int half) { largest[m][half] = -f32(INFINITE), total[m][half] = 0.0f; });
    int stage = 0;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage ^= 1) {
        await_copies<0>();
        __syncthreads();
        int first = tile * KEYS;
        if (tile + 1 < tiles.end) {
            copy(first + KEYS, stage ^ 1);
        }
        Shared<bf16> keys = passing(stage, 0);
        if constexpr (H::rotary) {
            turn_head<H, KEYS>(keys, table, first);
            __syncthreads();
        }
        if (!H::sees_any(position + warp_row<M>(), 16 * M, first, KEYS)) {
            continue;
        }
        Sums<M, KEYS / 8> scores = {};
        add_dots(scores, left, keys, 0);
        if (!sees_all<H>(documents, b, position + warp_row<M>(), 16 * M, first, KEYS)) {
            mask_scores<H, false>(scores, documents, b, position + warp_row<M>(), first);
        }
        each_row<M>([&](int m, int half) {
            float most = -f32(INFINITE);
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
                most = fmaxf(most, fmaxf(scores.v[m][n][2 * half], scores.v[m][n][2 * half + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            most = fmaxf(largest[m][half], factor * most);
            // A row that has seen no key has no weights.
            float base = most == -f32(INFINITE) ? 0.0f : most;
            float rescale = fast_exp2(largest[m][half] - base), sum = 0.0f;
            largest[m][half] = most;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores.v[m][n][i] = fast_exp2(fmaf(scores.v[m][n][i], factor, -base));
                    sum += scores.v[m][n][i];
                }
            }
            total[m][half] = fmaf(total[m][half], rescale, sum);
#pragma unroll
            for (int n = 0; n < 2 * T::steps; ++n) {
                result.v[m][n][2 * half] *= rescale;
                result.v[m][n][2 * half + 1] *= rescale;
            }
        });
        add_rows(result, scores, passing(stage, 1), 0);
    }
    each_row<M>([&](int m, int half) {
        float sum = total[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int t = position + warp_row<M>() + 16 * m + 8 * half + lane / 4;
        if (lane % 4 == 0 && t < H::positions) {
            lse[(i64)unit * H::positions + t] = fmaf(largest[m][half], LN_OF_2, logf(sum));
        }
        float share = 1.0f / sum;
#pragma unroll
        for (int n = 0; n < 2 * T::steps; ++n) {
            result.v[m][n][2 * half] *= share;
            result.v[m][n][2 * half + 1] *= share;
        }
    });
    __syncthreads();
    store_head<H, false, false>(memory, result, y, table, y_columns<H>(head), b, position);
}

// Gradients of one tile of keys and values, from all queries of all heads that read them. Scores
// are transposed: their rows are keys.
template <class H, bool ADD_K, bool ADD_V>
DEVICE void attention_tiles_grad_kv(In<bf16> q, In<bf16> k, In<bf16> v, In<float> table, In<float> documents, In<float> lse,
                                    In<bf16> g, In<float> dots, OutFloats auto of_k, OutFloats auto of_v, float scale) {
    typedef GradTiles<H> T;
    const int M = T::rows / 64, QUERIES = T::passing;
    const int numbers_at = 2 * T::own_room + 4 * T::passing_room;
    LAUNCHED(memory, numbers_at + 4 * QUERIES);
    Shared<bf16> keys = part_of<bf16>(memory, 0), values = part_of<bf16>(memory, T::own_room);
    // Of each query, its log-sum-exp to base two and its dot.
    Shared<float> numbers = part_of(memory, numbers_at);
    int b = blockIdx.x / T::count / H::kv_heads, kv = blockIdx.x / T::count % H::kv_heads;
    int first = blockIdx.x % T::count * T::rows, lane = threadIdx.x % 32;
    const float factor = scale * LOG2_OF_E;
    auto passing = [&](int stage, int which) { return part_of<bf16>(memory, 2 * T::own_room + (2 * stage + which) * T::passing_room); };
    auto copy = [&](int head, int position, int stage) {
        copy_head<H, QUERIES>(passing(stage, 0), q, q_columns<H>(head), b, position);
        copy_head<H, QUERIES>(passing(stage, 1), g, y_columns<H>(head), b, position);
        close_group();
    };
    // The number that this thread gives to the tile.
    auto number = [&](int head, int position) {
        int t = position + threadIdx.x / 2;
        if (threadIdx.x >= 2 * QUERIES || t >= H::positions) {
            return 0.0f;
        }
        i64 at = (i64)(b * H::heads + head) * H::positions + t;
        return threadIdx.x % 2 == 0 ? lse[at] * LOG2_OF_E : dots[at];
    };
    auto keep_number = [&](int stage, float number) {
        if (threadIdx.x < 2 * QUERIES) {
            numbers[stage * (2 * QUERIES) + threadIdx.x] = number;
        }
    };
    Range tiles = tiles_of<H, QUERIES>(H::queries_of(first, T::rows), documents, b, first, T::rows);
    copy_head<H, T::rows>(keys, k, k_columns<H>(kv), b, first);
    copy_head<H, T::rows>(values, v, v_columns<H>(kv), b, first);
    close_group();
    copy(kv * H::group, tiles.first * QUERIES, 0);
    float next = number(kv * H::group, tiles.first * QUERIES);
    await_copies<1>();
    __syncthreads();
    if constexpr (H::rotary) {
        turn_head<H, T::rows>(keys, table, first);
        __syncthreads();
    }
    typename T::Left left_keys = {keys, warp_row<M>()};
    // With two sums there are fewer registers.
    Rows<M, T::steps, M * T::steps == 8 ? T::kept - 1 : T::kept> left_values = {values, warp_row<M>()};
    left_keys.keep();
    left_values.keep();
    typename T::Result sum_k = {}, sum_v = {};
    int stage = 0;
#pragma unroll 1
    for (int head = kv * H::group; head < (kv + 1) * H::group; ++head) {
#pragma unroll 1
        for (int tile = tiles.first; tile < tiles.end; ++tile, stage ^= 1) {
            keep_number(stage, next);
            await_copies<0>();
            __syncthreads();
            bool last = tile + 1 == tiles.end;
            if (!last || head + 1 < (kv + 1) * H::group) {
                int next_head = head + last;
                int next_position = (last ? tiles.first : tile + 1) * QUERIES;
                copy(next_head, next_position, stage ^ 1);
                next = number(next_head, next_position);
            }
            Shared<bf16> queries = passing(stage, 0), gradients = passing(stage, 1);
            int position = tile * QUERIES;
            if constexpr (H::rotary) {
                turn_head<H, QUERIES>(queries, table, position);
                __syncthreads();
            }
            if (!H::sees_any(position, QUERIES, first + warp_row<M>(), 16 * M)) {
                continue;
            }
            // Few at a time, so that the kept rows fit into registers beside the sums.
            const int SOME = 16;
#pragma unroll
            for (int start = 0; start < QUERIES; start += SOME) {
                Sums<M, SOME / 8> weights = {}, slopes;
                add_dots(weights, left_keys, queries, start);
                if (!sees_all<H>(documents, b, position + start, SOME, first + warp_row<M>(), 16 * M)) {
                    mask_scores<H, true>(weights, documents, b, first + warp_row<M>(), position + start);
                }
                int own = 2 * (stage * QUERIES + start + lane % 4 * 2);
#pragma unroll
                for (int n = 0; n < SOME / 8; ++n) {
                    Four of = load_wide<4>(numbers, own + 16 * n);
#pragma unroll
                    for (int m = 0; m < M; ++m) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            weights.v[m][n][i] = fast_exp2(fmaf(weights.v[m][n][i], factor, -of.v[i % 2 * 2]));
                            slopes.v[m][n][i] = -of.v[i % 2 * 2 + 1];
                        }
                    }
                }
                add_rows(sum_v, weights, gradients, start);
                add_dots(slopes, left_values, gradients, start);
                slopes.each([&](float &slope, int m, int n, int i) { slope *= weights.v[m][n][i]; });
                add_rows(sum_k, slopes, queries, start);
            }
        }
    }
    sum_k.each([&](float &sum, int, int, int) { sum *= scale; });
    __syncthreads();
    store_head<H, H::rotary, ADD_K>(memory, sum_k, of_k, table, k_columns<H>(kv), b, first);
    __syncthreads();
    store_head<H, false, ADD_V>(memory, sum_v, of_v, table, v_columns<H>(kv), b, first);
}

// The gradient of one tile of queries of one head.
template <class H, bool ADD>
DEVICE void attention_tiles_grad_q(In<bf16> q, In<bf16> k, In<bf16> v, In<float> table, In<float> documents, In<float> lse,
                                   In<bf16> g, In<float> dots, OutFloats auto of_q, float scale) {
    typedef GradTiles<H> T;
    const int M = T::rows / 64, KEYS = T::passing;
    LAUNCHED(memory, 2 * T::own_room + 4 * T::passing_room);
    Shared<bf16> queries = part_of<bf16>(memory, 0), gradients = part_of<bf16>(memory, T::own_room);
    int unit = blockIdx.x / T::count, b = unit / H::heads, head = unit % H::heads, kv = head / H::group;
    int position = (T::count - 1 - (int)(blockIdx.x % T::count)) * T::rows, lane = threadIdx.x % 32;
    const float factor = scale * LOG2_OF_E;
    auto passing = [&](int stage, int which) { return part_of<bf16>(memory, 2 * T::own_room + (2 * stage + which) * T::passing_room); };
    auto copy = [&](int first, int stage) {
        copy_head<H, KEYS>(passing(stage, 0), k, k_columns<H>(kv), b, first);
        copy_head<H, KEYS>(passing(stage, 1), v, v_columns<H>(kv), b, first);
        close_group();
    };
    Range tiles = tiles_of<H, KEYS>(H::keys_of(position, T::rows), documents, b, position, T::rows);
    copy_head<H, T::rows>(queries, q, q_columns<H>(head), b, position);
    copy_head<H, T::rows>(gradients, g, y_columns<H>(head), b, position);
    close_group();
    copy(tiles.first * KEYS, 0);
    float of_lse[M][2], of_dots[M][2];
    each_row<M>([&](int m, int half) {
        int t = position + warp_row<M>() + 16 * m + 8 * half + lane / 4;
        i64 at = (i64)unit * H::positions + t;
        of_lse[m][half] = t < H::positions ? lse[at] * LOG2_OF_E : 0.0f;
        of_dots[m][half] = t < H::positions ? dots[at] : 0.0f;
    });
    await_copies<1>();
    __syncthreads();
    if constexpr (H::rotary) {
        turn_head<H, T::rows>(queries, table, position);
        __syncthreads();
    }
    typename T::Left left_queries = {queries, warp_row<M>()}, left_gradients = {gradients, warp_row<M>()};
    left_queries.keep();
    left_gradients.keep();
    typename T::Result result = {};
    int stage = 0;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage ^= 1) {
        await_copies<0>();
        __syncthreads();
        int first = tile * KEYS;
        if (tile + 1 < tiles.end) {
            copy(first + KEYS, stage ^ 1);
        }
        Shared<bf16> keys = passing(stage, 0), values = passing(stage, 1);
        if constexpr (H::rotary) {
            turn_head<H, KEYS>(keys, table, first);
            __syncthreads();
        }
        if (!H::sees_any(position + warp_row<M>(), 16 * M, first, KEYS)) {
            continue;
        }
        Sums<M, KEYS / 8> weights = {}, slopes;
        add_dots(weights, left_queries, keys, 0);
        if (!sees_all<H>(documents, b, position + warp_row<M>(), 16 * M, first, KEYS)) {
            mask_scores<H, false>(weights, documents, b, position + warp_row<M>(), first);
        }
        weights.each([&](float &weight, int m, int n, int i) {
            weight = fast_exp2(fmaf(weight, factor, -of_lse[m][i / 2]));
            slopes.v[m][n][i] = -of_dots[m][i / 2];
        });
        add_dots(slopes, left_gradients, values, 0);
        slopes.each([&](float &slope, int m, int n, int i) { slope *= weights.v[m][n][i]; });
        add_rows(result, slopes, keys, 0);
    }
    result.each([&](float &sum, int, int, int) { sum *= scale; });
    __syncthreads();
    store_head<H, H::rotary, ADD>(memory, result, of_q, table, q_columns<H>(head), b, position);
}
