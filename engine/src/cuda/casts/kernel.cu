template <i64 LEN> DEVICE void cast(InFloats auto x, OutFloats auto y) {
    each_four<1, LEN>([&](i64 row, i64 column) { store<LEN>(y, row, column, load<LEN>(x, row, column)); });
}

struct Rounded {
    In<float> x;
    Out<bf16> y;
    i64 len, first_block;
};

template <int TENSORS> DEVICE void round_all(const Rounded (&tensors)[TENSORS]) {
    each_share(tensors, [&](const Rounded &tensor, i64 at) {
        store_until(tensor.y, at, tensor.len, load_until(tensor.x, at, tensor.len));
    });
}
