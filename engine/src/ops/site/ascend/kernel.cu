// clamp(r + step sign(g), 0, 1); NaN for a NaN gradient.
template <i64 LEN> DEVICE void ascend(In<float> source, In<float> gradient, Out<float> next, float step) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four r = load<LEN>(source, row, column), g = load<LEN>(gradient, row, column);
        store<LEN>(next, row, column, map([&](int k) {
            float by = g.v[k] > 0.0f ? step : g.v[k] < 0.0f ? -step : g.v[k] == g.v[k] ? 0.0f : g.v[k];
            return clamp(r.v[k] + by, 0.0f, 1.0f);
        }));
    });
}
