// The largest of a stretch of rows, for 32 columns. parts: [stretches, COLUMNS].
template <i64 ROWS, i64 COLUMNS, i64 STRETCH> DEVICE void max_rows_parts(In<float> x, Out<float> parts) {
    SHARED(float, largest, 8 * 33);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 column = (i64)blockIdx.x * 32 + lane;
    float most = -f32(INFINITE);
    i64 end = ((i64)blockIdx.y + 1) * STRETCH;
    for (i64 row = (i64)blockIdx.y * STRETCH + line; row < end && row < ROWS; row += 8) {
        if (column < COLUMNS) {
            most = larger(most, x[row * COLUMNS + column]);
        }
    }
    largest[line * 33 + lane] = most;
    __syncthreads();
    if (line == 0 && column < COLUMNS) {
        for (int other = 1; other < 8; ++other) {
            most = larger(most, largest[other * 33 + lane]);
        }
        parts[(i64)blockIdx.y * COLUMNS + column] = most;
    }
}

// The largest of all stretches, in the row of this block.
template <i64 BLOCKS, i64 COLUMNS, i64 STRETCHES>
DEVICE void max_rows(In<u32> parameters, In<float> parts, Out<float> y) {
    each_thread<BLOCKS * COLUMNS>([&](i64 at) {
        if (BLOCKS > 1 && at / COLUMNS != (i64)parameters[3]) {
            y[at] = 0.0f;
            return;
        }
        float most = -f32(INFINITE);
        for (i64 stretch = 0; stretch < STRETCHES; ++stretch) {
            most = larger(most, parts[stretch * COLUMNS + at % COLUMNS]);
        }
        y[at] = most;
    });
}
