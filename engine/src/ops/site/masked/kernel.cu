// Kinds of masks, and sources of draws.
enum { MASK_IMPORTANCE, MASK_BETWEEN, MASK_DRAWN, MASK_ROUNDED, MASK_ONES };
enum { DRAW_NONE, DRAW_UNIFORM, DRAW_COIN, DRAW_GIVEN };

// Inputs of a mask, at four columns of a row.
struct Sources {
    Four g, r;
    float delta;
};

// The row of activations that a row has, or -1.
template <i64 ROOM> DEVICE i64 own_row_of(In<u32> list, i64 row) { return ROOM == 0 ? row : place_of<ROOM>(list, row); }

// Importances, draws and deltas have ROWS; activations too, or ROOM for the rows of a list. Absent operands have no rows.
template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, i64 GIVEN_ROWS, i64 DELTAS, i64 ROOM, class G>
struct Site {
    In<u32> parameters;
    u32 what;
    G importance;
    In<float> given, delta;
    In<u32> list;

    DEVICE_MEMBER Sources at(i64 row, i64 column) const {
        const bool reads = MASK == MASK_IMPORTANCE || MASK == MASK_BETWEEN || MASK == MASK_ROUNDED;
        return with(reads ? load<COLUMNS>(importance, row, column) : fill(0.0f), row, column);
    }

    // With importances that are known.
    DEVICE_MEMBER Sources with(Four g, i64 row, i64 column) const {
        Sources s = {g, fill(0.0f), 0.0f};
        if (DRAW == DRAW_GIVEN) {
            s.r = load<COLUMNS>(given, GIVEN_ROWS == 1 ? 0 : row, column);
        }
        if (DRAW == DRAW_UNIFORM || DRAW == DRAW_COIN) {
            s.r = uniforms<ROWS>(parameters, row, column, what);
        }
        if (DRAW == DRAW_COIN) {
            s.r = map([&](int k) { return s.r.v[k] < 0.5f ? 0.0f : 1.0f; });
        }
        if (DELTAS > 0) {
            s.delta = delta[DELTAS == 1 ? 0 : row];
        }
        return s;
    }

    // m - delta.
    DEVICE_MEMBER Four mask(const Sources &s, float threshold) const {
        return map([&](int k) {
            float g = s.g.v[k], r = s.r.v[k];
            float m = MASK == MASK_IMPORTANCE ? g
                      : MASK == MASK_BETWEEN  ? g + (1.0f - g) * r
                      : MASK == MASK_DRAWN    ? r
                      : MASK == MASK_ROUNDED  ? (g > threshold ? 1.0f : 0.0f)
                                              : 1.0f;
            return m - s.delta;
        });
    }

    // dm / dg.
    DEVICE_MEMBER float slope(const Sources &s, int k) const { return MASK == MASK_BETWEEN ? 1.0f - s.r.v[k] : 1.0f; }

    // dm / dr.
    DEVICE_MEMBER float source_slope(const Sources &s, int k) const { return MASK == MASK_BETWEEN ? 1.0f - s.g.v[k] : 1.0f; }

    DEVICE_MEMBER i64 own_row(i64 row) const { return own_row_of<ROOM>(list, row); }

    // Whether a row of activations is behind those of the list.
    DEVICE_MEMBER bool is_behind(i64 row) const { return row < ROOM && list[row] == NO_ROW; }
};

template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, i64 GIVEN_ROWS, i64 DELTAS, i64 ROOM>
DEVICE void masked(In<u32> parameters, u32 what, InFloats auto a, InFloats auto importance, In<float> given, In<float> delta,
                   In<u32> list, OutFloats auto h, float threshold) {
    Site<ROWS, COLUMNS, MASK, DRAW, GIVEN_ROWS, DELTAS, ROOM, decltype(importance)> site = {parameters, what, importance, given, delta, list};
    each_four<(ROOM > 0 ? ROOM : ROWS), COLUMNS>([&](i64 own, i64 column) {
        if (site.is_behind(own)) {
            store<COLUMNS>(h, own, column, fill(0.0f));
            return;
        }
        i64 row = ROOM > 0 ? (i64)list[own] : own;
        Four x = load<COLUMNS>(a, own, column), m = site.mask(site.at(row, column), threshold);
        store<COLUMNS>(h, own, column, map([&](int k) { return x.v[k] * m.v[k]; }));
    });
}

