// A block for each row of a chunk's logits: the log-sum-exp; then the losses, and if needed `Q - P`
// over the logits. The second read of the row hits a cache.
template <int THREADS, i64 COLUMNS, i64 PITCH, bool GRADIENT>
DEVICE void head_divergence(InFloats auto target, In<float> target_lse, OutFloats auto logits, Out<float> lse, Out<float> losses) {
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
        if (GRADIENT) {
            store_vector_of_row<COLUMNS, PITCH>(logits, row, column, x);
        }
    });
    loss = block_sum<THREADS>(loss);
    if (threadIdx.x == 0) {
        lse[row] = all;
        losses[row] = loss;
    }
}

// A thread for each row of a chunk, before its logits are replaced: the label's logit, which the
// cross-entropy subtracts from the log-sum-exp. A label beyond the columns gives NaN, which the
// guard of the update finds.
template <i64 ROWS, i64 COLUMNS, i64 PITCH> DEVICE void head_labels(InFloats auto logits, In<u32> labels, Out<float> found) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < ROWS) {
        u32 label = labels[row];
        found[row] = label == 0xffffffffu ? 0.0f : label < COLUMNS ? logits[row * PITCH + label] : f32(0x7fc00000u);
    }
}

// The mean cross-entropy over rows that are not ignored.
template <i64 ROWS> DEVICE void head_entropy(In<float> lse, In<float> found, In<u32> labels, Out<float> y) {
    double sum = 0.0;
    int count = 0;
    for (i64 row = threadIdx.x; row < ROWS; row += 256) {
        if (labels[row] != 0xffffffffu) {
            sum += (double)(lse[row] - found[row]);
            ++count;
        }
    }
    sum = block_sum<256>(sum);
    count = block_sum<256>(count);
    if (threadIdx.x == 0) {
        y[0] = (float)(sum / (count > 1 ? (double)count : 1.0));
    }
}

template <i64 LEN, bool ADD> DEVICE void head_divergence_grad(In<float> g, InFloats auto kept, OutFloats auto out) {
    float by = g[0];
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four x = load<LEN>(kept, row, column);
        give<LEN, ADD>(out, row, column, map([&](int k) { return by * x.v[k]; }));
    });
}
