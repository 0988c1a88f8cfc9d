// A block of eight warps processes tiles of positions by components. Two tiles of factors alternate
// in shared memory: one is multiplied while the other arrives.

// Shares of the warps in a tile of LINES positions by WIDTH components: 16 lines each.
template <int LINES, int WIDTH> struct Share {
    static const int across = 8 / (LINES / 16), n = WIDTH / 8 / across;
    typedef Sums<1, n> Part;

    static DEVICE_MEMBER int line() { return threadIdx.x / 32 / across * 16; }
    static DEVICE_MEMBER int column() { return threadIdx.x / 32 % across * n * 8; }
};

// Shares of the warps in the result, LINES by N: 32 lines each.
template <int LINES, int N> struct ResultShare {
    static const int across = 8 / (LINES / 32), columns = whole(N, 32 > 8 * across ? 32 : 8 * across), n = columns / 8 / across;
    typedef Sums<2, n> Part;

    static DEVICE_MEMBER int line() { return threadIdx.x / 32 / across * 32; }
    static DEVICE_MEMBER int column() { return threadIdx.x / 32 % across * n * 8; }

    // `give(line, column, four)` for all fours of this warp.
    template <class F> static DEVICE_MEMBER void each(const Part &part, F give) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int tile = 0; tile < n; ++tile) {
                give(line() + 16 * m + row_of_four(), column() + 8 * tile + column_of_four(), part.four(m, tile));
            }
        }
    }
};

// Masks of this lane's fours of a tile, and the slopes that scale their gradients.
template <int N> struct Masks {
    Four m[N], slope[N], source_slope[N];
};

template <int LINES, int WIDTH, i64 ROWS, i64 COLUMNS, class S>
DEVICE void make_masks(Masks<Share<LINES, WIDTH>::n> &masks, const S &site, i64 row, i64 column, float threshold) {
    typedef Share<LINES, WIDTH> Warps;
    row += Warps::line() + row_of_four();
    column += Warps::column() + column_of_four();
#pragma unroll
    for (int n = 0; n < Warps::n; ++n) {
        bool there = row < ROWS && column + 8 * n < COLUMNS;
        Sources s = there ? site.at(row, column + 8 * n) : Sources{fill(0.0f), fill(0.0f), 0.0f, 0.0f};
        masks.m[n] = there ? site.mask(s, threshold) : fill(0.0f);
        masks.slope[n] = map([&](int k) { return site.slope(s, k); });
        masks.source_slope[n] = map([&](int k) { return site.source_slope(s, k); });
    }
}

// tile = sums * masks, in bf16.
template <int LINES, int WIDTH>
DEVICE void store_masked(Shared<bf16> tile, const typename Share<LINES, WIDTH>::Part &sums, const Masks<Share<LINES, WIDTH>::n> &masks) {
    typedef Share<LINES, WIDTH> Warps;
    int at = (Warps::line() + row_of_four()) * pitch(WIDTH) + Warps::column() + column_of_four();
#pragma unroll
    for (int n = 0; n < Warps::n; ++n) {
        Four x = sums.four(0, n), m = masks.m[n];
        store_wide(tile, at + 8 * n, map([&](int k) { return x.v[k] * m.v[k]; }));
    }
}

// y = [y +] ((a FIRST) * M) SECOND [+ s clean] [+ (1 - s) bias], for LINES positions a block.
//
// Forward: a is x, FIRST is V [K, C], SECOND is U [C, N]. BACK: a is the gradient of y, FIRST is
// U^T stored [C, K], SECOND is V^T stored [N, C], and y is the gradient of x. For the
// gradients of importances or sources (WANT_G, WANT_R), x V is computed too; they are its product
// with (a FIRST).
template <i64 ROWS, i64 C, int K, int N, int LINES, int WIDTH, bool BACK, int MASK, int DRAW, i64 GIVEN_ROWS, i64 DELTAS,
          bool ROUTE, bool CLEAN, bool BIAS, int WANT_Y, int WANT_G, int WANT_R>
