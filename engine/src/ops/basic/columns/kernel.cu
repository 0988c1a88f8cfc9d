// COUNT columns of y from FIRST on: LEN of them, from TO on, are those of x from FROM on, and the
// others 0.
template <i64 ROWS, i64 X_COLUMNS, i64 Y_COLUMNS, i64 FIRST, i64 COUNT, i64 FROM, i64 TO, i64 LEN, bool ADD>
DEVICE void columns(InFloats auto x, OutFloats auto y) {
    const bool FOURS = X_COLUMNS % 4 == 0 && Y_COLUMNS % 4 == 0 && FIRST % 4 == 0 && COUNT % 4 == 0 && FROM % 4 == 0 && TO % 4 == 0 && LEN % 4 == 0;
    each_four<ROWS, COUNT>([&](i64 row, i64 column) {
        i64 at = row * Y_COLUMNS + FIRST + column, in_run = FIRST + column - TO, from = row * X_COLUMNS + FROM + in_run;
        if (FOURS) {
            Four four = in_run >= 0 && in_run < LEN ? load_wide<4>(x, from) : fill(0.0f);
            if (ADD) {
                Four before = load_wide<4>(y, at);
                four = map([&](int k) { return before.v[k] + four.v[k]; });
            }
            store_wide(y, at, four);
            return;
        }
        for (int k = 0; k < 4 && column + k < COUNT; ++k) {
            give<ADD>(y, at + k, in_run + k >= 0 && in_run + k < LEN ? (float)x[from + k] : 0.0f);
        }
    });
}
