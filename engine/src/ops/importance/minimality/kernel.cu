// sum_c s / n (activity + beta log2(1 + scale s)) in f64, by one block.
template <i64 LEN>
DEVICE void importance_minimality(In<float> sums, Out<float> y, double rows, double activity, double beta, double scale) {
    double total = 0.0;
    for (i64 at = threadIdx.x; at < LEN; at += 256) {
        double s = (double)sums[at];
        total += s / rows * (activity + beta * log1p(scale * s) / 0.693147180559945309417);
    }
    total = block_sum<256>(total);
    if (threadIdx.x == 0) {
        y[0] = (float)total;
    }
}

template <i64 LEN, bool ADD>
DEVICE void importance_minimality_grad(In<float> g, In<float> sums, Out<float> out, double rows, double activity, double beta,
                                       double scale) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < LEN) {
        double s = (double)sums[at];
        double frequency = activity + beta * log1p(scale * s) / 0.693147180559945309417;
        double slope = beta * scale / ((1.0 + scale * s) * 0.693147180559945309417);
        give<ADD>(out, at, (float)((double)g[0] * (frequency / rows + s / rows * slope)));
    }
}
