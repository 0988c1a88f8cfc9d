// Tiles of 32 queries and 32 keys. For scores, a lane has one key, and a warp every eighth query;
// the columns of the hidden layer pass through shared memory 32 at a time. For gradients of a
// side, a lane has one of those columns, and a warp every eighth row. Tiles have rows padded by
// one.

DEVICE float quick_logistic(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <i64 POSITIONS, int HEADS, int HIDDEN, int SIZE, bool CAUSAL> struct Additive {
    static const i64 positions = POSITIONS, tiles = (POSITIONS + 31) / 32;
    static const int heads = HEADS, hidden = HIDDEN, size = SIZE;
    // Columns of the hidden layer, padded to whole vectors of lanes; and a padded row of a head.
    static const int padded = (HIDDEN + 31) / 32 * 32, pitch = SIZE + 1, columns = (SIZE + 31) / 32;

    // The tiles of keys that a tile of queries attends to, and of queries that attend to keys.
    DEVICE_MEMBER static i64 end_keys(i64 tile) { return CAUSAL ? tile + 1 : tiles; }
    DEVICE_MEMBER static i64 first_queries(i64 tile) { return CAUSAL ? tile : 0; }
    DEVICE_MEMBER static bool sees(i64 query, i64 key) {
        return key < POSITIONS && query < POSITIONS && (!CAUSAL || key <= query);
    }
};

// A head in a batch row, its place in the grid, and the number of the block's tile.
template <class A> struct Place {
    i64 tile, unit, b;
    int head, lane, line;

    DEVICE_MEMBER Place()
        : tile(blockIdx.x % A::tiles), unit(blockIdx.x / A::tiles), b(unit / A::heads), head((int)(unit % A::heads)),
          lane(threadIdx.x % 32), line(threadIdx.x / 32) {}

    DEVICE_MEMBER i64 row(i64 position) const { return b * A::positions + position; }
    // Of a head's columns.
    DEVICE_MEMBER i64 hidden(i64 position) const { return (row(position) * A::heads + head) * A::hidden; }
    DEVICE_MEMBER i64 value(i64 position) const { return (row(position) * A::heads + head) * A::size; }
};

// 32 columns of a side from `column` on: the part of the head and that of all heads.
template <class A>
DEVICE void load_side(Shared<float> side, const Place<A> &at, InFloats auto by_head, InFloats auto shared, i64 position, int column) {
    for (int row = at.line; row < 32; row += 8) {
        float value = 0.0f;
        if (position + row < A::positions && column + at.lane < A::hidden) {
            value = by_head[at.hidden(position + row) + column + at.lane];
            value += shared[at.row(position + row) * A::hidden + column + at.lane];
        }
        side[row * 33 + at.lane] = value;
    }
}

template <class A> DEVICE void load_heads(Shared<float> tile, const Place<A> &at, InFloats auto x, i64 position) {
    for (int row = at.line; row < 32; row += 8) {
        for (int column = at.lane; column < A::size; column += 32) {
            tile[row * A::pitch + column] = position + row < A::positions ? (float)x[at.value(position + row) + column] : 0.0f;
        }
    }
}

// Operands of the scores of a tile.
template <class Q, class K, class C, class D> struct Scores {
    Q q;
    K k;
    C c;
    D d;
    In<float> w, beta, scale;
};

struct Rows4 {
    float v[4];
};

// tanh(x / 2) of queries `line + 8 i` and the key `lane`.
template <class A>
DEVICE Rows4 links(const Place<A> &at, const auto &of, Shared<float> queries, Shared<float> keys, i64 query, i64 key) {
    Rows4 sum = {};
    for (int first = 0; first < A::hidden; first += 32) {
        __syncthreads();
        load_side(queries, at, of.q, of.c, query, first);
        load_side(keys, at, of.k, of.d, key, first);
        __syncthreads();
        for (int column = 0; column < 32 && first + column < A::hidden; ++column) {
            float weight = of.w[first + column], other = keys[at.lane * 33 + column];
            for (int i = 0; i < 4; ++i) {
                float z = queries[(at.line + 8 * i) * 33 + column] + other;
                sum.v[i] = fmaf(weight, z * quick_logistic(z), sum.v[i]);
            }
        }
    }
    float beta = of.beta[0];
    for (int i = 0; i < 4; ++i) {
        sum.v[i] = 2.0f * logistic(sum.v[i] + beta) - 1.0f;
    }
    return sum;
}

// One tile of queries of one head.
template <class A>
DEVICE void additive_attention(InFloats auto q, InFloats auto k, InFloats auto c, InFloats auto d, InFloats auto v, In<float> w,
                               In<float> beta, In<float> scale, OutFloats auto y, Out<float> sums) {
    LAUNCHED(memory, 3 * 32 * 33 + 32 * A::pitch);
    Shared<float> queries = memory, keys = part_of(memory, 32 * 33), powers = part_of(memory, 2 * 32 * 33);
    Shared<float> values = part_of(memory, 3 * 32 * 33);
    Place<A> at;
    Scores<decltype(q), decltype(k), decltype(c), decltype(d)> of = {q, k, c, d, w, beta, scale};
    float total[4] = {}, sum[4][A::columns] = {};
    i64 position = at.tile * 32, end = A::end_keys(at.tile);
    for (i64 other = 0; other < end; ++other) {
        i64 first = other * 32;
        Rows4 link = links(at, of, queries, keys, position, first);
        for (int i = 0; i < 4; ++i) {
            int row = at.line + 8 * i;
            float power = A::sees(position + row, first + at.lane) ? expf(scale[0] * link.v[i]) : 0.0f;
            total[i] += warp_sum(power);
            powers[row * 33 + at.lane] = power;
        }
        load_heads(values, at, v, first);
        __syncthreads();
        add_weighted<A, false>(sum, powers, values);
    }
    for (int i = 0; i < 4; ++i) {
        i64 t = position + at.line + 8 * i;
        if (t >= A::positions) {
            continue;
        }
        for (int part = 0; part < A::columns; ++part) {
            if (at.lane + 32 * part < A::size) {
                y[at.value(t) + at.lane + 32 * part] = sum[i][part] / total[i];
            }
        }
        if (at.lane == 0) {
            sums[at.unit * A::positions + t] = total[i];
        }
    }
}

// Slopes of the scores of a tile of queries and one of keys, for queries `line + 8 i` and the key
// `lane`; their weights, and the slopes of the scaled scores times those of `scale`.
struct Slopes {
    float slopes[4], weights[4], of_scale;
};

template <class A>
DEVICE Slopes slopes_of(const Place<A> &at, const auto &of, Shared<float> queries, Shared<float> keys, Shared<float> gradients,
                        Shared<float> values, In<float> sums, In<float> dots, i64 query, i64 key) {
    Rows4 link = links(at, of, queries, keys, query, key);
    Slopes made = {};
    float scale = of.scale[0];
    for (int i = 0; i < 4; ++i) {
        int row = at.line + 8 * i;
        if (A::sees(query + row, key + at.lane)) {
            i64 index = at.unit * A::positions + query + row;
            float up = 0.0f;
            for (int column = 0; column < A::size; ++column) {
                up = fmaf(gradients[row * A::pitch + column], values[at.lane * A::pitch + column], up);
            }
            made.weights[i] = expf(scale * link.v[i]) / sums[index];
            float slope = made.weights[i] * (up - dots[index]);
            made.of_scale = fmaf(slope, link.v[i], made.of_scale);
            made.slopes[i] = slope * scale * 0.5f * (1.0f - link.v[i] * link.v[i]);
        }
    }
    return made;
}

// A silu and its slope.
struct Silu {
    float value, slope;
};

DEVICE Silu silu_and_slope(float z) {
    float share = quick_logistic(z), value = z * share;
    return Silu{value, share + value * (1.0f - share)};
}

// Gradients of one tile of queries of one head; of the weights, beta and the scale from its pairs.
template <class A>
DEVICE void additive_attention_grad_q(InFloats auto q, InFloats auto k, InFloats auto c, InFloats auto d, InFloats auto v,
                                      InFloats auto g, In<float> w, In<float> beta, In<float> scale, In<float> sums, In<float> dots,
                                      OutFloats auto of_q, Out<float> w_parts, Out<float> beta_parts, Out<float> scale_parts) {
    const int TILES = 3 * 32 * 33 + 2 * 32 * A::pitch;
    LAUNCHED(memory, TILES + 40 * A::padded);
    Shared<float> queries = memory, keys = part_of(memory, 32 * 33), slopes = part_of(memory, 2 * 32 * 33);
    Shared<float> gradients = part_of(memory, 3 * 32 * 33), values = part_of(memory, 3 * 32 * 33 + 32 * A::pitch);
    // Sums of a thread's own rows and columns.
    Shared<float> of_rows = part_of(memory, TILES), of_w = part_of(memory, TILES + 32 * A::padded);
    Place<A> at;
    Scores<decltype(q), decltype(k), decltype(c), decltype(d)> of = {q, k, c, d, w, beta, scale};
    i64 position = at.tile * 32, end = A::end_keys(at.tile);
    for (int column = at.lane; column < A::padded; column += 32) {
        for (int i = 0; i < 4; ++i) {
            of_rows[(at.line + 8 * i) * A::padded + column] = 0.0f;
        }
        of_w[at.line * A::padded + column] = 0.0f;
    }
    load_heads(gradients, at, g, position);
    float of_beta = 0.0f, of_scale = 0.0f;
    for (i64 other = 0; other < end; ++other) {
        i64 first = other * 32;
        __syncthreads();
        load_heads(values, at, v, first);
        Slopes made = slopes_of(at, of, queries, keys, gradients, values, sums, dots, position, first);
        of_scale += made.of_scale;
        for (int i = 0; i < 4; ++i) {
            of_beta += made.slopes[i];
            slopes[(at.line + 8 * i) * 33 + at.lane] = made.slopes[i];
        }
        for (int column = 0; column < A::hidden; column += 32) {
            __syncthreads();
            load_side(queries, at, q, c, position, column);
            load_side(keys, at, k, d, first, column);
            __syncthreads();
            Rows4 sum = {};
            float sum_w = 0.0f;
            // More at a time take too many registers.
#pragma unroll 4
            for (int key = 0; key < 32; ++key) {
                float along = keys[key * 33 + at.lane];
                for (int i = 0; i < 4; ++i) {
                    float slope = slopes[(at.line + 8 * i) * 33 + key];
                    Silu silu = silu_and_slope(queries[(at.line + 8 * i) * 33 + at.lane] + along);
                    sum.v[i] = fmaf(slope, silu.slope, sum.v[i]);
                    sum_w = fmaf(slope, silu.value, sum_w);
                }
            }
            for (int i = 0; i < 4; ++i) {
                of_rows[(at.line + 8 * i) * A::padded + column + at.lane] += sum.v[i];
            }
            of_w[at.line * A::padded + column + at.lane] += sum_w;
        }
    }
    of_beta = block_sum<256>(of_beta);
    of_scale = block_sum<256>(of_scale);
    if (threadIdx.x == 0) {
        beta_parts[blockIdx.x] = of_beta;
        scale_parts[blockIdx.x] = of_scale;
    }
    for (int column = at.lane; column < A::hidden; column += 32) {
        for (int i = 0; i < 4; ++i) {
            i64 t = position + at.line + 8 * i;
            if (t < A::positions) {
                of_q[at.hidden(t) + column] = w[column] * of_rows[(at.line + 8 * i) * A::padded + column];
            }
        }
    }
    __syncthreads();
    for (int column = threadIdx.x; column < A::hidden; column += 256) {
        float total = 0.0f;
        for (int line = 0; line < 8; ++line) {
            total += of_w[line * A::padded + column];
        }
        w_parts[(i64)blockIdx.x * A::hidden + column] = total;
    }
}

// Gradients of one tile of keys and values of one head.
template <class A>
DEVICE void additive_attention_grad_kv(InFloats auto q, InFloats auto k, InFloats auto c, InFloats auto d, InFloats auto v,
                                       InFloats auto g, In<float> w, In<float> beta, In<float> scale, In<float> sums, In<float> dots,
                                       OutFloats auto of_k, OutFloats auto of_v) {
    const int TILES = 4 * 32 * 33 + 2 * 32 * A::pitch;
    LAUNCHED(memory, TILES + 32 * A::padded);
    Shared<float> queries = memory, keys = part_of(memory, 32 * 33);
    Shared<float> slopes = part_of(memory, 2 * 32 * 33), weights = part_of(memory, 3 * 32 * 33);
    Shared<float> gradients = part_of(memory, 4 * 32 * 33), values = part_of(memory, 4 * 32 * 33 + 32 * A::pitch);
    Shared<float> of_rows = part_of(memory, TILES);
    Place<A> at;
    Scores<decltype(q), decltype(k), decltype(c), decltype(d)> of = {q, k, c, d, w, beta, scale};
    i64 first = at.tile * 32;
    for (int column = at.lane; column < A::padded; column += 32) {
        for (int i = 0; i < 4; ++i) {
            of_rows[(at.line + 8 * i) * A::padded + column] = 0.0f;
        }
    }
    float of_values[4][A::columns] = {};
    load_heads(values, at, v, first);
    for (i64 other = A::first_queries(at.tile); other < A::tiles; ++other) {
        i64 position = other * 32;
        __syncthreads();
        load_heads(gradients, at, g, position);
        Slopes made = slopes_of(at, of, queries, keys, gradients, values, sums, dots, position, first);
        for (int i = 0; i < 4; ++i) {
            slopes[(at.line + 8 * i) * 33 + at.lane] = made.slopes[i];
            weights[(at.line + 8 * i) * 33 + at.lane] = made.weights[i];
        }
        for (int column = 0; column < A::hidden; column += 32) {
            __syncthreads();
            load_side(queries, at, q, c, position, column);
            load_side(keys, at, k, d, first, column);
            __syncthreads();
            Rows4 sum = {};
            for (int query = 0; query < 32; ++query) {
                float along = queries[query * 33 + at.lane];
                for (int i = 0; i < 4; ++i) {
                    Silu silu = silu_and_slope(along + keys[(at.line + 8 * i) * 33 + at.lane]);
                    sum.v[i] = fmaf(slopes[query * 33 + at.line + 8 * i], silu.slope, sum.v[i]);
                }
            }
            for (int i = 0; i < 4; ++i) {
                of_rows[(at.line + 8 * i) * A::padded + column + at.lane] += sum.v[i];
            }
        }
        add_weighted<A, true>(of_values, weights, gradients);
    }
    for (int i = 0; i < 4; ++i) {
        i64 t = first + at.line + 8 * i;
        if (t >= A::positions) {
            continue;
        }
        for (int column = at.lane; column < A::hidden; column += 32) {
            of_k[at.hidden(t) + column] = w[column] * of_rows[(at.line + 8 * i) * A::padded + column];
        }
        for (int part = 0; part < A::columns; ++part) {
            if (at.lane + 32 * part < A::size) {
                of_v[at.value(t) + at.lane + 32 * part] = of_values[i][part];
            }
        }
    }
}

// y = the sum of the heads of x.
template <i64 ROWS, int HEADS, i64 HIDDEN> DEVICE void additive_attention_shared(InFloats auto x, OutFloats auto y) {
    each_four<ROWS, HIDDEN>([&](i64 row, i64 column) {
        Four sum = load<HIDDEN>(x, row * HEADS, column);
        for (int head = 1; head < HEADS; ++head) {
            Four other = load<HIDDEN>(x, row * HEADS + head, column);
            sum = map([&](int k) { return sum.v[k] + other.v[k]; });
        }
        store<HIDDEN>(y, row, column, sum);
    });
}
