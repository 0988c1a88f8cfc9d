template <i64 ROWS, i64 COLUMNS, i64 STRETCH> DEVICE void sum_rows_parts(InFloats auto x, Out<float> parts) {
    column_parts<ROWS, COLUMNS, STRETCH>(parts, [&](i64 row, i64 column) { return x[row * COLUMNS + column]; });
}
