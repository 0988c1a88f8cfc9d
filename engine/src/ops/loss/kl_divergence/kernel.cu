// A block for each row: the log-sum-exp of the logits; then the divergence, and if needed `Q - P`
// over the logits. The second read of the row hits a cache.
template <int THREADS, i64 COLUMNS, i64 PITCH, bool GRADIENT>
DEVICE void kl_divergence(InFloats auto target, In<float> target_lse, auto logits, Out<float> lse, Out<float> losses) {
    i64 row = blockIdx.x;
    float all = row_log_sum_exp<THREADS, COLUMNS, PITCH>(logits, row);
    float of_target = target_lse[row];
    // Close logits are subtracted from each other first, which is exact.
    float shift = of_target - all;
    float loss = 0.0f;
    each_vector<THREADS, COLUMNS, PITCH>([&](i64 column) {
        Four t = load_vector_of_row<PITCH>(target, row, column), x = load_vector_of_row<PITCH>(logits, row, column);
        each_of_vector<COLUMNS, PITCH>(column, [&](int k) {
            float p = expf(t.v[k] - of_target);
            loss += p * (t.v[k] - x.v[k] - shift);
            x.v[k] = expf(x.v[k] - all) - p;
        });
        if constexpr (GRADIENT) {
            store_vector_of_row<COLUMNS, PITCH>(logits, row, column, x);
        }
    });
    loss = block_sum<THREADS>(loss);
    if (threadIdx.x == 0) {
        lse[row] = all;
        losses[row] = loss;
    }
}

// `out` holds the logits before.
template <i64 ROWS, i64 COLUMNS, i64 PITCH>
DEVICE void kl_divergence_grad(InFloats auto target, In<float> target_lse, In<float> lse, In<float> g, OutFloats auto out) {
    float scale = g[0] / (float)ROWS;
    each_four<ROWS, PITCH>([&](i64 row, i64 column) {
        Four t = load<PITCH>(target, row, column), x = load<PITCH>(out, row, column);
        float of_target = target_lse[row], all = lse[row];
        store<PITCH>(out, row, column, map([&](int k) {
            return column + k < COLUMNS ? scale * (expf(x.v[k] - all) - expf(t.v[k] - of_target)) : 0.0f;
        }));
    });
}