// A row of a mask that is read: its row of activations, or -1, logits and activations.
struct MaskedRow {
    i64 own;
    Four logit, x;
};

// As `masked` with importances that are computed from logits `z`, and in the same pass the penalty sums
// of a stretch of rows and the number of active components.
template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, i64 GIVEN_ROWS, i64 DELTAS, i64 ROOM, int GATES, int PENALTY,
          int PARAMETER, i64 STRETCH>
DEVICE void masked_with_sums(In<u32> parameters, u32 what, InFloats auto a, InFloats auto z, In<float> given, In<float> delta,
                             In<u32> list, OutFloats auto h, Out<float> parts, Out<float> counts, float threshold, float alive) {
    Site<ROWS, COLUMNS, MASK, DRAW, GIVEN_ROWS, DELTAS, ROOM, decltype(z)> site = {parameters, what, z, given, delta, list};
    float parameter = penalty_parameter<PENALTY, PARAMETER>(parameters), active = 0.0f;
    wide_column_parts<ROWS, COLUMNS, STRETCH, 4>(
        parts,
        [&](i64 row, i64 column) {
            i64 own = site.own_row(row);
            return MaskedRow{own, load<COLUMNS>(z, row, column), own < 0 ? fill(0.0f) : load<COLUMNS>(a, own, column)};
        },
        [&](i64 row, i64 column, MaskedRow of) {
            Four importance = map([&](int k) { return lower<GATES>(of.logit.v[k]); });
            if (site.is_behind(row)) {
                store<COLUMNS>(h, row, column, fill(0.0f));
            }
            if (of.own >= 0) {
                Four m = site.mask(site.with(importance, row, column), threshold);
                store<COLUMNS>(h, of.own, column, map([&](int k) { return of.x.v[k] * m.v[k]; }));
            }
            return penalties<COLUMNS, GATES, PENALTY>(of.logit, importance, column, parameter, alive, active);
        });
    give_count(counts, active);
}

// Gradients of the activation, the importance and draws given for each position; those that are
// not needed are left out.
template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, i64 GIVEN_ROWS, i64 DELTAS, i64 ROOM, int WANT_A,
          int WANT_G, int WANT_R>
DEVICE void masked_grad(In<u32> parameters, u32 what, InFloats auto gh, InFloats auto a, InFloats auto importance, In<float> given,
                        In<float> delta, In<u32> list, OutFloats auto of_a, OutFloats auto of_g, OutFloats auto of_r,
                        float threshold) {
    Site<ROWS, COLUMNS, MASK, DRAW, GIVEN_ROWS, DELTAS, ROOM, decltype(importance)> site = {parameters, what, importance, given, delta, list};
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        if (WANT_A == 1 && site.is_behind(row)) {
            store<COLUMNS>(of_a, row, column, fill(0.0f));
        }
        i64 own = site.own_row(row);
        if (own < 0) {
            if (WANT_G == 1) {
                store<COLUMNS>(of_g, row, column, fill(0.0f));
            }
            if (WANT_R == 1) {
                store<COLUMNS>(of_r, row, column, fill(0.0f));
            }
            return;
        }
        Sources s = site.at(row, column);
        Four up = load<COLUMNS>(gh, own, column);
        if (WANT_A) {
            Four m = site.mask(s, threshold);
            give<COLUMNS, WANT_A == 2>(of_a, own, column, map([&](int k) { return up.v[k] * m.v[k]; }));
        }
        if (!WANT_G && !WANT_R) {
            return;
        }
        Four x = load<COLUMNS>(a, own, column);
        if (WANT_G) {
            give<COLUMNS, WANT_G == 2>(of_g, row, column,
                                       map([&](int k) { return up.v[k] * x.v[k] * site.slope(s, k); }));
        }
        if (WANT_R) {
            give<COLUMNS, WANT_R == 2>(of_r, row, column,
                                       map([&](int k) { return up.v[k] * x.v[k] * site.source_slope(s, k); }));
        }
    });
}

