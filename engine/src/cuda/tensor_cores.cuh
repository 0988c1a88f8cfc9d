// Several sources include this, and one program may have them all.
#ifndef TENSOR_CORES
#define TENSOR_CORES

// Products of bf16 tiles by the warps of a block, summed in f32. Tiles are copied asynchronously to
// shared memory, loaded as matrices of 8 x 8, and multiplied 16 x 8 x 16 at a time by `mma.sync`.
//
// A lane of a warp has, with g = lane / 4 and q = lane % 4: of a matrix of 8 x 8, elements 2q and
// 2q + 1 of row g; of a sum of 16 x 8, those of row g, then those of row g + 8.

#ifndef EMULATED
DEVICE u32 shared_address(Shared<bf16> memory, int at) {
    return (u32)__cvta_generic_to_shared(memory + at);
}

// Starts an asynchronous copy of eight elements; zeros if not `there`. See `await_copies`.
DEVICE void copy_later(Shared<bf16> to, int at, In<bf16> from, i64 first, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to, at)),
                 "l"(from + (there ? first : 0)), "r"(there ? 16 : 0)
                 : "memory");
}

// Copies since the last call become one group.
DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT groups of this thread are unfinished.
template <int LEFT> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Four matrices; lane 8 i + r has the start of row r of matrix i.
template <bool TURNED> DEVICE void load_matrices(u32 (&m)[4], Shared<bf16> memory, int at) {
    if (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(shared_address(memory, at))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(shared_address(memory, at))
                     : "memory");
    }
}

// sum += a b. a: 16 x 16 as matrices (upper, lower), first its left half, then its right one; b: 16
// x 8 as two matrices.
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE Shared<bf16> bf16_part(Shared<float> memory, int first) { return reinterpret_cast<bf16 *>(memory + first); }
#else
DEVICE void copy_later(Shared<bf16> to, int at, In<bf16> from, i64 first, bool there) {
    const bf16 *source = nullptr;
    // Every element is checked and counted.
    for (int k = 7; k >= 0; --k) {
        to[at + k];
        source = there ? &from[first + k] : nullptr;
    }
    emulator::must_be_aligned(&to[at], 16);
    emulator::must_be_aligned(source, 16);
    emulator::copy_later(&to[at], source, 16);
}

DEVICE void close_group() { emulator::close_group(); }

template <int LEFT> DEVICE void await_copies() { emulator::await_copies(LEFT); }

template <bool TURNED> DEVICE void load_matrices(u32 (&m)[4], Shared<bf16> memory, int at) {
    emulator::must_be_aligned(&memory[at], 16);
    auto starts = emulator::show(at);
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) {
        u32 both[2];
        for (int k = 0; k < 2; ++k) {
            int row = TURNED ? 2 * q + k : g, column = TURNED ? g : 2 * q + k;
            both[k] = memory[starts.of(8 * i + row) + column].bits;
        }
        m[i] = both[0] | both[1] << 16;
    }
}

struct Factors {
    u32 a[4], b[2];
};

DEVICE float bf16_at(u32 both, int k) { return f32(k == 0 ? both << 16 : both & 0xffff0000u); }

DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto factors = emulator::show(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    for (int at = 0; at < 4; ++at) {
        int lower = at / 2, column = 2 * q + at % 2;
        // More exact than a device, which sums in f32 in an unspecified order.
        double total = sum[at];
        for (int k = 0; k < 16; ++k) {
            const int half = k / 8, owner = k % 8 / 2;
            float left = bf16_at(factors.of(4 * g + owner).a[lower + 2 * half], k % 2);
            float right = bf16_at(factors.of(4 * column + owner).b[half], k % 2);
            total += (double)left * right;
        }
        sum[at] = (float)total;
    }
}

DEVICE Shared<bf16> bf16_part(Shared<float> memory, int first) {
    Shared<float> part = part_of(memory, first);
    return {(bf16 *)part.start, 2 * part.len, part.accesses};
}
#endif

// The next multiple.
DEVICE constexpr int whole(int n, int of) { return (n + of - 1) / of * of; }

