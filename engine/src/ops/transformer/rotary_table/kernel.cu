template <i64 POSITIONS, i64 HALF> DEVICE void rotary_table(Out<float> table, double base, double factor, double low, double high,
                                                              double context) {
    each_thread<POSITIONS * HALF>([&](i64 at) {
        i64 position = at / HALF, i = at % HALF;
        double frequency = pow(base, -(double)i / (double)HALF);
        double kept = (context * frequency / 6.283185307179586476925 - low) / (high - low);
        kept = kept < 0.0 ? 0.0 : kept > 1.0 ? 1.0 : kept;
        double angle = (double)position * frequency * (kept + (1.0 - kept) / factor);
        table[position * 2 * HALF + i] = (float)cos(angle);
        table[position * 2 * HALF + HALF + i] = (float)sin(angle);
    });
}

template <i64 POSITIONS, i64 BINS, i64 PERIOD> DEVICE void fourier_table(Out<float> table) {
    each_thread<POSITIONS * BINS>([&](i64 at) {
        i64 position = at / BINS, bin = at % BINS;
        double angle = (double)(position * bin % PERIOD) * (6.283185307179586476925 / (double)PERIOD);
        table[position * 2 * BINS + bin] = (float)cos(angle);
        table[position * 2 * BINS + BINS + bin] = (float)sin(angle);
    });
}
