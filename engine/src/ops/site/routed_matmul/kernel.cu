// y = [y +] route x; a route is zero or one.
template <i64 ROWS, i64 COLUMNS, bool ADD> DEVICE void routed_rows(InFloats auto x, In<float> route, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Four value = load<COLUMNS>(x, row, column);
        float r = route[row];
        give<COLUMNS, ADD>(y, row, column, map([&](int k) { return r * value.v[k]; }));
    });
}
