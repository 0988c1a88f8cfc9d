// A thread has one column of eight results, one after the other.

struct Eight {
    float v[8];
};

// Adds sum_j a_|i - j| b_j, over j >= i if AHEAD and over j <= i otherwise, to the results from
// `first` on. Rows of `a` and `b` begin at an element each.
template <bool AHEAD, i64 LAGS, i64 POSITIONS, i64 COLUMNS>
DEVICE Eight correlated(Eight sum, InFloats auto a, i64 a_first, InFloats auto b, i64 b_first, i64 first) {
    i64 begin = AHEAD ? first : (first + 1 > LAGS ? first + 1 - LAGS : 0);
    i64 end = AHEAD ? first + 7 + LAGS : first + 8;
    for (i64 j = begin; j < end && j < POSITIONS; ++j) {
        float value = b[b_first + j * COLUMNS];
        for (int index = 0; index < 8; ++index) {
            i64 lag = AHEAD ? j - first - index : first + index - j;
            if (lag >= 0 && lag < LAGS) {
                sum.v[index] = fmaf(a[a_first + lag * COLUMNS], value, sum.v[index]);
            }
        }
    }
    return sum;
}

// `body(b, first, column)` for eight of ROWS results of each of BATCH.
template <i64 BATCH, i64 ROWS, i64 COLUMNS, class F> DEVICE int each_eight(F body) {
    const i64 eights = (ROWS + 7) / 8;
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x, row = index / COLUMNS;
    if (row < BATCH * eights) {
        body(row / eights, row % eights * 8, index % COLUMNS);
    }
    return 0;
}

// A gradient has sums over j >= i, and no bias.
template <i64 BATCH, i64 LAGS, i64 POSITIONS, i64 COLUMNS, bool AHEAD, bool ADD>
DEVICE void causal_mixing(InFloats auto x, In<float> h, In<float> bias, OutFloats auto y) {
    each_eight<BATCH, POSITIONS, COLUMNS>([&](i64 b, i64 first, i64 column) {
        Eight sum = {};
        for (int index = 0; index < 8 && !AHEAD; ++index) {
            sum.v[index] = bias[column];
        }
        i64 from = b * POSITIONS * COLUMNS + column;
        sum = correlated<AHEAD, LAGS, POSITIONS, COLUMNS>(sum, h, column, x, from, first);
        for (int index = 0; index < 8 && first + index < POSITIONS; ++index) {
            give<ADD>(y, from + (first + index) * COLUMNS, sum.v[index]);
        }
    });
}

// parts: [batch, lags, columns].
template <i64 BATCH, i64 LAGS, i64 POSITIONS, i64 COLUMNS>
DEVICE void causal_mixing_kernel_parts(InFloats auto x, InFloats auto g, Out<float> parts) {
    each_eight<BATCH, LAGS, COLUMNS>([&](i64 b, i64 first, i64 column) {
        i64 from = b * POSITIONS * COLUMNS + column;
        Eight sum = correlated<true, POSITIONS, POSITIONS, COLUMNS>(Eight{}, x, from, g, from, first);
        for (int index = 0; index < 8 && first + index < LAGS; ++index) {
            parts[(b * LAGS + first + index) * COLUMNS + column] = sum.v[index];
        }
    });
}