// Gradients of the activation and of logits, of which the mask computes importances: `before` is the
// gradient of the importances from other readers, and `of_sums` that of the penalty sums. With a
// STRETCH, sums of the logits' gradient over stretches of rows go to `parts`.
template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, i64 GIVEN_ROWS, i64 DELTAS, i64 ROOM, int GATES, int PENALTY,
          int PARAMETER, int WANT_A, bool BEFORE, bool OF_SUMS, i64 STRETCH>
DEVICE void masked_logits_grad(In<u32> parameters, u32 what, InFloats auto gh, InFloats auto a, InFloats auto z, In<float> given,
                               In<float> delta, In<u32> list, InFloats auto before, In<float> of_sums, OutFloats auto of_a,
                               OutFloats auto dz, auto parts, float threshold) {
    Site<ROWS, COLUMNS, MASK, DRAW, GIVEN_ROWS, DELTAS, ROOM, decltype(z)> site = {parameters, what, z, given, delta, list};
    float parameter = penalty_parameter<PENALTY, PARAMETER>(parameters);
    each_four_summed<ROWS, COLUMNS, STRETCH>(parts, [&](i64 row, i64 column) {
        if (WANT_A == 1 && site.is_behind(row)) {
            store<COLUMNS>(of_a, row, column, fill(0.0f));
        }
        i64 own = site.own_row(row);
        Four logit = load<COLUMNS>(z, row, column), of_g = fill(0.0f);
        if (own >= 0) {
            Four up = load<COLUMNS>(gh, own, column), x = load<COLUMNS>(a, own, column);
            Sources s = site.with(map([&](int k) { return lower<GATES>(logit.v[k]); }), row, column);
            if (WANT_A) {
                Four m = site.mask(s, threshold);
                give<COLUMNS, WANT_A == 2>(of_a, own, column, map([&](int k) { return up.v[k] * m.v[k]; }));
            }
            of_g = map([&](int k) { return up.v[k] * x.v[k] * site.slope(s, k); });
        }
        if (BEFORE) {
            Four others = load<COLUMNS>(before, row, column);
            of_g = map([&](int k) { return others.v[k] + of_g.v[k]; });
        }
        Four total = map([&](int k) { return lower_grad<GATES>(logit.v[k], of_g.v[k]); });
        if (OF_SUMS) {
            Four of_penalty = penalty_grad<GATES, PENALTY>(logit, load<COLUMNS>(of_sums, 0, column), parameter);
            total = map([&](int k) { return total.v[k] + of_penalty.v[k]; });
        }
        store<COLUMNS>(dz, row, column, total);
        return as_stored(dz, total);
    });
}

// The gradient of a single row of draws: the sum over positions.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, bool BETWEEN, i64 ROOM>
DEVICE void masked_source_sums(InFloats auto gh, InFloats auto a, InFloats auto importance, In<u32> list, Out<float> parts) {
    column_parts<ROWS, COLUMNS, STRETCH>(parts, [&](i64 row, i64 column) {
        i64 own = own_row_of<ROOM>(list, row);
        if (own < 0) {
            return 0.0f;
        }
        float slope = BETWEEN ? 1.0f - importance[row * COLUMNS + column] : 1.0f;
        return gh[own * COLUMNS + column] * a[own * COLUMNS + column] * slope;
    });
}

// The gradient of the delta masks: -gh . a of each position that is routed.
template <int THREADS, i64 COLUMNS, bool ADD, i64 ROOM>
DEVICE void masked_delta_grad(InFloats auto gh, InFloats auto a, In<u32> list, Out<float> of_delta) {
    i64 row = blockIdx.x, own = own_row_of<ROOM>(list, row);
    float dot = row_sum<THREADS, COLUMNS>([&](i64 column) {
        return own < 0 ? 0.0f : gh[own * COLUMNS + column] * a[own * COLUMNS + column];
    });
    if (threadIdx.x == 0) {
        give<ADD>(of_delta, row, -dot);
    }
}
