// y = silu(a) b.
template <i64 LEN> DEVICE void swiglu(InFloats auto gate, InFloats auto up, OutFloats auto y) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(gate, row, column), b = load<LEN>(up, row, column);
        store<LEN>(y, row, column, map([&](int k) { return a.v[k] * logistic(a.v[k]) * b.v[k]; }));
    });
}

// Both gradients in one pass.
template <i64 LEN, bool ADD_GATE, bool ADD_UP>
DEVICE void swiglu_grad(InFloats auto gate, InFloats auto up, InFloats auto g, OutFloats auto of_gate, OutFloats auto of_up) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four a = load<LEN>(gate, row, column), b = load<LEN>(up, row, column), above = load<LEN>(g, row, column);
        Four s = map([&](int k) { return logistic(a.v[k]); });
        give<LEN, ADD_GATE>(of_gate, row, column, map([&](int k) {
            return above.v[k] * b.v[k] * s.v[k] * (1.0f + a.v[k] * (1.0f - s.v[k]));
        }));
        give<LEN, ADD_UP>(of_up, row, column, map([&](int k) { return above.v[k] * a.v[k] * s.v[k]; }));
    });
}
