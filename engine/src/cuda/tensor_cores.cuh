// Several sources include this, and one program may have them all.
#ifndef TENSOR_CORES
#define TENSOR_CORES

// Products of bf16 tiles by the warps of a block, summed in f32. Tiles are copied asynchronously to
// shared memory, loaded as matrices of 8 x 8, and multiplied 16 x 8 x 16 at a time by
// `multiply_add`, which says the elements that a lane has.

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
