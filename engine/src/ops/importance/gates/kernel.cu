// The pair of sigmoids, the noise on logits, and the penalty.
enum { GATES_LEAKY_HARD, GATES_HARD, GATES_UPPER_LEAKY_HARD, GATES_NORMAL, GATES_SWISH_HARD };
enum { NOISE_NONE, NOISE_DRAWN, NOISE_GIVEN };
enum { PENALTY_NONE, PENALTY_POWER, PENALTY_SMOOTH, PENALTY_SMOOTH_NORMALIZED };

// NaN if `z` is: a NaN logit gives a NaN gradient, which checks for finite gradients find.
DEVICE float unless_nan(float z, float value) { return z == z ? value : z; }

template <int GATES> DEVICE float upper(float z) {
    if (GATES == GATES_NORMAL) {
        return logistic(z);
    }
    if (GATES == GATES_SWISH_HARD) {
        return 1.0f - z + z * logistic(10.0f * z) + (z - 1.0f) * logistic(10.0f * (1.0f - z));
    }
    float inside = clamp(z, 0.0f, 1.0f);
    return GATES != GATES_HARD && z > 1.0f ? 1.0f + 0.01f * (z - 1.0f) : inside;
}

template <int GATES> DEVICE float upper_slope(float z) {
    if (GATES == GATES_NORMAL) {
        float y = logistic(z);
        return y * (1.0f - y);
    }
    if (GATES == GATES_SWISH_HARD) {
        float rise = logistic(10.0f * z), fall = logistic(10.0f * (1.0f - z));
        return rise + 10.0f * z * rise * (1.0f - rise) + fall - 10.0f * (z - 1.0f) * fall * (1.0f - fall) - 1.0f;
    }
    float outside = GATES != GATES_HARD && z > 1.0f ? 0.01f : 0.0f;
    return z >= 0.0f && z <= 1.0f ? 1.0f : unless_nan(z, outside);
}

template <int GATES> DEVICE float lower(float z) {
    return GATES == GATES_LEAKY_HARD ? clamp(z, 0.0f, 1.0f) : upper<GATES>(z);
}

// The lower leaky sigmoid lets a dead component only be pushed up.
template <int GATES> DEVICE float lower_grad(float z, float gradient) {
    if (GATES != GATES_LEAKY_HARD) {
        return gradient * upper_slope<GATES>(z);
    }
    if (z <= 0.0f) {
        return gradient < 0.0f ? 0.01f * gradient : 0.0f;
    }
    return z <= 1.0f ? gradient : unless_nan(z, 0.0f);
}

// The penalty's argument, and its slope: the smooth sigmoid, the only one with negative values,
// counts as zero below zero.
template <int GATES> DEVICE float penalised(float z) {
    float y = upper<GATES>(z);
    return GATES == GATES_SWISH_HARD && y < 0.0f ? 0.0f : y;
}

template <int GATES> DEVICE float penalised_slope(float z) {
    return GATES == GATES_SWISH_HARD && upper<GATES>(z) < 0.0f ? 0.0f : upper_slope<GATES>(z);
}

// x^p of four normal x > 0, within ln2 |p| (2^-22 max(1, l) + 2^-24 l) + 2^-22 of it for
// l = |log2(x)|: `fast_log2`, one rounding and `fast_exp2`. NaN if `x` is NaN. The exponents 0, 1
// and 2 need no logarithm, and are exact.
DEVICE Four power(Four x, float p) {
    if (p == 0.0f) {
        return map([&](int k) { return unless_nan(x.v[k], 1.0f); });
    }
    if (p == 1.0f) {
        return x;
    }
    if (p == 2.0f) {
        return map([&](int k) { return x.v[k] * x.v[k]; });
    }
    return map([&](int k) { return fast_exp2(p * fast_log2(x.v[k])); });
}

// The number that the smooth penalty nears.
template <int PENALTY> DEVICE float largest(float gamma) {
    return PENALTY == PENALTY_SMOOTH_NORMALIZED ? fmaf(gamma, gamma, 1.0f) : 1.0f;
}

// The penalty, and its slope; `parameter` is an exponent or gamma.
template <int PENALTY> DEVICE Four psi(Four x, float parameter) {
    if (PENALTY == PENALTY_POWER) {
        return power(map([&](int k) { return x.v[k] + 1e-12f; }), parameter);
    }
    float scale = 1.0f / parameter, most = largest<PENALTY>(parameter);
    return map([&](int k) {
        float u = x.v[k] * scale;
        return most * (u * u) / fmaf(u, u, 1.0f);
    });
}

template <int PENALTY> DEVICE Four psi_slope(Four x, float parameter) {
    if (PENALTY == PENALTY_POWER) {
        Four slope = power(map([&](int k) { return x.v[k] + 1e-12f; }), parameter - 1.0f);
        return map([&](int k) { return parameter * slope.v[k]; });
    }
    float scale = 1.0f / parameter, most = 2.0f * largest<PENALTY>(parameter) * scale;
    return map([&](int k) {
        float u = x.v[k] * scale, below = fmaf(u, u, 1.0f);
        return most * (u / (below * below));
    });
}