DEVICE void site_rows(In<u32> parameters, u32 what, In<bf16> a, In<bf16> first, In<bf16> second, In<bf16> x, InFloats auto importance,
                      In<float> given, In<float> delta, In<float> route, InFloats auto clean, In<float> bias, OutFloats auto y,
                      OutFloats auto of_g, OutFloats auto of_r, float threshold) {
    typedef Share<LINES, WIDTH> Warps;
    typedef ResultShare<LINES, N> Results;
    const int T = SITE_THREADS, k_whole = whole(K, 32), n_whole = Results::columns;
    const bool slopes = WANT_G || WANT_R;
    Site<ROWS, C, MASK, DRAW, GIVEN_ROWS, DELTAS, ROUTE, decltype(importance)> site = {parameters, what, importance, given, delta, route};
    const int a_room = room(LINES, k_whole), x_room = slopes ? room(LINES, n_whole) : 0;
    const int first_room = BACK ? room(WIDTH, k_whole) : room(k_whole, WIDTH);
    const int second_room = BACK ? room(n_whole, WIDTH) : room(WIDTH, n_whole);
    LAUNCHED(memory, a_room + x_room + first_room + second_room + room(LINES, WIDTH));
    Shared<bf16> a_tile = part_of<bf16>(memory, 0), x_tile = part_of<bf16>(memory, a_room);
    Shared<bf16> first_tile = part_of<bf16>(memory, a_room + x_room);
    Shared<bf16> second_tile = part_of<bf16>(memory, a_room + x_room + first_room);
    Shared<bf16> masked_tile = part_of<bf16>(memory, a_room + x_room + first_room + second_room);
    i64 row = (i64)blockIdx.x * LINES;
    auto copy_first = [&](i64 column) {
        if (BACK) {
            copy_tile<T, WIDTH, k_whole, C, K>(first_tile, first, column, 0);
        } else {
            copy_tile<T, k_whole, WIDTH, K, C>(first_tile, first, 0, column);
        }
        close_group();
    };
    copy_tile<T, LINES, k_whole, ROWS, K>(a_tile, a, row, 0);
    if (slopes) {
        copy_tile<T, LINES, n_whole, ROWS, N>(x_tile, x, row, 0);
    }
    copy_first(0);
    typename Results::Part result;
    result.clear();
#pragma unroll 1
    for (i64 column = 0; column < C; column += WIDTH) {
        if (BACK) {
            copy_tile<T, n_whole, WIDTH, N, C>(second_tile, second, 0, column);
        } else {
            copy_tile<T, WIDTH, n_whole, C, N>(second_tile, second, column, 0);
        }
        close_group();
        Masks<Warps::n> masks;
        make_masks<LINES, WIDTH, ROWS, C>(masks, site, row, column, threshold);
        typename Warps::Part through;
        through.clear();
        await_copies<1>();
        __syncthreads();
        through.template add<k_whole, false, k_whole, BACK, BACK ? k_whole : WIDTH>(a_tile, Warps::line(), first_tile,
                                                                                   Warps::column());
        __syncthreads();
        if (column + WIDTH < C) {
            copy_first(column + WIDTH);
        } else {
            close_group();
        }
        store_masked<LINES, WIDTH>(masked_tile, through, masks);
        await_copies<1>();
        __syncthreads();
        if (slopes) {
            typename Warps::Part inner;
            inner.clear();
            inner.template add<n_whole, false, n_whole, false, WIDTH>(x_tile, Warps::line(), second_tile, Warps::column());
            i64 at = row + Warps::line() + row_of_four(), first_column = column + Warps::column() + column_of_four();
#pragma unroll
            for (int n = 0; n < Warps::n; ++n) {
                Four up = through.four(0, n), acts = inner.four(0, n);
                if (at >= ROWS || first_column + 8 * n >= C) {
                    continue;
                }
                if (WANT_G) {
                    give<C, WANT_G == 2>(of_g, at, first_column + 8 * n,
                                         map([&](int k) { return up.v[k] * acts.v[k] * masks.slope[n].v[k]; }));
                }
                if (WANT_R) {
                    give<C, WANT_R == 2>(of_r, at, first_column + 8 * n,
                                         map([&](int k) { return up.v[k] * acts.v[k] * masks.source_slope[n].v[k]; }));
                }
            }
        }
        if (WANT_Y) {
            result.template add<WIDTH, false, WIDTH, BACK, BACK ? WIDTH : n_whole>(masked_tile, Results::line(), second_tile,
                                                                                 Results::column());
        }
        __syncthreads();
    }
    if (!WANT_Y) {
        return;
    }
    Results::each(result, [&](int line, int column, Four four) {
        if (row + line >= ROWS || column >= N) {
            return;
        }
        float s = CLEAN ? share<DELTAS, ROUTE>(delta, route, row + line) : 0.0f;
        if (CLEAN) {
            Four c = load<N>(clean, row + line, column);
            four = map([&](int k) { return four.v[k] + s * c.v[k]; });
        }
        if (BIAS) {
            Four b = load<N>(bias, 0, column);
            four = map([&](int k) { return four.v[k] + (1.0f - s) * b.v[k]; });
        }
        give<N, WANT_Y == 2>(y, row + line, column, four);
    });
}

