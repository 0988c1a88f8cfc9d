// Nothing is written where a total is not finite.
template <i64 LEN, bool ADD, int TOTALS>
DEVICE void keep(Out<float> kept, In<float> x, const float (&totals)[TOTALS]) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (all_finite(totals) && at < LEN) {
        give<ADD>(kept, at, x[at]);
    }
}
