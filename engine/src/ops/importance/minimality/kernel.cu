const double LOG2_E = 1.442695040888963407360;

// sum_c s / n (activity + beta log2(1 + scale s)) in f64, by one block.
template <i64 LEN>
DEVICE void importance_minimality(In<float> sums, Out<float> y, double rows, double activity, double beta, double scale) {
    double total = 0.0;
    for (i64 at = threadIdx.x; at < LEN; at += 512) {
        double s = (double)sums[at];
        total += s * (activity + beta * LOG2_E * log1p(scale * s));
    }
    total = block_sum<512>(total);
    if (threadIdx.x == 0) {
        y[0] = (float)(total / rows);
    }
}

template <i64 LEN, bool ADD>
DEVICE void importance_minimality_grad(In<float> g, In<float> sums, Out<float> out, double rows, double activity, double beta,
                                       double scale) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < LEN) {
        double s = (double)sums[at];
        double frequency = activity + beta * LOG2_E * log1p(scale * s);
        double slope = beta * LOG2_E * scale / (1.0 + scale * s);
        give<ADD>(out, at, (float)((double)g[0] * (frequency + s * slope) / rows));
    }
}
