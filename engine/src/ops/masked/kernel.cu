// How the mask is made, and where its draws come from; the numbers of `cuda.rs`.
enum { MASK_IMPORTANCE, MASK_BETWEEN, MASK_DRAWN, MASK_ROUNDED, MASK_ONES };
enum { DRAW_NONE, DRAW_UNIFORM, DRAW_COIN, DRAW_GIVEN };

// What a mask is made of, at four columns of a row.
struct Sources {
    Four g, r;
    float route, delta;
};

// Operands that are not there have no rows.
template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, u32 WHAT, i64 GIVEN_ROWS, i64 DELTAS, bool ROUTE>
struct Site {
    In<u32> parameters;
    In<float> importance, given, delta, route;

    DEVICE_MEMBER Sources at(i64 row, i64 column) const {
        Sources s = {fill(0.0f), fill(0.0f), 1.0f, 0.0f};
        if (MASK == MASK_IMPORTANCE || MASK == MASK_BETWEEN || MASK == MASK_ROUNDED) {
            s.g = load<COLUMNS>(importance, row, column);
        }
        if (DRAW == DRAW_GIVEN) {
            s.r = load<COLUMNS>(given, GIVEN_ROWS == 1 ? 0 : row, column);
        }
        if (DRAW == DRAW_UNIFORM || DRAW == DRAW_COIN) {
            s.r = uniforms(parameters, row, column, WHAT);
        }
        if (DRAW == DRAW_COIN) {
            s.r = map([&](int k) { return s.r.v[k] < 0.5f ? 0.0f : 1.0f; });
        }
        if (DELTAS > 0) {
            s.delta = delta[DELTAS == 1 ? 0 : row];
        }
        if (ROUTE) {
            s.route = route[row];
        }
        return s;
    }

    // route (m - delta).
    DEVICE_MEMBER Four mask(const Sources &s, float threshold) const {
        return map([&](int k) {
            float g = s.g.v[k], r = s.r.v[k];
            float m = MASK == MASK_IMPORTANCE ? g
                      : MASK == MASK_BETWEEN  ? g + (1.0f - g) * r
                      : MASK == MASK_DRAWN    ? r
                      : MASK == MASK_ROUNDED  ? (g > threshold ? 1.0f : 0.0f)
                                              : 1.0f;
            return s.route * (m - s.delta);
        });
    }

    // route dm / dg.
    DEVICE_MEMBER float slope(const Sources &s, int k) const {
        return MASK == MASK_BETWEEN ? s.route * (1.0f - s.r.v[k]) : s.route;
    }

    // route dm / dr.
    DEVICE_MEMBER float source_slope(const Sources &s, int k) const {
        return MASK == MASK_BETWEEN ? s.route * (1.0f - s.g.v[k]) : s.route;
    }
};

template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, u32 WHAT, i64 GIVEN_ROWS, i64 DELTAS, bool ROUTE>
DEVICE void masked(In<u32> parameters, InFloats auto a, In<float> importance, In<float> given, In<float> delta,
                   In<float> route, OutFloats auto h, float threshold) {
    Site<ROWS, COLUMNS, MASK, DRAW, WHAT, GIVEN_ROWS, DELTAS, ROUTE> site = {parameters, importance, given, delta, route};
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Four x = load<COLUMNS>(a, row, column), m = site.mask(site.at(row, column), threshold);
        store<COLUMNS>(h, row, column, map([&](int k) { return x.v[k] * m.v[k]; }));
    });
}

// Gradients of the activation, the importance and draws that are given at each position; what nobody wants is not there.
template <i64 ROWS, i64 COLUMNS, int MASK, int DRAW, u32 WHAT, i64 GIVEN_ROWS, i64 DELTAS, bool ROUTE, int WANT_A,
          int WANT_G, int WANT_R>
DEVICE void masked_grad(In<u32> parameters, InFloats auto gh, InFloats auto a, In<float> importance, In<float> given,
                        In<float> delta, In<float> route, OutFloats auto of_a, OutFloats auto of_g, OutFloats auto of_r,
                        float threshold) {
    Site<ROWS, COLUMNS, MASK, DRAW, WHAT, GIVEN_ROWS, DELTAS, ROUTE> site = {parameters, importance, given, delta, route};
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Sources s = site.at(row, column);
        Four up = load<COLUMNS>(gh, row, column);
        if (WANT_A) {
            Four m = site.mask(s, threshold);
            give<COLUMNS, WANT_A == 2>(of_a, row, column, map([&](int k) { return up.v[k] * m.v[k]; }));
        }
        if (!WANT_G && !WANT_R) {
            return;
        }
        Four x = load<COLUMNS>(a, row, column);
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

// Of one row of draws: the sum over positions.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH, bool BETWEEN, bool ROUTE>
DEVICE void masked_source_sums(InFloats auto gh, InFloats auto a, In<float> importance, In<float> route, Out<float> parts) {
    column_parts<ROWS, COLUMNS, STRETCH>(parts, [&](i64 row, i64 column) {
        i64 at = row * COLUMNS + column;
        float slope = ROUTE ? route[row] : 1.0f;
        if (BETWEEN) {
            slope *= 1.0f - importance[at];
        }
        return gh[at] * a[at] * slope;
    });
}

// Of the delta masks: -route gh . a of each position.
template <int THREADS, i64 COLUMNS, bool ADD, bool ROUTE>
DEVICE void masked_delta_grad(InFloats auto gh, InFloats auto a, In<float> route, Out<float> of_delta) {
    i64 row = blockIdx.x;
    float dot = row_sum<THREADS, COLUMNS>([&](i64 column) { return gh[row * COLUMNS + column] * a[row * COLUMNS + column]; });
    if (threadIdx.x == 0) {
        give<ADD>(of_delta, row, -(ROUTE ? route[row] : 1.0f) * dot);
    }
}
