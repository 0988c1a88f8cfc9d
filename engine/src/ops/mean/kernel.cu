template <i64 LEN> DEVICE void mean_parts(InFloats auto x, Out<float> parts) {
    part_sum<256, LEN>(parts, [&](i64 at) { return x[at]; });
}

template <i64 LEN, bool ADD> DEVICE void mean_grad(In<float> g, OutFloats auto out) {
    float each = g[0] / (float)LEN;
    each_four<1, LEN>([&](i64 row, i64 column) { give<LEN, ADD>(out, row, column, fill(each)); });
}
