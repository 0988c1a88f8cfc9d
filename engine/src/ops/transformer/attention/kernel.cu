// Tiles of 32 queries and 32 keys. A warp has every eighth query; a lane has one key of scores, and
// every 32nd column of vectors. Tiles lie in shared memory, rows padded by one; scores and their
// slopes are never larger than a tile.

// Positions `first` to `end - 1`.
struct Range {
    int first, end;
};

// The first TURNED columns of each head of SIZE are rotated; heads begin STEP columns apart. A
// causal query attends to WINDOW keys; with DOCUMENTS, any query to those of its document.
template <int POSITIONS, int HEADS, int KV_HEADS, int SIZE, bool CAUSAL, int WINDOW, bool DOCUMENTS, int TURNED, int STEP,
          i64 Q_STRIDE, i64 K_STRIDE, i64 K_FIRST, i64 V_FIRST>
struct Heads {
    static const i64 q_stride = Q_STRIDE, k_stride = K_STRIDE, k_first = K_FIRST, v_first = V_FIRST;
    static const int positions = POSITIONS, heads = HEADS, kv_heads = KV_HEADS, size = SIZE, step = STEP, group = HEADS / KV_HEADS;
    static const int pitch = SIZE + 1, columns = (SIZE + 31) / 32;
    static const i64 tiles = (POSITIONS + TILE - 1) / TILE;
    static const bool documents = DOCUMENTS, rotary = TURNED > 0;
    static const int turned = TURNED;
    // Whether a query does not attend to the first key.
    static const bool local = CAUSAL && WINDOW < POSITIONS;

    // Offsets of a query, of a row of its size without neighbors, and of a key of a batch row.
    DEVICE_MEMBER static i64 query(i64 b, int head, i64 t) { return (b * POSITIONS + t) * Q_STRIDE + head * STEP; }
    DEVICE_MEMBER static i64 key(i64 b, int head, i64 t) { return (b * POSITIONS + t) * K_STRIDE + head * STEP; }
    DEVICE_MEMBER static i64 output(i64 b, int head, i64 t) { return (b * POSITIONS + t) * (HEADS * SIZE) + head * SIZE; }

    // The keys that some of `rows` queries from `query` on attend to; and the queries that attend
    // to some of so many keys.
    DEVICE_MEMBER static Range keys_of(int query, int rows) {
        int end = query + rows;
        return {local && query >= WINDOW ? query - WINDOW + 1 : 0, CAUSAL && end < POSITIONS ? end : POSITIONS};
    }
    DEVICE_MEMBER static Range queries_of(int key, int rows) {
        int end = key + rows - 1 + WINDOW;
        return {CAUSAL ? key : 0, local && end < POSITIONS ? end : POSITIONS};
    }

    // Whether a query attends to a key, documents aside.
    DEVICE_MEMBER static bool sees(int query, int key) {
        return key < POSITIONS && (!CAUSAL || (key <= query && (!local || query - key < WINDOW)));
    }

    // Whether any of `queries` queries attends to any of `keys` keys; and whether all attend to
    // all, queries beyond the last position included. Documents aside.
    DEVICE_MEMBER static bool sees_any(int query, int queries, int key, int keys) {
        return query < POSITIONS && key < POSITIONS && (!CAUSAL || key < query + queries) &&
               (!local || query - (key + keys - 1) < WINDOW);
    }
    DEVICE_MEMBER static bool sees_all(int query, int queries, int key, int keys) {
        return key + keys <= POSITIONS && (!CAUSAL || key + keys - 1 <= query) &&
               (!local || query + queries - 1 - key < WINDOW);
    }
};

// A tile of rows `first + stride row`, zeros beyond the last position; with TURN, rotated by their
// positions.
template <class H, bool TURN>
DEVICE void load_tile(Shared<float> tile, InFloats auto x, In<float> table, i64 first, i64 stride, i64 position) {
    const int half = H::turned / 2;
    for (int at = threadIdx.x; at < TILE * H::size; at += 256) {
        int row = at / H::size, column = at % H::size;
        float value = 0.0f;
        if (position + row < H::positions) {
            i64 from = first + row * stride;
            value = x[from + column];
            if (TURN && column < H::turned) {
                int pair = column % half;
                float other = column < half ? -x[from + column + half] : x[from + column - half];
                int angle = (int(position) + row) * H::turned + pair;
                value = value * table[angle] + other * table[angle + half];
            }
        }
        tile[row * H::pitch + column] = value;
    }
}

// y = [y +] a tile, with TURN rotated backwards.
template <class H, bool TURN, bool ADD>
DEVICE void store_tile(Shared<float> tile, OutFloats auto y, In<float> table, i64 first, i64 stride, i64 position) {
    const int half = H::turned / 2;
    for (int at = threadIdx.x; at < TILE * H::size; at += 256) {
        int row = at / H::size, column = at % H::size;
        if (position + row < H::positions) {
            float value = tile[row * H::pitch + column];
            if (TURN && column < H::turned) {
                int pair = column % half;
                float other = tile[row * H::pitch + (column < half ? column + half : column - half)];
                int angle = (int(position) + row) * H::turned + pair;
                value = value * table[angle] + (column < half ? other : -other) * table[angle + half];
            }
            give<ADD>(y, first + row * stride + column, value);
        }
    }
}

