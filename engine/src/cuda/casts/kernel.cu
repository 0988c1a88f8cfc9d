template <i64 LEN> DEVICE void cast(InFloats auto x, OutFloats auto y) {
    each_four<1, LEN>([&](i64 row, i64 column) { store<LEN>(y, row, column, load<LEN>(x, row, column)); });
}
