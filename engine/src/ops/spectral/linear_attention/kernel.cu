// Tiles of 32 positions. Of scores, a lane has one key, and a warp every eighth query.

template <i64 POSITIONS, int HEADS, int SIZE, bool AHEAD> struct Linear {
    static const i64 positions = POSITIONS, tiles = (POSITIONS + 31) / 32;
    static const int size = SIZE, pitch = SIZE + 1, columns = (SIZE + 31) / 32;
    static const bool ahead = AHEAD;

    // Of a head's columns at a position of the block's tile.
    DEVICE_MEMBER static i64 row(int in_tile) {
        i64 tile = blockIdx.x % tiles, unit = blockIdx.x / tiles;
        return ((unit / HEADS * POSITIONS + tile * 32 + in_tile) * HEADS + unit % HEADS) * SIZE;
    }
    // Positions of the tile that exist.
    DEVICE_MEMBER static int rows() {
        i64 left = POSITIONS - blockIdx.x % tiles * 32;
        return left < 32 ? (int)left : 32;
    }
};

template <class L> DEVICE void load_linear(Shared<float> tile, InFloats auto x) {
    int rows = L::rows();
    for (int at = threadIdx.x; at < 32 * L::size; at += 256) {
        int row = at / L::size, column = at % L::size;
        tile[row * L::pitch + column] = row < rows ? (float)x[L::row(row) + column] : 0.0f;
    }
}

// sum k v^T of each tile: [units, tiles, size, size].
template <class L> DEVICE void linear_attention_states(InFloats auto k, InFloats auto v, Out<float> states) {
    LAUNCHED(memory, 2 * 32 * L::pitch);
    Shared<float> keys = memory, values = part_of(memory, 32 * L::pitch);
    load_linear<L>(keys, k);
    load_linear<L>(values, v);
    __syncthreads();
    for (int at = threadIdx.x; at < L::size * L::size; at += 256) {
        float sum = 0.0f;
        for (int row = 0; row < 32; ++row) {
            sum = fmaf(keys[row * L::pitch + at / L::size], values[row * L::pitch + at % L::size], sum);
        }
        states[(i64)blockIdx.x * L::size * L::size + at] = sum;
    }
}

// Sums over the tiles before each, or behind it, in place.
template <i64 UNITS, i64 TILES, i64 ELEMENTS, bool AHEAD> DEVICE void linear_attention_sums(Out<float> states) {
    each_thread<UNITS * ELEMENTS>([&](i64 index) {
        float sum = 0.0f;
        for (i64 step = 0; step < TILES; ++step) {
            i64 tile = AHEAD ? TILES - 1 - step : step;
            i64 at = (index / ELEMENTS * TILES + tile) * ELEMENTS + index % ELEMENTS;
            float own = states[at];
            states[at] = sum;
            sum += own;
        }
    });
}

template <class L, bool ADD>
DEVICE void linear_attention(InFloats auto q, InFloats auto k, InFloats auto v, In<float> states, OutFloats auto y, float scale) {
    LAUNCHED(memory, 3 * 32 * L::pitch + 32 * 33);
    Shared<float> queries = memory, keys = part_of(memory, 32 * L::pitch), values = part_of(memory, 2 * 32 * L::pitch);
    Shared<float> scores = part_of(memory, 3 * 32 * L::pitch);
    int lane = threadIdx.x % 32, line = threadIdx.x / 32, rows = L::rows();
    load_linear<L>(queries, q);
    load_linear<L>(keys, k);
    load_linear<L>(values, v);
    __syncthreads();
    for (int row = line; row < 32; row += 8) {
        float score = 0.0f;
        if (L::ahead ? lane >= row : lane <= row) {
            for (int column = 0; column < L::size; ++column) {
                score = fmaf(queries[row * L::pitch + column], keys[lane * L::pitch + column], score);
            }
        }
        scores[row * 33 + lane] = score;
    }
    __syncthreads();
    i64 state = (i64)blockIdx.x * L::size * L::size;
    for (int column = lane; column < L::size; column += 32) {
        for (int row = line; row < rows; row += 8) {
            float sum = 0.0f;
            // More at a time take too many registers.
#pragma unroll 8
            for (int at = 0; at < L::size; ++at) {
                sum = fmaf(queries[row * L::pitch + at], states[state + at * L::size + column], sum);
            }
            for (int at = 0; at < 32; ++at) {
                sum = fmaf(scores[row * 33 + at], values[at * L::pitch + column], sum);
            }
            give<ADD>(y, L::row(row) + column, scale * sum);
        }
    }
}
