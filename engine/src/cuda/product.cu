// out = [out +] alpha a b [+ bias] for each product of a batch: for products that are too thin for
// cublasLt, and those that it refuses. A block computes a tile of ROWS x COLUMNS of one product,
// each of its 256 threads H x W elements of it, in steps of DEPTH along k. Sizes are words of the
// launch, so few kernels serve all products.

const int DEPTH = 16;

// Elements from one row, column and product of the batch to the next.
struct Strides {
    u32 row, column, step;

    DEVICE_MEMBER i64 start(u32 batch) const { return (i64)batch * step; }
    DEVICE_MEMBER i64 at(u32 i, u32 j) const { return (i64)i * row + (i64)j * column; }
};

template <int ROWS, int COLUMNS, int H, int W, bool ADD, bool BIAS>
DEVICE void multiply_tiles(InFloats auto a, InFloats auto b, InFloats auto bias, OutFloats auto out, u32 alpha, u32 m, u32 n, u32 k,
                           Strides of_a, Strides of_b, Strides of_out) {
    SHARED(float, left, DEPTH * (ROWS + 1));
    SHARED(float, right, DEPTH * (COLUMNS + 1));
    const int down = ROWS / H, across = COLUMNS / W;
    u32 tiles_across = (n + COLUMNS - 1) / COLUMNS, tiles = tiles_across * ((m + ROWS - 1) / ROWS);
    u32 tile = blockIdx.x % tiles, batch = blockIdx.x / tiles;
    u32 first_row = tile / tiles_across * ROWS, first_column = tile % tiles_across * COLUMNS;
    i64 a_start = of_a.start(batch), b_start = of_b.start(batch), out_start = of_out.start(batch);
    u32 thread = threadIdx.x, i = thread / across, j = thread % across;
    float sum[H][W] = {};
    for (u32 first = 0; first < k; first += DEPTH) {
        __syncthreads();
        // Adjacent threads read adjacent elements.
        for (u32 at = thread; at < ROWS * DEPTH; at += 256) {
            bool along = of_a.column == 1;
            u32 row = along ? at / DEPTH : at % ROWS, depth = along ? at % DEPTH : at / ROWS;
            bool inside = first_row + row < m && first + depth < k;
            left[depth * (ROWS + 1) + row] = inside ? (float)a[a_start + of_a.at(first_row + row, first + depth)] : 0.0f;
        }
        for (u32 at = thread; at < DEPTH * COLUMNS; at += 256) {
            bool along = of_b.column == 1;
            u32 depth = along ? at / COLUMNS : at % DEPTH, column = along ? at % COLUMNS : at / DEPTH;
            bool inside = first + depth < k && first_column + column < n;
            right[depth * (COLUMNS + 1) + column] = inside ? (float)b[b_start + of_b.at(first + depth, first_column + column)] : 0.0f;
        }
        __syncthreads();
        for (int depth = 0; depth < DEPTH; ++depth) {
            for (int h = 0; h < H; ++h) {
                float factor = left[depth * (ROWS + 1) + i + h * down];
                for (int w = 0; w < W; ++w) {
                    sum[h][w] = fmaf(factor, right[depth * (COLUMNS + 1) + j + w * across], sum[h][w]);
                }
            }
        }
    }
    for (int h = 0; h < H; ++h) {
        for (int w = 0; w < W; ++w) {
            u32 row = first_row + i + h * down, column = first_column + j + w * across;
            if (row < m && column < n) {
                float value = f32(alpha) * sum[h][w];
                if (BIAS) {
                    value += (float)bias[column];
                }
                give<ADD>(out, out_start + of_out.at(row, column), value);
            }
        }
    }
}
