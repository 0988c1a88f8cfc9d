// Noise on logits.
enum { NOISE_NONE, NOISE_DRAWN, NOISE_GIVEN };

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
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int GATES, int NOISE, int PENALTY, int PARAMETER, bool WRITE_G>
DEVICE void importance_gates(In<u32> parameters, InFloats auto z, In<float> given, auto g, Out<float> parts,
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
            if constexpr (WRITE_G) {
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
            Four of_penalty = penalty_grad<GATES, PENALTY>(logit, load<COLUMNS>(of_sums, 0, column), parameter);
            total = map([&](int k) { return total.v[k] + of_penalty.v[k]; });
        }
        give<COLUMNS, ADD>(dz, row, column, total);
    });
}
