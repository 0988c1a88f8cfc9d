template <i64 LEN> DEVICE void constant(Out<float> y, float value) {
    each_four<1, LEN>([&](i64 row, i64 column) { store<LEN>(y, row, column, fill(value)); });
}
