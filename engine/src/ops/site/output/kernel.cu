// The clean share s c + (1 - s) b, to which the product is added.
template <i64 ROWS, i64 COLUMNS, bool BIAS, i64 DELTAS>
DEVICE void site_output_start(InFloats auto clean, In<float> bias, In<float> delta, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        float s = share<DELTAS, false>(delta, delta, row);
        Four c = load<COLUMNS>(clean, row, column), b = BIAS ? load<COLUMNS>(bias, 0, column) : fill(0.0f);
        store<COLUMNS>(y, row, column, map([&](int k) { return s * c.v[k] + (BIAS ? (1.0f - s) * b.v[k] : 0.0f); }));
    });
}

template <i64 ROWS, i64 COLUMNS, i64 DELTAS, bool ROUTE, bool ADD>
DEVICE void site_share(InFloats auto g, In<float> delta, In<float> route, OutFloats auto out) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        float s = share<DELTAS, ROUTE>(delta, route, row);
        Four up = load<COLUMNS>(g, row, column);
        give<COLUMNS, ADD>(out, row, column, map([&](int k) { return s * up.v[k]; }));
    });
}

// r (c - b) . G of each row.
template <int THREADS, i64 COLUMNS, bool BIAS, bool ROUTE, bool ADD>
DEVICE void site_output_delta_grad(InFloats auto g, InFloats auto clean, In<float> bias, In<float> route, Out<float> out) {
    i64 row = blockIdx.x, first = row * COLUMNS;
    float dot = row_sum<THREADS, COLUMNS>([&](i64 column) {
        return g[first + column] * (clean[first + column] - (BIAS ? bias[column] : 0.0f));
    });
    if (threadIdx.x == 0) {
        give<ADD>(out, row, (ROUTE ? route[row] : 1.0f) * dot);
    }
}
