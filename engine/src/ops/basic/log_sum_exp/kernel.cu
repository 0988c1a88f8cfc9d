// A block for each row.
template <int THREADS, i64 COLUMNS, i64 PITCH> DEVICE void log_sum_exp(InFloats auto x, Out<float> y) {
    float all = row_log_sum_exp<THREADS, COLUMNS, PITCH, 4>(x, blockIdx.x);
    if (threadIdx.x == 0) {
        y[blockIdx.x] = all;
    }
}
