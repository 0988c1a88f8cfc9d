// A block for each row: mean, for which `entry(at)` gives each of its elements once, then variance
// around it, then the row.
template <int THREADS, i64 COLUMNS, class F>
DEVICE void layer_norm_row(F entry, auto x, In<float> weight, In<float> bias, OutFloats auto y, Out<float> stats, float eps) {
    i64 row = blockIdx.x, first = row * COLUMNS;
    float mean = row_sum<THREADS, COLUMNS>([&](i64 column) { return entry(first + column); }) / (float)COLUMNS;
    float variance = row_sum<THREADS, COLUMNS>([&](i64 column) {
        float from_mean = x[first + column] - mean;
        return from_mean * from_mean;
    }) / (float)COLUMNS;
    float rstd = 1.0f / sqrtf(variance + eps);
    if (threadIdx.x == 0) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = rstd;
    }
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        y[first + column] = fmaf((x[first + column] - mean) * rstd, weight[column], bias[column]);
    }
}

template <int THREADS, i64 COLUMNS>
DEVICE void layer_norm(InFloats auto x, In<float> weight, In<float> bias, OutFloats auto y, Out<float> stats, float eps) {
    auto entry = [&](i64 at) { return (float)x[at]; };
    layer_norm_row<THREADS, COLUMNS>(entry, x, weight, bias, y, stats, eps);
}

template <int THREADS, i64 COLUMNS>
DEVICE void layer_norm_of_sum(InFloats auto x, InFloats auto other, In<float> weight, In<float> bias, OutFloats auto sum,
                              OutFloats auto y, Out<float> stats, float eps) {
    auto entry = [&](i64 at) { return kept(sum, at, x[at] + other[at]); };
    layer_norm_row<THREADS, COLUMNS>(entry, sum, weight, bias, y, stats, eps);
}

template <int THREADS, i64 COLUMNS, bool ADD>
DEVICE void layer_norm_grad(InFloats auto x, In<float> weight, In<float> stats, InFloats auto g, OutFloats auto out) {
    i64 row = blockIdx.x, first = row * COLUMNS;
    float mean = stats[2 * row], rstd = stats[2 * row + 1];
    float shift = row_sum<THREADS, COLUMNS>([&](i64 column) { return g[first + column] * weight[column]; });
    float slope = row_sum<THREADS, COLUMNS>(
        [&](i64 column) { return g[first + column] * weight[column] * ((x[first + column] - mean) * rstd); });
    shift /= (float)COLUMNS;
    slope /= (float)COLUMNS;
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        float normal = (x[first + column] - mean) * rstd;
        give<ADD>(out, first + column, rstd * (g[first + column] * weight[column] - shift - normal * slope));
    }
}

template <i64 ROWS, i64 COLUMNS, i64 STRETCH>
DEVICE void layer_norm_parameter_parts(InFloats auto x, In<float> stats, InFloats auto g, Out<float> of_weight, Out<float> of_bias) {
    column_parts<ROWS, COLUMNS, STRETCH>(of_weight, [&](i64 row, i64 column) {
        return g[row * COLUMNS + column] * ((x[row * COLUMNS + column] - stats[2 * row]) * stats[2 * row + 1]);
    });
    column_parts<ROWS, COLUMNS, STRETCH>(of_bias, [&](i64 row, i64 column) { return g[row * COLUMNS + column]; });
}

// A block for each row, after `entry(at)` has given each of its elements once.
template <int THREADS, i64 COLUMNS, class F>
DEVICE void rms_norm_row(F entry, auto x, In<float> weight, OutFloats auto y, Out<float> factors, float eps) {
    i64 row = blockIdx.x, first = row * COLUMNS;
    float square = row_sum<THREADS, COLUMNS>([&](i64 column) {
        float a = entry(first + column);
        return a * a;
    });
    float factor = 1.0f / sqrtf(square / (float)COLUMNS + eps);
    if (threadIdx.x == 0) {
        factors[row] = factor;
    }
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        y[first + column] = x[first + column] * factor * weight[column];
    }
}

template <int THREADS, i64 COLUMNS>
DEVICE void rms_norm(InFloats auto x, In<float> weight, OutFloats auto y, Out<float> factors, float eps) {
    auto entry = [&](i64 at) { return (float)x[at]; };
    rms_norm_row<THREADS, COLUMNS>(entry, x, weight, y, factors, eps);
}

template <int THREADS, i64 COLUMNS>
DEVICE void rms_norm_of_sum(InFloats auto x, InFloats auto other, In<float> weight, OutFloats auto sum, OutFloats auto y,
                            Out<float> factors, float eps) {
    auto entry = [&](i64 at) { return kept(sum, at, x[at] + other[at]); };
    rms_norm_row<THREADS, COLUMNS>(entry, sum, weight, y, factors, eps);
}

template <int THREADS, i64 COLUMNS, bool ADD>
DEVICE void rms_norm_grad(InFloats auto x, In<float> weight, In<float> factors, InFloats auto g, OutFloats auto out) {
    i64 row = blockIdx.x, first = row * COLUMNS;
    float factor = factors[row];
    float slope = row_sum<THREADS, COLUMNS>(
        [&](i64 column) { return g[first + column] * weight[column] * x[first + column]; });
    slope *= factor * factor / (float)COLUMNS;
    for (i64 column = threadIdx.x; column < COLUMNS; column += THREADS) {
        give<ADD>(out, first + column, factor * (g[first + column] * weight[column] - x[first + column] * slope));
    }
}

template <i64 ROWS, i64 COLUMNS, i64 STRETCH>
DEVICE void rms_norm_weight_parts(InFloats auto x, In<float> factors, InFloats auto g, Out<float> parts) {
    column_parts<ROWS, COLUMNS, STRETCH>(parts, [&](i64 row, i64 column) {
        return g[row * COLUMNS + column] * (x[row * COLUMNS + column] * factors[row]);
    });
}
