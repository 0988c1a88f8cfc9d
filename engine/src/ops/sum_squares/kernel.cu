template <i64 LEN> DEVICE void sum_squares_parts(InFloats auto x, Out<float> parts) {
    part_sum<256, LEN>(parts, [&](i64 at) {
        float a = x[at];
        return a * a;
    });
}

template <i64 LEN, bool ADD> DEVICE void sum_squares_grad(In<float> g, InFloats auto x, OutFloats auto out) {
    float factor = 2.0f * g[0];
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(x, row, column);
        give<LEN, ADD>(out, row, column, map([&](int k) { return a.v[k] * factor; }));
    });
}
