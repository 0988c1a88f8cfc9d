// Sources of importances and of masks include this, and one program may have both.
#ifndef SIGMOIDS
#define SIGMOIDS

// The pair of sigmoids, and the penalty.
enum { GATES_LEAKY_HARD, GATES_HARD, GATES_UPPER_LEAKY_HARD, GATES_NORMAL, GATES_SWISH_HARD };
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

// The gradient of four logits from that of the penalty sums.
template <int GATES, int PENALTY> DEVICE Four penalty_grad(Four logit, Four up, float parameter) {
    Four slope = psi_slope<PENALTY>(map([&](int k) { return penalised<GATES>(logit.v[k]); }), parameter);
    return map([&](int k) { return up.v[k] * slope.v[k] * penalised_slope<GATES>(logit.v[k]); });
}

// The penalties of four logits; their importances above `alive` are added to the exact count
// `active`.
template <i64 COLUMNS, int GATES, int PENALTY>
DEVICE Four penalties(Four logit, Four importance, i64 column, float parameter, float alive, float &active) {
    for (int k = 0; k < 4; ++k) {
        active += (COLUMNS % 4 == 0 || column + k < COLUMNS) && importance.v[k] > alive ? 1.0f : 0.0f;
    }
    if constexpr (PENALTY == PENALTY_NONE) {
        return fill(0.0f);
    } else {
        return psi<PENALTY>(map([&](int k) { return penalised<GATES>(logit.v[k]); }), parameter);
    }
}

// The penalty's parameter of the step.
template <int PENALTY, int PARAMETER> DEVICE float penalty_parameter(In<u32> parameters) {
    return PENALTY == PENALTY_NONE ? 1.0f : scalar(parameters, PARAMETER);
}

// The count of a block from those of its threads.
DEVICE void give_count(Out<float> counts, float active) {
    active = block_sum<256>(active);
    if (threadIdx.x == 0) {
        counts[(i64)blockIdx.y * gridDim.x + blockIdx.x] = active;
    }
}

// Importances, computed from logits where they are read.
template <int GATES, class Z> struct Gated {
    Z z;

    DEVICE_MEMBER float operator[](i64 at) const { return lower<GATES>(z[at]); }
};

template <int WIDTH, int GATES, class Z> DEVICE Wide<WIDTH> load_wide(Gated<GATES, Z> importance, i64 at) {
    Wide<WIDTH> wide = load_wide<WIDTH>(importance.z, at);
    for (int k = 0; k < WIDTH; ++k) {
        wide.v[k] = lower<GATES>(wide.v[k]);
    }
    return wide;
}

#endif
