DEVICE u32 half_of(u32 word, i64 column) { return column % 2 == 0 ? word & 0xffffu : word >> 16; }

// A thread for each number.
template <i64 LEN, i64 COLUMNS, bool UNIT> DEVICE void unpack(In<float> words, Out<float> y) {
    each_thread<LEN>([&](i64 at) {
        i64 row = at / COLUMNS, column = at % COLUMNS;
        u32 bits = half_of(__float_as_uint(words[row * ((COLUMNS + 1) / 2) + column / 2]), column);
        y[at] = UNIT ? (float)bits / 65535.0f : f32(bits << 16);
    });
}

template <bool UNIT, bool DRAWN> DEVICE u32 packed(float x, float draw) {
    if (!UNIT) {
        return two_bf16(x, 0.0f) & 0xffffu;
    }
    float scaled = (x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f) * 65535.0f;
    float least = floorf(scaled);
    bool up = DRAWN ? draw < scaled - least : scaled - least >= 0.5f;
    return (u32)least + (up ? 1u : 0u);
}

// A thread for each word.
template <i64 LEN, i64 COLUMNS, bool UNIT, bool DRAWN> DEVICE void pack(In<float> x, In<float> draws, Out<float> words) {
    each_thread<LEN>([&](i64 at) {
        i64 row = at / ((COLUMNS + 1) / 2), column = 2 * (at % ((COLUMNS + 1) / 2));
        i64 first = row * COLUMNS + column;
        u32 low = packed<UNIT, DRAWN>(x[first], DRAWN ? draws[first] : 0.0f), high = 0u;
        if (column + 1 < COLUMNS) {
            high = packed<UNIT, DRAWN>(x[first + 1], DRAWN ? draws[first + 1] : 0.0f);
        }
        words[at] = f32(high << 16 | low);
    });
}
