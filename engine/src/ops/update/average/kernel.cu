// (e + weight (x - e)) / correction.
template <i64 LEN, int CORRECTION>
DEVICE void average(In<u32> parameters, In<float> average, In<float> x, Out<float> out, float weight) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < LEN) {
        out[at] = (average[at] + weight * (x[at] - average[at])) / scalar(parameters, CORRECTION);
    }
}
