// (e + weight (x - e)) / correction.
template <i64 LEN, int CORRECTION>
DEVICE void average(In<u32> parameters, In<float> average, In<float> x, Out<float> out, float weight) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < LEN) {
        out[at] = (average[at] + weight * (x[at] - average[at])) / scalar(parameters, CORRECTION);
    }
}

// Nothing is written where a total is not finite.
template <i64 LEN, int TOTALS>
DEVICE void keep_average(Out<float> average, In<float> x, float weight, const float (&totals)[TOTALS]) {
    bool all = true;
    for (float total : totals) {
        all = all && is_finite(total);
    }
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (all && at < LEN) {
        average[at] += weight * (x[at] - average[at]);
    }
}
