// The list of the rows whose route is not zero, by one block.
template <int THREADS, i64 ROWS, i64 ROOM> DEVICE void list_rows(In<float> route, Out<u32> list) {
    const i64 EACH = (ROWS + THREADS - 1) / THREADS;
    SHARED(u32, ends, THREADS);
    int thread = threadIdx.x;
    i64 first = thread * EACH, end = first + EACH < ROWS ? first + EACH : ROWS;
    u32 own = 0;
    for (i64 row = first; row < end; ++row) {
        own += route[row] != 0.0f ? 1 : 0;
    }
    ends[thread] = own;
    __syncthreads();
    // Sums over 2, 4, 8, ... threads up to each.
    for (int span = 1; span < THREADS; span *= 2) {
        u32 before = thread < span ? 0 : ends[thread - span];
        __syncthreads();
        ends[thread] = ends[thread] + before;
        __syncthreads();
    }
    u32 place = ends[thread] - own;
    for (i64 row = first; row < end; ++row) {
        bool routed = route[row] != 0.0f;
        list[ROOM + row] = routed ? place : NO_ROW;
        if (routed && place < (u32)ROOM) {
            list[place] = (u32)row;
        }
        place += routed ? 1 : 0;
    }
    for (i64 behind = (i64)ends[THREADS - 1] + thread; behind < ROOM; behind += THREADS) {
        list[behind] = NO_ROW;
    }
}

// The listed rows of x, then zeros. With room for ROOM_OF_X rows, x has the rows of another list.
template <i64 ROOM, i64 COLUMNS, i64 ROOM_OF_X> DEVICE void gather_rows(InFloats auto x, In<u32> list, In<u32> list_of_x, OutFloats auto y) {
    each_four<ROOM, COLUMNS>([&](i64 place, i64 column) {
        u32 row = list[place];
        i64 at = row == NO_ROW ? -1 : ROOM_OF_X > 0 ? place_of<ROOM_OF_X>(list_of_x, row) : (i64)row;
        store<COLUMNS>(y, place, column, at < 0 ? fill(0.0f) : load<COLUMNS>(x, at, column));
    });
}

// y = [y +] the rows of x at their positions, and 0 elsewhere, [+ s c + (1 - s) b]: c is READ, or REPLACED in y. s is the delta of
// a routed row, and 1 of another.
template <i64 ROWS, i64 COLUMNS, i64 ROOM, bool READ, bool REPLACED, bool BIAS, i64 DELTAS, bool ADD>
DEVICE void spread_rows(InFloats auto x, In<u32> list, InFloats auto clean, In<float> bias, In<float> delta, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        bool routed = list[ROOM + row] != NO_ROW;
        if (!routed && (REPLACED || (ADD && !READ))) {
            return;
        }
        Four own = load_spread<COLUMNS, ROOM>(x, list, row, column);
        if (READ || REPLACED) {
            float s = !routed ? 1.0f : DELTAS == 0 ? 0.0f : delta[DELTAS == 1 ? 0 : row];
            Four c = REPLACED ? load<COLUMNS>(y, row, column) : load<COLUMNS>(clean, row, column);
            Four b = BIAS ? load<COLUMNS>(bias, 0, column) : fill(0.0f);
            own = map([&](int k) { return own.v[k] + (s * c.v[k] + (BIAS ? (1.0f - s) * b.v[k] : 0.0f)); });
        }
        give<COLUMNS, ADD>(y, row, column, own);
    });
}