template <class H> DEVICE float tile_dot(Shared<float> a, int row, Shared<float> b, int other) {
    float sum = 0.0f;
    for (int column = 0; column < H::size; ++column) {
        sum = fmaf(a[row * H::pitch + column], b[other * H::pitch + column], sum);
    }
    return sum;
}

template <class H> DEVICE bool sees(In<float> documents, i64 b, int query, int key) {
    return query < H::positions && H::sees(query, key) &&
           (!H::documents || documents[b * H::positions + query] == documents[b * H::positions + key]);
}

// One tile of queries of one head.
template <class H>
DEVICE void attention(InFloats auto q, InFloats auto k, InFloats auto v, In<float> table, In<float> documents, OutFloats auto y,
                      Out<float> lse, float scale) {
    LAUNCHED(memory, 2 * TILE * H::pitch + TILE * 33);
    Shared<float> queries = memory, keys = part_of(memory, TILE * H::pitch);
    Shared<float> weights = part_of(memory, 2 * TILE * H::pitch);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 tile = blockIdx.x % H::tiles, unit = blockIdx.x / H::tiles;
    i64 b = unit / H::heads, position = tile * TILE;
    int head = (int)(unit % H::heads), kv = head / H::group;
    load_tile<H, H::rotary>(queries, q, table, H::query(b, head, position), H::q_stride, position);
    float largest[4], total[4] = {}, sum[4][H::columns] = {};
    for (int i = 0; i < 4; ++i) {
        largest[i] = -f32(INFINITE);
    }
    Range range = H::keys_of((int)position, TILE);
    for (int first = range.first / TILE * TILE; first < range.end; first += TILE) {
        __syncthreads();
        load_tile<H, H::rotary>(keys, k, table, H::k_first + H::key(b, kv, first), H::k_stride, first);
        __syncthreads();
        for (int i = 0; i < 4; ++i) {
            int row = line + 8 * i;
            bool seen = sees<H>(documents, b, (int)position + row, first + lane);
            float score = scale * tile_dot<H>(queries, row, keys, lane);
            float most = larger(largest[i], warp_max(seen ? score : -f32(INFINITE)));
            // A row without any of these keys, or beyond the last position, is unchanged.
            float rescale = most == largest[i] ? 1.0f : expf(largest[i] - most);
            float p = seen ? expf(score - most) : 0.0f;
            total[i] = total[i] * rescale + warp_sum(p);
            largest[i] = most;
            weights[row * 33 + lane] = p;
            for (int c = 0; c < H::columns; ++c) {
                sum[i][c] *= rescale;
            }
        }
        __syncthreads();
        load_tile<H, false>(keys, v, table, H::v_first + H::key(b, kv, first), H::k_stride, first);
        __syncthreads();
        add_weighted<H, false>(sum, weights, keys);
    }
    for (int i = 0; i < 4; ++i) {
        i64 t = position + line + 8 * i;
        if (t >= H::positions) {
            continue;
        }
        for (int c = 0; c < H::columns; ++c) {
            if (lane + 32 * c < H::size) {
                y[H::output(b, head, t) + lane + 32 * c] = sum[i][c] / total[i];
            }
        }
        if (lane == 0) {
            lse[unit * H::positions + t] = largest[i] + logf(total[i]);
        }
    }
}

// Probabilities and the slopes of the scaled scores, for a tile of queries and one of keys; the
// probabilities only if they are needed.
template <class H, bool BOTH>
DEVICE void score_slopes(Shared<float> queries, Shared<float> gradients, Shared<float> keys, Shared<float> values,
                         In<float> documents, In<float> lse, In<float> dots, i64 unit, i64 position, i64 first, float scale,
                         Shared<float> probabilities, Shared<float> slopes) {
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    for (int i = 0; i < 4; ++i) {
        int row = line + 8 * i;
        float p = 0.0f, slope = 0.0f;
        if (sees<H>(documents, unit / H::heads, (int)position + row, (int)first + lane)) {
            i64 at = unit * H::positions + position + row;
            p = expf(scale * tile_dot<H>(queries, row, keys, lane) - lse[at]);
            slope = p * (tile_dot<H>(gradients, row, values, lane) - dots[at]) * scale;
        }
        if (BOTH) {
            probabilities[row * 33 + lane] = p;
        }
        slopes[row * 33 + lane] = slope;
    }
}

