// The bias in every row, to which a product is added.
template <i64 ROWS, i64 COLUMNS> DEVICE void rows_of_bias(In<float> bias, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) { store<COLUMNS>(y, row, column, load<COLUMNS>(bias, 0, column)); });
}
