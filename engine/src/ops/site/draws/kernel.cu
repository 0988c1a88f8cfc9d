// A draw for each column, or 1 if it is below a number, else 0; a single row has the draws of row
// 0 of the whole batch.
template <i64 ROWS, i64 COLUMNS, bool SHARED_ROW, bool BELOW>
DEVICE void uniform_rows(In<u32> parameters, u32 what, Out<float> y, float below) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        // A shared row is row 0 of block 0.
        Four r = uniforms<SHARED_ROW ? 0 : ROWS>(parameters, row, column, what);
        store<COLUMNS>(y, row, column, map([&](int k) { return !BELOW ? r.v[k] : (r.v[k] < below ? 1.0f : 0.0f); }));
    });
}

// A site is in the subset if fewer sites than its size have a smaller number, counted for each of
// them. A number equal to the largest in the subset is in it too, as no more are smaller.
template <i64 ROWS, int SITES, class... Routes> DEVICE void uniform_subsets(In<u32> parameters, u32 what, Routes... routes) {
    each_thread<ROWS>([&](i64 row) {
        float numbers[SITES];
        for (int site = 0; site < SITES; ++site) {
            numbers[site] = uniform_at<ROWS>(parameters, row, 1 + site, what);
        }
        float others = floorf(uniform_at<ROWS>(parameters, row, 0, what) * (float)SITES);
        Out<float> all[SITES] = {routes...};
        for (int site = 0; site < SITES; ++site) {
            int smaller = 0;
            for (int other = 0; other < SITES; ++other) {
                smaller += numbers[other] < numbers[site] ? 1 : 0;
            }
            all[site][row] = (float)smaller <= others ? 1.0f : 0.0f;
        }
    });
}
