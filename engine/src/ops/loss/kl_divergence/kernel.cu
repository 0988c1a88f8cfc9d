// A block for each row: the log-sum-exp of the logits, then the divergence; the second read of the
// row hits a cache.
template <int THREADS, i64 COLUMNS>
DEVICE void kl_divergence(InFloats auto target, In<float> target_lse, InFloats auto logits, Out<float> lse, Out<float> losses) {
    i64 row = blockIdx.x, first = row * COLUMNS;
    float all = row_log_sum_exp<THREADS, COLUMNS>([&](i64 column) { return logits[first + column]; });
    float of_target = target_lse[row];
    // Close logits are subtracted from each other first, which is exact.
    float shift = of_target - all;
    float loss = row_sum<THREADS, COLUMNS>([&](i64 column) {
        float t = target[first + column];
        return expf(t - of_target) * (t - logits[first + column] - shift);
    });
    if (threadIdx.x == 0) {
        lse[row] = all;
        losses[row] = loss;
    }
}

template <i64 ROWS, i64 COLUMNS, bool ADD>
DEVICE void kl_divergence_grad(InFloats auto target, In<float> target_lse, InFloats auto logits, In<float> lse, In<float> g,
                               OutFloats auto out) {
    float scale = g[0] / (float)ROWS;
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Four t = load<COLUMNS>(target, row, column), x = load<COLUMNS>(logits, row, column);
        float of_target = target_lse[row], all = lse[row];
        give<COLUMNS, ADD>(out, row, column,
                           map([&](int k) { return scale * (expf(x.v[k] - all) - expf(t.v[k] - of_target)); }));
    });
}

// `out` holds the logits before.
template <i64 ROWS, i64 COLUMNS>
DEVICE void kl_divergence_grad_in_place(InFloats auto target, In<float> target_lse, In<float> lse, In<float> g, OutFloats auto out) {
    float scale = g[0] / (float)ROWS;
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Four t = load<COLUMNS>(target, row, column), x = load<COLUMNS>(out, row, column);
        float of_target = target_lse[row], all = lse[row];
        store<COLUMNS>(out, row, column,
                       map([&](int k) { return scale * (expf(x.v[k] - all) - expf(t.v[k] - of_target)); }));
    });
}
