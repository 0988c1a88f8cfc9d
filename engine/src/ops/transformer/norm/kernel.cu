// The row of this thread. THREADS threads share it: each has WIDTH columns of every THREADS-th group
// of these, and keeps them in registers. Rows of at most 32 threads share a block.
template <i64 ROWS, i64 COLUMNS, int THREADS, int WIDTH> struct Row {
    using Columns = Wide<WIDTH>;
    static const int GROUPS = (int)((COLUMNS + THREADS * WIDTH - 1) / (THREADS * WIDTH));

    i64 row;
    int thread;

    DEVICE_MEMBER Row() : row((i64)blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS), thread(threadIdx.x % THREADS) {}

    // The threads of a row that is not there take part in sums alone.
    DEVICE_MEMBER bool leads() const { return row < ROWS && thread == 0; }

    // `body(group, column, at)` for each group of this thread.
    template <class F> DEVICE_MEMBER void each(F body) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            i64 column = ((i64)group * THREADS + thread) * WIDTH;
            if (row < ROWS && column < COLUMNS) {
                body(group, column, row * COLUMNS + column);
            }
        }
    }

    DEVICE_MEMBER float sum(float x) const {
        if constexpr (THREADS > 32) {
            return block_sum<THREADS>(x);
        }
        for (int lanes = THREADS / 2; lanes > 0; lanes /= 2) {
            x += __shfl_xor_sync(0xffffffffu, x, lanes);
        }
        return x;
    }
};

// `entry(at)` gives each group of columns of a row: mean, then variance around it, then the row.
// Only rows that are CENTRED have a mean, and a bias.
template <i64 ROWS, i64 COLUMNS, int THREADS, int WIDTH, bool CENTRED, class F>
DEVICE void norm_row(F entry, In<float> weight, In<float> bias, OutFloats auto y, Out<float> stats, float eps) {
    using R = Row<ROWS, COLUMNS, THREADS, WIDTH>;
    R of;
    typename R::Columns x[R::GROUPS], w[R::GROUPS], b[R::GROUPS];
    float mean = 0.0f, variance = 0.0f;
    of.each([&](int group, i64 column, i64 at) {
        x[group] = entry(at);
        w[group] = load_wide<WIDTH>(weight, column);
        if (CENTRED) {
            b[group] = load_wide<WIDTH>(bias, column);
        }
    });
    if (CENTRED) {
        of.each([&](int group, i64, i64) {
            for (int k = 0; k < WIDTH; ++k) {
                mean += x[group].v[k];
            }
        });
        mean = of.sum(mean) / (float)COLUMNS;
    }
    of.each([&](int group, i64, i64) {
        for (int k = 0; k < WIDTH; ++k) {
            float from_mean = x[group].v[k] - mean;
            variance += from_mean * from_mean;
        }
    });
    variance = of.sum(variance) / (float)COLUMNS;
    float rstd = 1.0f / sqrtf(variance + eps);
    if (of.leads()) {
        stats[2 * of.row] = mean;
        stats[2 * of.row + 1] = rstd;
    }
    of.each([&](int group, i64, i64 at) {
        for (int k = 0; k < WIDTH; ++k) {
            float normal = (x[group].v[k] - mean) * rstd, by = w[group].v[k];
            x[group].v[k] = CENTRED ? fmaf(normal, by, b[group].v[k]) : normal * by;
        }
        store_wide<WIDTH>(y, at, x[group]);
    });
}

template <i64 ROWS, i64 COLUMNS, int THREADS, int WIDTH, bool CENTRED>
DEVICE void norm(InFloats auto x, In<float> weight, In<float> bias, OutFloats auto y, Out<float> stats, float eps) {
    auto entry = [&](i64 at) { return load_wide<WIDTH>(x, at); };
    norm_row<ROWS, COLUMNS, THREADS, WIDTH, CENTRED>(entry, weight, bias, y, stats, eps);
}

// The sum of two groups of columns, as it is kept.
template <int WIDTH> DEVICE Wide<WIDTH> kept_sum(InFloats auto x, InFloats auto other, OutFloats auto sum, i64 at) {
    Wide<WIDTH> both = load_wide<WIDTH>(x, at), added = load_wide<WIDTH>(other, at);
    for (int k = 0; k < WIDTH; ++k) {
        both.v[k] += added.v[k];
    }
    both = as_stored<WIDTH>(sum, both);
    store_wide<WIDTH>(sum, at, both);
    return both;
}

template <i64 ROWS, i64 COLUMNS, int THREADS, int WIDTH, bool CENTRED>
DEVICE void norm_of_sum(InFloats auto x, InFloats auto other, In<float> weight, In<float> bias, OutFloats auto sum,
                        OutFloats auto y, Out<float> stats, float eps) {
    auto entry = [&](i64 at) { return kept_sum<WIDTH>(x, other, sum, at); };
    norm_row<ROWS, COLUMNS, THREADS, WIDTH, CENTRED>(entry, weight, bias, y, stats, eps);
}

template <i64 ROWS, i64 COLUMNS, int THREADS, int WIDTH, bool CENTRED, bool ADD>
DEVICE void norm_grad(InFloats auto x, In<float> weight, In<float> stats, InFloats auto g, OutFloats auto out) {
    using R = Row<ROWS, COLUMNS, THREADS, WIDTH>;
    R of;
    // Normal numbers, and the gradients of `y` times the weight.
    typename R::Columns normal[R::GROUPS], up[R::GROUPS];
    float mean = CENTRED && of.row < ROWS ? stats[2 * of.row] : 0.0f, rstd = of.row < ROWS ? stats[2 * of.row + 1] : 0.0f;
    float shift = 0.0f, slope = 0.0f;
    of.each([&](int group, i64 column, i64 at) {
        Wide<WIDTH> w = load_wide<WIDTH>(weight, column);
        normal[group] = load_wide<WIDTH>(x, at);
        up[group] = load_wide<WIDTH>(g, at);
        for (int k = 0; k < WIDTH; ++k) {
            up[group].v[k] *= w.v[k];
        }
    });
    of.each([&](int group, i64, i64) {
        for (int k = 0; k < WIDTH; ++k) {
            normal[group].v[k] = (normal[group].v[k] - mean) * rstd;
            shift += up[group].v[k];
            slope += up[group].v[k] * normal[group].v[k];
        }
    });
    shift = CENTRED ? of.sum(shift) / (float)COLUMNS : 0.0f;
    slope = of.sum(slope) / (float)COLUMNS;
    of.each([&](int group, i64, i64 at) {
        for (int k = 0; k < WIDTH; ++k) {
            up[group].v[k] = rstd * (up[group].v[k] - shift - normal[group].v[k] * slope);
        }
        give_wide<WIDTH, ADD>(out, at, up[group]);
    });
}

template <i64 ROWS, i64 COLUMNS, i64 STRETCH, bool CENTRED>
DEVICE void norm_parameter_parts(InFloats auto x, In<float> stats, InFloats auto g, Out<float> of_weight, Out<float> of_bias) {
    column_parts<ROWS, COLUMNS, STRETCH>(of_weight, [&](i64 row, i64 column) {
        float mean = CENTRED ? stats[2 * row] : 0.0f;
        return g[row * COLUMNS + column] * ((x[row * COLUMNS + column] - mean) * stats[2 * row + 1]);
    });
    if constexpr (CENTRED) {
        column_parts<ROWS, COLUMNS, STRETCH>(of_bias, [&](i64 row, i64 column) { return g[row * COLUMNS + column]; });
    }
}
