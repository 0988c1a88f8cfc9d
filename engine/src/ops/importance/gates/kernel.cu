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

// Importances, and in the same pass the penalty sums of a stretch of rows and the number of active
// components.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int GATES, int NOISE, int PENALTY, int PARAMETER>
DEVICE void importance_gates(In<u32> parameters, InFloats auto z, In<float> given, OutFloats auto g, Out<float> parts,
                             Out<float> counts, u32 what, float alive) {
    float parameter = penalty_parameter<PENALTY, PARAMETER>(parameters), active = 0.0f;
    wide_column_parts<ROWS, COLUMNS, STRETCH, 4>(
        parts, [&](i64 row, i64 column) { return load<COLUMNS>(z, row, column); },
        [&](i64 row, i64 column, Four logit) {
            Four with = noisy<ROWS, COLUMNS, NOISE>(parameters, what, given, row, column, logit);
            Four importance = map([&](int k) { return lower<GATES>(with.v[k]); });
            store<COLUMNS>(g, row, column, importance);
            return penalties<COLUMNS, GATES, PENALTY>(logit, importance, column, parameter, alive, active);
        });
    give_count(counts, active);
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
    float parameter = penalty_parameter<PENALTY, PARAMETER>(parameters);
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
