template <i64 LEN> DEVICE void cast(InFloats auto x, OutFloats auto y) {
    each_four<1, LEN>([&](i64 row, i64 column) { store<LEN>(y, row, column, load<LEN>(x, row, column)); });
}

// Zeros behind the rows and columns of x.
template <i64 ROWS, i64 COLUMNS, i64 ROWS_OF_Y, i64 COLUMNS_OF_Y> DEVICE void padded_cast(InFloats auto x, OutFloats auto y) {
    each_four<ROWS_OF_Y, COLUMNS_OF_Y>([&](i64 row, i64 column) {
        Four four = row < ROWS && column < COLUMNS ? load<COLUMNS>(x, row, column) : fill(0.0f);
        store<COLUMNS_OF_Y>(y, row, column, four);
    });
}
