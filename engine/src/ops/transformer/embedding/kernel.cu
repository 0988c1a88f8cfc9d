// A token beyond the vocabulary gives NaN, which the guard of the update finds.
template <i64 ROWS, i64 POSITIONS, i64 VOCABULARY, i64 COLUMNS, bool PLACED>
DEVICE void embed(In<u32> tokens, In<float> wte, In<float> wpe, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        u32 token = tokens[row];
        Four value = token < VOCABULARY ? load<COLUMNS>(wte, token, column) : fill(f32(0x7fc00000u));
        if (PLACED) {
            Four place = load<COLUMNS>(wpe, row % POSITIONS, column);
            value = map([&](int k) { return value.v[k] + place.v[k]; });
        }
        store<COLUMNS>(y, row, column, value);
    });
}

template <i64 ROWS, i64 POSITIONS, i64 COLUMNS>
DEVICE void add_positions(InFloats auto x, In<float> wpe, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        Four value = load<COLUMNS>(x, row, column);
        Four place = load<COLUMNS>(wpe, row % POSITIONS, column);
        store<COLUMNS>(y, row, column, map([&](int k) { return value.v[k] + place.v[k]; }));
    });
}

// A block for each token: searches all rows for it, 256 at a time, and adds their gradients in
// order.
template <i64 ROWS, i64 COLUMNS, bool ADD> DEVICE void embed_token_grad(In<u32> tokens, InFloats auto g, Out<float> out) {
    SHARED(u32, found, 256);
    u32 token = blockIdx.x;
    for (i64 column = threadIdx.x; column < COLUMNS && !ADD; column += 256) {
        out[token * COLUMNS + column] = 0.0f;
    }
    for (i64 first = 0; first < ROWS; first += 256) {
        i64 row = first + threadIdx.x;
        u32 mine = row < ROWS && tokens[row] == token;
        found[threadIdx.x] = mine;
        if (!__syncthreads_or(mine)) {
            continue;
        }
        for (int at = 0; at < 256; ++at) {
            for (i64 column = threadIdx.x; column < COLUMNS && found[at]; column += 256) {
                out[token * COLUMNS + column] += g[(first + at) * COLUMNS + column];
            }
        }
        __syncthreads();
    }
}

// Positions past the end of the rows get nothing.
template <i64 BATCH, i64 POSITIONS, i64 CONTEXT, i64 COLUMNS, bool ADD>
DEVICE void embed_position_grad(InFloats auto g, Out<float> out) {
    each_four<CONTEXT, COLUMNS>([&](i64 position, i64 column) {
        Four sum = fill(0.0f);
        for (i64 b = 0; b < BATCH && position < POSITIONS; ++b) {
            Four term = load<COLUMNS>(g, b * POSITIONS + position, column);
            sum = map([&](int k) { return sum.v[k] + term.v[k]; });
        }
        give<COLUMNS, ADD>(out, position, column, sum);
    });
}