// parts[stretch] = ((a FIRST) * M)^T z, [C, N], or transposed, over a stretch of positions. It is
// the gradient of U, with a = x, FIRST = V [K, C] and z the gradient of y; or, BACK, that of V,
// transposed, with a and FIRST as for `site_rows` and z = x.
template <i64 ROWS, i64 C, int K, int N, int LINES, int WIDTH, bool BACK, i64 STRETCH, int MASK, int DRAW, i64 GIVEN_ROWS,
          i64 DELTAS, bool ROUTE>
DEVICE void site_sums(In<u32> parameters, u32 what, In<bf16> a, In<bf16> first, In<bf16> z, InFloats auto importance, In<float> given,
                      In<float> delta, In<float> route, Out<float> parts, float threshold) {
    typedef Share<LINES, WIDTH> Warps;
    typedef ResultShare<WIDTH, N> Results;
    const int T = SITE_THREADS, k_whole = whole(K, 32), n_whole = Results::columns;
    Site<ROWS, C, MASK, DRAW, GIVEN_ROWS, DELTAS, ROUTE, decltype(importance)> site = {parameters, what, importance, given, delta, route};
    const int a_room = room(LINES, k_whole), z_room = room(LINES, n_whole);
    const int first_room = BACK ? room(WIDTH, k_whole) : room(k_whole, WIDTH);
    LAUNCHED(memory, a_room + z_room + first_room + room(LINES, WIDTH));
    Shared<bf16> a_tile = part_of<bf16>(memory, 0), z_tile = part_of<bf16>(memory, a_room);
    Shared<bf16> first_tile = part_of<bf16>(memory, a_room + z_room);
    Shared<bf16> masked_tile = part_of<bf16>(memory, a_room + z_room + first_room);
    i64 column = (i64)blockIdx.x * WIDTH, start = (i64)blockIdx.y * STRETCH;
    i64 end = start + STRETCH < ROWS ? start + STRETCH : ROWS;
    if (BACK) {
        copy_tile<T, WIDTH, k_whole, C, K>(first_tile, first, column, 0);
    } else {
        copy_tile<T, k_whole, WIDTH, K, C>(first_tile, first, 0, column);
    }
    copy_tile<T, LINES, k_whole, ROWS, K>(a_tile, a, start, 0);
    close_group();
    typename Results::Part result;
    result.clear();
#pragma unroll 1
    for (i64 row = start; row < end; row += LINES) {
        copy_tile<T, LINES, n_whole, ROWS, N>(z_tile, z, row, 0);
        close_group();
        Masks<Warps::n> masks;
        make_masks<LINES, WIDTH, ROWS, C>(masks, site, row, column, threshold);
        typename Warps::Part through;
        through.clear();
        await_copies<1>();
        __syncthreads();
        through.template add<k_whole, false, k_whole, BACK, BACK ? k_whole : WIDTH>(a_tile, Warps::line(), first_tile,
                                                                                   Warps::column());
        __syncthreads();
        if (row + LINES < end) {
            copy_tile<T, LINES, k_whole, ROWS, K>(a_tile, a, row + LINES, 0);
        }
        close_group();
        store_masked<LINES, WIDTH>(masked_tile, through, masks);
        await_copies<1>();
        __syncthreads();
        result.template add<LINES, true, WIDTH, false, n_whole>(masked_tile, Results::line(), z_tile, Results::column());
        __syncthreads();
    }
    i64 part = (i64)blockIdx.y * (C * N);
    Results::each(result, [&](int line, int at, Four four) {
        if (column + line >= C) {
            return;
        }
        for (int k = 0; k < 4; ++k) {
            if (at + k < N) {
                parts[part + (BACK ? (at + k) * C + column + line : (column + line) * N + at + k)] = four.v[k];
            }
        }
    });
}
