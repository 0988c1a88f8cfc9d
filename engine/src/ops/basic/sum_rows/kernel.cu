template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int WIDTH> DEVICE void sum_rows_parts(InFloats auto x, Out<float> parts) {
    auto term = [&](i64 row, i64 column) { return load_wide<WIDTH>(x, row * COLUMNS + column); };
    wide_column_parts<ROWS, COLUMNS, STRETCH, WIDTH>(parts, term);
}
