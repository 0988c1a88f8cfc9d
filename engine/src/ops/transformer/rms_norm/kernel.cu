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