// Gradients of one tile of keys and values, from all queries of all heads that read them.
template <class H, bool ADD_K, bool ADD_V>
DEVICE void attention_grad_kv(InFloats auto q, InFloats auto k, InFloats auto v, In<float> table, In<float> documents,
                              In<float> lse, InFloats auto g, In<float> dots, OutFloats auto of_k, OutFloats auto of_v, float scale) {
    const int tile_len = TILE * H::pitch;
    LAUNCHED(memory, 4 * tile_len + 2 * TILE * 33);
    Shared<float> keys = memory, values = part_of(memory, tile_len);
    Shared<float> queries = part_of(memory, 2 * tile_len), gradients = part_of(memory, 3 * tile_len);
    Shared<float> probabilities = part_of(memory, 4 * tile_len);
    Shared<float> slopes = part_of(memory, 4 * tile_len + TILE * 33);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 tile = blockIdx.x % H::tiles, b = blockIdx.x / H::tiles / H::kv_heads, first = tile * TILE;
    int kv = (int)(blockIdx.x / H::tiles % H::kv_heads);
    i64 at_key = H::key(b, kv, first);
    load_tile<H, H::rotary>(keys, k, table, H::k_first + at_key, H::k_stride, first);
    load_tile<H, false>(values, v, table, H::v_first + at_key, H::k_stride, first);
    float sum_k[4][H::columns] = {}, sum_v[4][H::columns] = {};
    Range range = H::queries_of((int)first, TILE);
    for (int index = 0; index < H::group; ++index) {
        int head = kv * H::group + index;
        for (int position = range.first / TILE * TILE; position < range.end; position += TILE) {
            __syncthreads();
            load_tile<H, H::rotary>(queries, q, table, H::query(b, head, position), H::q_stride, position);
            load_tile<H, false>(gradients, g, table, H::output(b, head, position), H::heads * H::size, position);
            __syncthreads();
            score_slopes<H, true>(queries, gradients, keys, values, documents, lse, dots, b * H::heads + head, position, first,
                                  scale, probabilities, slopes);
            __syncthreads();
            add_weighted<H, true>(sum_v, probabilities, gradients);
            add_weighted<H, true>(sum_k, slopes, queries);
        }
    }
    __syncthreads();
    for (int j = 0; j < 4; ++j) {
        for (int c = 0; c < H::columns; ++c) {
            if (lane + 32 * c < H::size) {
                keys[(line + 8 * j) * H::pitch + lane + 32 * c] = sum_k[j][c];
                values[(line + 8 * j) * H::pitch + lane + 32 * c] = sum_v[j][c];
            }
        }
    }
    __syncthreads();
    store_tile<H, H::rotary, ADD_K>(keys, of_k, table, H::k_first + at_key, H::k_stride, first);
    store_tile<H, false, ADD_V>(values, of_v, table, H::v_first + at_key, H::k_stride, first);
}

// The gradient of one tile of queries of one head.
template <class H, bool ADD>
DEVICE void attention_grad_q(InFloats auto q, InFloats auto k, InFloats auto v, In<float> table, In<float> documents,
                             In<float> lse, InFloats auto g, In<float> dots, OutFloats auto of_q, float scale) {
    const int tile_len = TILE * H::pitch;
    LAUNCHED(memory, 4 * tile_len + TILE * 33);
    Shared<float> keys = memory, values = part_of(memory, tile_len);
    Shared<float> queries = part_of(memory, 2 * tile_len), gradients = part_of(memory, 3 * tile_len);
    Shared<float> slopes = part_of(memory, 4 * tile_len);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32;
    i64 tile = blockIdx.x % H::tiles, unit = blockIdx.x / H::tiles, b = unit / H::heads, position = tile * TILE;
    int head = (int)(unit % H::heads), kv = head / H::group;
    load_tile<H, H::rotary>(queries, q, table, H::query(b, head, position), H::q_stride, position);
    load_tile<H, false>(gradients, g, table, H::output(b, head, position), H::heads * H::size, position);
    float sum[4][H::columns] = {};
    Range range = H::keys_of((int)position, TILE);
    for (int first = range.first / TILE * TILE; first < range.end; first += TILE) {
        __syncthreads();
        load_tile<H, H::rotary>(keys, k, table, H::k_first + H::key(b, kv, first), H::k_stride, first);
        load_tile<H, false>(values, v, table, H::v_first + H::key(b, kv, first), H::k_stride, first);
        __syncthreads();
        score_slopes<H, false>(queries, gradients, keys, values, documents, lse, dots, unit, position, first, scale, slopes, slopes);
        __syncthreads();
        add_weighted<H, false>(sum, slopes, keys);
    }
    __syncthreads();
    for (int i = 0; i < 4; ++i) {
        for (int c = 0; c < H::columns; ++c) {
            if (lane + 32 * c < H::size) {
                queries[(line + 8 * i) * H::pitch + lane + 32 * c] = sum[i][c];
            }
        }
    }
    __syncthreads();
    store_tile<H, H::rotary, ADD>(queries, of_q, table, H::query(b, head, position), H::q_stride, position);
}
