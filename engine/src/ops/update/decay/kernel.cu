// Nothing is written where a total is not finite.
template <i64 LEN, i64 COLUMNS, bool OF_ROWS, bool ROOT, int LR, int TOTALS>
DEVICE void decay(In<u32> parameters, Out<float> matrix, In<float> needed, const float (&totals)[TOTALS], float decay) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (all_finite(totals) && at < LEN) {
        float lacks = larger(0.0f, 1.0f - needed[OF_ROWS ? at / COLUMNS : at % COLUMNS]);
        float keep = larger(0.0f, 1.0f - scalar(parameters, LR) * decay * lacks);
        matrix[at] = matrix[at] * (ROOT ? sqrtf(keep) : keep);
    }
}
