// y = max(x, 0); NaN stays.
template <i64 LEN> DEVICE void relu(In<float> x, Out<float> y) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(x, row, column);
        store<LEN>(y, row, column, map([&](int k) { return a.v[k] < 0.0f ? 0.0f : a.v[k]; }));
    });
}

template <i64 LEN, bool ADD> DEVICE void relu_grad(In<float> y, In<float> g, Out<float> gx) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four value = load<LEN>(y, row, column), up = load<LEN>(g, row, column);
        give<LEN, ADD>(gx, row, column, map([&](int k) { return value.v[k] > 0.0f ? up.v[k] : 0.0f; }));
    });
}