template <i64 ROWS, i64 COLUMNS, int NOISE>
DEVICE Four noisy(In<u32> parameters, u32 what, In<float> given, i64 row, i64 column, Four z) {
    if (NOISE == NOISE_NONE) {
        return z;
    }
    Four u = NOISE == NOISE_DRAWN ? uniforms<ROWS>(parameters, row, column, what) : load<COLUMNS>(given, row, column);
    return map([&](int k) { return fmaf(1.05f, z.v[k], -0.05f * u.v[k]); });
}

// Rows of a thread whose logits are read before the first of them is processed.
const int AHEAD = 2;

// Importances, and in the same pass the penalty sums of a stretch of rows and the number of active
// components: a thread has four columns of every eighth row.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int GATES, int NOISE, int PENALTY, int PARAMETER>
DEVICE void importance_gates(In<u32> parameters, InFloats auto z, In<float> given, OutFloats auto g, Out<float> parts,
                             Out<float> counts, u32 what, float alive) {
    SHARED(float, sums, 8 * 132);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 column = ((i64)blockIdx.x * 32 + lane) * 4;
    float parameter = PENALTY == PENALTY_NONE ? 1.0f : scalar(parameters, PARAMETER);
    Four sum = fill(0.0f);
    // The count of a thread, exact.
    float active = 0.0f;
    i64 end = ((i64)blockIdx.y + 1) * STRETCH;
    end = end < ROWS ? end : ROWS;
    for (i64 first = (i64)blockIdx.y * STRETCH + line; first < end && column < COLUMNS; first += 8 * AHEAD) {
        Four logits[AHEAD];
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (first + 8 * ahead < end) {
                logits[ahead] = load<COLUMNS>(z, first + 8 * ahead, column);
            }
        }
        for (int ahead = 0; ahead < AHEAD && first + 8 * ahead < end; ++ahead) {
            i64 row = first + 8 * ahead;
            Four logit = logits[ahead];
            Four with = noisy<ROWS, COLUMNS, NOISE>(parameters, what, given, row, column, logit);
            Four importance = map([&](int k) { return lower<GATES>(with.v[k]); });
            if (COLUMNS % 4 == 0) {
                store_four_at_once(g, row * COLUMNS + column, importance);
            } else {
                store<COLUMNS>(g, row, column, importance);
            }
            for (int k = 0; k < 4; ++k) {
                active += (COLUMNS % 4 == 0 || column + k < COLUMNS) && importance.v[k] > alive ? 1.0f : 0.0f;
            }
            if (PENALTY != PENALTY_NONE) {
                Four penalty = psi<PENALTY>(map([&](int k) { return penalised<GATES>(logit.v[k]); }), parameter);
                sum = map([&](int k) { return sum.v[k] + penalty.v[k]; });
            }
        }
    }
    for (int k = 0; k < 4; ++k) {
        sums[line * 132 + lane * 4 + k] = sum.v[k];
    }
    __syncthreads();
    i64 mine = (i64)blockIdx.x * 128 + threadIdx.x;
    if (threadIdx.x < 128 && mine < COLUMNS) {
        float total = 0.0f;
        for (int other = 0; other < 8; ++other) {
            total += sums[other * 132 + threadIdx.x];
        }
        parts[(i64)blockIdx.y * COLUMNS + mine] = total;
    }
    active = block_sum<256>(active);
    if (threadIdx.x == 0) {
        counts[(i64)blockIdx.y * gridDim.x + blockIdx.x] = active;
    }
}

// Penalty sums of all stretches, and in the last block the mean count.
template <i64 COLUMNS, i64 STRETCHES, i64 PARTS, int LINES>
DEVICE void importance_sums(In<float> parts, In<float> counts, Out<float> sums, Out<float> active, double each) {
    if (blockIdx.x + 1 < gridDim.x) {
        add_stretches<COLUMNS, STRETCHES, 0, COLUMNS, LINES, false>(parts, sums);
    } else {
        sum_parts<PARTS, false>(counts, active, each);
    }
}

template <i64 ROWS, i64 COLUMNS, int GATES, int NOISE, int PENALTY, int PARAMETER, bool OF_G, bool OF_SUMS, bool ADD>
DEVICE void importance_gates_grad(In<u32> parameters, InFloats auto z, In<float> given, InFloats auto of_g, In<float> of_sums,
                                  OutFloats auto dz, u32 what) {
    float parameter = PENALTY == PENALTY_NONE ? 1.0f : scalar(parameters, PARAMETER);
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Four logit = load<COLUMNS>(z, row, column), total = fill(0.0f);
        if (OF_G) {
            Four up = load<COLUMNS>(of_g, row, column);
            Four with = noisy<ROWS, COLUMNS, NOISE>(parameters, what, given, row, column, logit);
            const float scale = NOISE == NOISE_NONE ? 1.0f : 1.05f;
            total = map([&](int k) { return scale * lower_grad<GATES>(with.v[k], up.v[k]); });
        }
        if (OF_SUMS) {
            Four up = load<COLUMNS>(of_sums, 0, column);
            Four slope = psi_slope<PENALTY>(map([&](int k) { return penalised<GATES>(logit.v[k]); }), parameter);
            total = map([&](int k) { return total.v[k] + up.v[k] * slope.v[k] * penalised_slope<GATES>(logit.v[k]); });
        }
        give<COLUMNS, ADD>(dz, row, column, total);
    });
}
