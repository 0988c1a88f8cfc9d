template <i64 LEN> DEVICE void mse_parts(InFloats auto prediction, InFloats auto target, Out<float> parts) {
    part_sum<256, LEN>(parts, [&](i64 at) {
        float error = prediction[at] - target[at];
        return error * error;
    });
}

template <i64 LEN, bool ADD> DEVICE void mse_grad(InFloats auto prediction, InFloats auto target, In<float> g, OutFloats auto out) {
    float scale = 2.0f * g[0] / (float)LEN;
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four p = load<LEN>(prediction, row, column), t = load<LEN>(target, row, column);
        give<LEN, ADD>(out, row, column, map([&](int k) { return scale * (p.v[k] - t.v[k]); }));
    });
}
