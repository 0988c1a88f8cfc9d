// A block for each row.
template <int THREADS, i64 COLUMNS> DEVICE void softmax(InFloats auto x, OutFloats auto y) {
    i64 first = blockIdx.x * COLUMNS;
    float largest = -f32(INFINITE);
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        largest = larger(largest, x[first + column]);
    }
    largest = block_max<THREADS>(largest);
    float sum = row_sum<THREADS, COLUMNS>([&](i64 column) { return expf(x[first + column] - largest); });
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        y[first + column] = expf(x[first + column] - largest) / sum;
    }
}

template <int THREADS, i64 COLUMNS, bool ADD> DEVICE void softmax_grad(InFloats auto y, InFloats auto g, OutFloats auto out) {
    i64 first = blockIdx.x * COLUMNS;
    float shift = row_sum<THREADS, COLUMNS>([&](i64 column) { return y[first + column] * g[first + column]; });
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        give<ADD>(out, first + column, y[first + column] * (g[first + column] - shift));
    }
}
