template <i64 POSITIONS, i64 HALF> DEVICE void rotary_table(Out<float> table, double base) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < POSITIONS * HALF) {
        i64 position = at / HALF, i = at % HALF;
        double angle = (double)position * pow(base, -(double)i / (double)HALF);
        table[position * 2 * HALF + i] = (float)cos(angle);
        table[position * 2 * HALF + HALF + i] = (float)sin(angle);
    }
}
