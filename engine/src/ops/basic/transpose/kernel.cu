// A matrix, by tiles of 32 x 32 that are read and written along rows.
template <i64 A, i64 B, bool ADD> DEVICE void transpose(InFloats auto x, OutFloats auto y) {
    SHARED(float, tile, 32 * 33);
    const i64 tiles = (B + 31) / 32;
    i64 a = (i64)blockIdx.x / tiles * 32, b = (i64)blockIdx.x % tiles * 32;
    int lane = threadIdx.x % 32;
    for (int line = threadIdx.x / 32; line < 32; line += 8) {
        if (a + line < A && b + lane < B) {
            tile[line * 33 + lane] = x[(a + line) * B + b + lane];
        }
    }
    __syncthreads();
    for (int line = threadIdx.x / 32; line < 32; line += 8) {
        if (b + line < B && a + lane < A) {
            give<ADD>(y, (b + line) * A + a + lane, tile[lane * 33 + line]);
        }
    }
}

// y[b, a, ..] = x[a, b, ..].
template <i64 A, i64 B, i64 D, bool ADD> DEVICE void second_first(InFloats auto x, OutFloats auto y) {
    each_four<A * B, D>([&](i64 row, i64 column) {
        i64 a = row % A, b = row / A;
        give<D, ADD>(y, row, column, load<D>(x, a * B + b, column));
    });
}
