const u32 IGNORED = 0xffffffffu;

// A thread for each row: the label's logit. A label beyond the columns gives NaN, which the guard
// of the update finds.
template <i64 ROWS, i64 COLUMNS, i64 PITCH> DEVICE void label_logits(InFloats auto logits, In<u32> labels, Out<float> found) {
    each_thread<ROWS>([&](i64 row) {
        u32 label = labels[row];
        found[row] = label == IGNORED ? 0.0f : label < COLUMNS ? logits[row * PITCH + label] : f32(0x7fc00000u);
    });
}

// Number of rows in the mean, at least 1.
template <i64 ROWS> DEVICE double counted(In<u32> labels) {
    int count = 0;
    for (i64 row = threadIdx.x; row < ROWS; row += 256) {
        count += labels[row] != IGNORED;
    }
    count = block_sum<256>(count);
    return count > 1 ? (double)count : 1.0;
}

// The mean of log-sum-exps less the labels' logits, over the rows that count.
template <i64 ROWS> DEVICE void cross_entropy_mean(In<float> lse, In<float> found, In<u32> labels, Out<float> y) {
    double count = counted<ROWS>(labels), sum = 0.0;
    for (i64 row = threadIdx.x; row < ROWS; row += 256) {
        if (labels[row] != IGNORED) {
            sum += (double)(lse[row] - found[row]);
        }
    }
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) {
        y[0] = (float)(sum / count);
    }
}

// 1 / rows for the gradient.
template <i64 ROWS> DEVICE void cross_entropy_scale(In<u32> labels, In<float> g, Out<float> scale) {
    double count = counted<ROWS>(labels);
    if (threadIdx.x == 0) {
        scale[0] = g[0] / (float)count;
    }
}

template <i64 ROWS, i64 COLUMNS, i64 PITCH, bool ADD>
DEVICE void cross_entropy_grad(InFloats auto logits, In<u32> labels, In<float> lse, In<float> scale, OutFloats auto out) {
    float by = scale[0];
    each_four<ROWS, PITCH>([&](i64 row, i64 column) {
        Four x = load<PITCH>(logits, row, column);
        u32 label = labels[row];
        float all = lse[row];
        give<PITCH, ADD>(out, row, column, map([&](int k) {
            float q = expf(x.v[k] - all) - (column + k == label ? 1.0f : 0.0f);
            return label == IGNORED || column + k >= COLUMNS ? 0.0f : by * q;
        }));
    });
}
