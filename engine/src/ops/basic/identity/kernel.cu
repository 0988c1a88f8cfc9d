template <i64 SIZE> DEVICE void identity(Out<float> y) {
    each_four<SIZE, SIZE>([&](i64 row, i64 column) {
        store<SIZE>(y, row, column, map([&](int k) { return column + k == row ? 1.0f : 0.0f; }));
    });
}
