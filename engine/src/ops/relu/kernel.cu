// y = max(x, 0); NaN stays.
template <i64 LEN> DEVICE void relu(InFloats auto x, OutFloats auto y) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(x, row, column);
        store<LEN>(y, row, column, map([&](int k) { return a.v[k] < 0.0f ? 0.0f : a.v[k]; }));
    });
}

template <i64 LEN, bool ADD> DEVICE void relu_grad(InFloats auto y, InFloats auto g, OutFloats auto gx) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four value = load<LEN>(y, row, column), up = load<LEN>(g, row, column);
        give<LEN, ADD>(gx, row, column, map([&](int k) { return value.v[k] > 0.0f ? up.v[k] : 0.0f; }));
    });
}
