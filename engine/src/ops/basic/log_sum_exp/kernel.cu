template <int THREADS, i64 COLUMNS> DEVICE void log_sum_exp(InFloats auto x, Out<float> y) {
    i64 row = blockIdx.x;
    float all = row_log_sum_exp<THREADS, COLUMNS>([&](i64 column) { return x[row * COLUMNS + column]; });
    if (threadIdx.x == 0) {
        y[row] = all;
    }
}