// Elements from one row of a tile to the next: the eight rows of a matrix lie in different banks.
DEVICE constexpr int pitch(int columns) { return columns + 8; }

// f32s of shared memory of a tile.
DEVICE constexpr int room(int lines, int columns) { return lines * pitch(columns) / 2; }

// Copies a tile of a matrix of ROWS x COLUMNS, by THREADS threads; zeros beyond its end.
template <int THREADS, int LINES, int WIDTH, i64 ROWS, i64 COLUMNS>
DEVICE void copy_tile(Shared<bf16> tile, In<bf16> from, i64 first_row, i64 first_column) {
    const int groups = WIDTH / 8;
    for (int group = threadIdx.x; group < LINES * groups; group += THREADS) {
        int line = group / groups, at = line * pitch(WIDTH) + group % groups * 8;
        i64 row = first_row + line, column = first_column + group % groups * 8;
        if (COLUMNS % 8 == 0) {
            copy_later(tile, at, from, row * COLUMNS + column, row < ROWS && column < COLUMNS);
            continue;
        }
        for (int k = 0; k < 8; ++k) {
            bool there = row < ROWS && column + k < COLUMNS;
            tile[at + k] = there ? (float)from[row * COLUMNS + column + k] : 0.0f;
        }
    }
}

// A warp's sum of products: M times 16 rows by N times 8 columns.
template <int M, int N> struct Sums {
    float v[M][N][4];

    DEVICE_MEMBER void clear() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                v[m][n][0] = v[m][n][1] = v[m][n][2] = v[m][n][3] = 0.0f;
            }
        }
    }

    // += A B, from row `row` of A and column `column` of B on, over K columns of A and rows of B.
    // Either may be stored transposed, in tiles of so many columns.
    template <int K, bool A_TRANSPOSED, int A_COLUMNS, bool B_TRANSPOSED, int B_COLUMNS>
    DEVICE_MEMBER void add(Shared<bf16> a, int row, Shared<bf16> b, int column) {
        const int a_pitch = pitch(A_COLUMNS), b_pitch = pitch(B_COLUMNS);
        int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int k = 0; k < K; k += 32) {
            u32 left[M][2][4];
#pragma unroll
            for (int m = 0; m < M; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int i = row + 16 * m, j = k + 16 * half;
                    int at = A_TRANSPOSED ? (j + lane % 8 + lane / 16 * 8) * a_pitch + i + lane / 8 % 2 * 8
                                          : (i + lane % 16) * a_pitch + j + lane / 16 * 8;
                    load_matrices<A_TRANSPOSED>(left[m][half], a, at);
                }
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                u32 right[4];
                int j = column + 8 * n;
                int at = B_TRANSPOSED ? (j + lane % 8) * b_pitch + k + lane / 8 * 8 : (k + lane) * b_pitch + j;
                load_matrices<!B_TRANSPOSED>(right, b, at);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    multiply_add(v[m][n], left[m][0], right[0], right[1]);
                    multiply_add(v[m][n], left[m][1], right[2], right[3]);
                }
            }
        }
    }

    // Four columns of a row. Of the 16 rows `m` and the 8 columns `n`, a lane has two columns of
    // two rows; after an exchange with its neighbour it has four columns of one row: row g or, in
    // odd lanes, g + 8, from column 4 (q / 2) on.
    DEVICE_MEMBER Four four(int m, int n) const {
        const float(&own)[4] = v[m][n];
        bool odd = threadIdx.x % 2 == 1;
        float first = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[2], 1);
        float second = __shfl_xor_sync(0xffffffffu, odd ? own[1] : own[3], 1);
        return odd ? Four{{first, second, own[2], own[3]}} : Four{{own[0], own[1], first, second}};
    }
};

// Row and column of those four, in their 16 x 8.
DEVICE int row_of_four() { return threadIdx.x % 32 / 4 + threadIdx.x % 2 * 8; }
DEVICE int column_of_four() { return threadIdx.x % 4 / 2 * 4; }

#endif
