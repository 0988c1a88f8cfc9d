// s c + (1 - s) b, to which the product is added.
template <i64 ROWS, i64 COLUMNS, bool BIAS, i64 DELTAS, bool ROUTE>
DEVICE void site_output_start(InFloats auto clean, In<float> bias, In<float> delta, In<float> route, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        float s = share<DELTAS, ROUTE>(delta, route, row);
        Four c = load<COLUMNS>(clean, row, column);
        Four value = map([&](int k) { return s * c.v[k]; });
        if (BIAS) {
            Four b = load<COLUMNS>(bias, 0, column);
            value = map([&](int k) { return value.v[k] + (1.0f - s) * b.v[k]; });
        }
        store<COLUMNS>(y, row, column, value);
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

// (1 - s) G, summed over a stretch of rows.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, i64 DELTAS, bool ROUTE>
DEVICE void site_output_bias_parts(InFloats auto g, In<float> delta, In<float> route, Out<float> parts) {
    column_parts<ROWS, COLUMNS, STRETCH>(parts, [&](i64 row, i64 column) {
        return (1.0f - share<DELTAS, ROUTE>(delta, route, row)) * g[row * COLUMNS + column];
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
