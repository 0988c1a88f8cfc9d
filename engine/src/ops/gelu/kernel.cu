// Element by element, by the normal distribution or, with TANH, by GPT-2's approximation.
template <i64 LEN, bool TANH> DEVICE void gelu_value(InFloats auto x, OutFloats auto y) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(x, row, column);
        store<LEN>(y, row, column, map([&](int k) { return TANH ? gelu_tanh(a.v[k]) : gelu(a.v[k]); }));
    });
}

template <i64 LEN, bool TANH, bool ADD> DEVICE void gelu_grad(InFloats auto x, InFloats auto g, OutFloats auto gx) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(x, row, column), up = load<LEN>(g, row, column);
        give<LEN, ADD>(gx, row, column, map([&](int k) {
            return up.v[k] * (TANH ? gelu_tanh_slope(a.v[k]) : gelu_slope(a.v[k]));
        }));
    });
}
