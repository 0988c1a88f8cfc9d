// A warp's lanes are components; the hidden layer is in registers. Weights of 32 components pass
// through shared memory.
template <i64 ROWS, i64 COLUMNS, int HIDDEN>
DEVICE void component_mlp(InFloats auto a, In<float> w1, In<float> b1, In<float> w2, In<float> b2, OutFloats auto z) {
    const int UNITS = HIDDEN < 32 ? HIDDEN : 32;
    SHARED(float, weights, 3 * UNITS * 33);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 first_column = (i64)blockIdx.x * 32, column = first_column + lane;
    float x[4], total[4];
    for (int k = 0; k < 4; ++k) {
        i64 row = (i64)blockIdx.y * 32 + line + 8 * k;
        bool there = row < ROWS && column < COLUMNS;
        x[k] = there ? a[row * COLUMNS + column] : 0.0f;
        total[k] = there ? b2[column] : 0.0f;
    }
    for (int first = 0; first < HIDDEN; first += UNITS) {
        __syncthreads();
        for (int at = threadIdx.x; at < 32 * UNITS; at += 256) {
            int component = at / UNITS, unit = at % UNITS;
            if (first_column + component < COLUMNS && first + unit < HIDDEN) {
                i64 from = (first_column + component) * HIDDEN + first + unit;
                weights[unit * 33 + component] = w1[from];
                weights[(UNITS + unit) * 33 + component] = b1[from];
                weights[(2 * UNITS + unit) * 33 + component] = w2[from];
            }
        }
        __syncthreads();
        for (int unit = 0; unit < UNITS && first + unit < HIDDEN && column < COLUMNS; ++unit) {
            float of_x = weights[unit * 33 + lane], bias = weights[(UNITS + unit) * 33 + lane];
            float of_value = weights[(2 * UNITS + unit) * 33 + lane];
            for (int k = 0; k < 4; ++k) {
                total[k] = fmaf(of_value, gelu(fmaf(of_x, x[k], bias)), total[k]);
            }
        }
    }
    for (int k = 0; k < 4; ++k) {
        i64 row = (i64)blockIdx.y * 32 + line + 8 * k;
        if (row < ROWS && column < COLUMNS) {
            z[row * COLUMNS + column] = total[k];
        }
    }
}

// Eight hidden units at a time, over a stretch of rows: their sums stay in registers, and are added
// over the block's eight lines of rows at the end. parts: [stretches, w1 | b1 | w2 | b2].
template <i64 ROWS, i64 COLUMNS, int HIDDEN, i64 STRETCH, bool ADD>
DEVICE void component_mlp_grad(InFloats auto g, InFloats auto a, In<float> w1, In<float> b1, In<float> w2, OutFloats auto of_a,
                               Out<float> parts) {
    const int UNITS = 8;
    const i64 weights = COLUMNS * HIDDEN, stride = 3 * weights + COLUMNS;
    SHARED(float, sums, (3 * UNITS + 1) * 8 * 32);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 first_column = (i64)blockIdx.x * 32, column = first_column + lane;
    i64 start = (i64)blockIdx.y * STRETCH, end = start + STRETCH < ROWS ? start + STRETCH : ROWS;
    for (int first = 0; first < HIDDEN; first += UNITS) {
        float of_x[UNITS], bias[UNITS], of_value[UNITS];
        float s1[UNITS], s2[UNITS], s3[UNITS], s4 = 0.0f;
        for (int unit = 0; unit < UNITS; ++unit) {
            // A unit past the last has weights of zero, and adds nothing.
            bool there = column < COLUMNS && first + unit < HIDDEN;
            i64 from = column * HIDDEN + first + unit;
            of_x[unit] = there ? w1[from] : 0.0f;
            bias[unit] = there ? b1[from] : 0.0f;
            of_value[unit] = there ? w2[from] : 0.0f;
            s1[unit] = s2[unit] = s3[unit] = 0.0f;
        }
        for (i64 row = start + line; row < end && column < COLUMNS; row += 8) {
            float x = a[row * COLUMNS + column], up = g[row * COLUMNS + column], slope = 0.0f;
            for (int unit = 0; unit < UNITS; ++unit) {
                float p = fmaf(of_x[unit], x, bias[unit]);
                float below = normal_below(p);
                float rise = below + p * (0.39894228040143268f * expf(-0.5f * p * p));
                s1[unit] = fmaf(up * x, rise, s1[unit]);
                s2[unit] = fmaf(up, rise, s2[unit]);
                s3[unit] = fmaf(up, p * below, s3[unit]);
                slope = fmaf(of_x[unit] * of_value[unit], rise, slope);
            }
            s4 += up;
            if (first == 0) {
                give<ADD>(of_a, row * COLUMNS + column, up * slope);
            } else {
                give<true>(of_a, row * COLUMNS + column, up * slope);
            }
        }
        __syncthreads();
        for (int unit = 0; unit < UNITS; ++unit) {
            sums[((0 * UNITS + unit) * 8 + line) * 32 + lane] = of_value[unit] * s1[unit];
            sums[((1 * UNITS + unit) * 8 + line) * 32 + lane] = of_value[unit] * s2[unit];
            sums[((2 * UNITS + unit) * 8 + line) * 32 + lane] = s3[unit];
        }
        sums[(3 * UNITS * 8 + line) * 32 + lane] = s4;
        __syncthreads();
        for (int sum = line; sum < 3 * UNITS + (first == 0 ? 1 : 0); sum += 8) {
            int kind = sum / UNITS, unit = first + sum % UNITS;
            float total = 0.0f;
            for (int other = 0; other < 8; ++other) {
                total += sums[(sum * 8 + other) * 32 + lane];
            }
            if (column < COLUMNS && kind == 3) {
                parts[(i64)blockIdx.y * stride + 3 * weights + column] = total;
            } else if (column < COLUMNS && unit < HIDDEN) {
                parts[(i64)blockIdx.y * stride + kind * weights + column * HIDDEN + unit] = total;
            }
        }
    }
}
