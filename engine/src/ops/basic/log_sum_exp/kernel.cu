// The largest of some numbers, and the sum of the powers of their distances from it.
struct Powers {
    float largest, sum;

    // A power is within 2^-22 + |d| 2^-23 of itself, for d the distance from the largest: rounding
    // of d and of its product, and `fast_exp2`.
    template <int N> DEVICE_MEMBER void add(const Wide<N> &some) {
        const float least = -f32(INFINITE), log2_e = 1.4426950408889634f;
        float most = some.v[0];
        for (int k = 1; k < N; ++k) {
            most = larger(most, some.v[k]);
        }
        if (most > largest) {
            sum *= fast_exp2(log2_e * (largest - most));
            largest = most;
        }
        // Includes NaN, which the sum keeps.
        for (int k = 0; k < N; ++k) {
            sum += some.v[k] == least ? 0.0f : fast_exp2(log2_e * (some.v[k] - largest));
        }
    }
};

// Log-sum-exp of a row by a block, in one pass: each thread keeps its maximum, and rescales its sum.
// Vectors of WIDTH columns start at multiples of WIDTH in memory, and so not at the row's start if
// PITCH is no such multiple: threads have the columns before and after them one by one.
template <int THREADS, i64 COLUMNS, i64 PITCH, int WIDTH> DEVICE void log_sum_exp(InFloats auto x, Out<float> y) {
    // Vectors of a thread that are read before the first of them is processed.
    const int AHEAD = 4;
    const float least = -f32(INFINITE);
    i64 first = (i64)blockIdx.x * PITCH, last = first + COLUMNS;
    i64 start = (first + WIDTH - 1) / WIDTH * WIDTH, end = last / WIDTH * WIDTH;
    Powers powers = {least, 0.0f};
    for (i64 at = start + (i64)threadIdx.x * WIDTH; at < end; at += THREADS * WIDTH * AHEAD) {
        Wide<WIDTH> some[AHEAD];
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            if (at + ahead * THREADS * WIDTH < end) {
                some[ahead] = load_wide<WIDTH>(x, at + ahead * THREADS * WIDTH);
            }
        }
        for (int ahead = 0; ahead < AHEAD && at + ahead * THREADS * WIDTH < end; ++ahead) {
            powers.add(some[ahead]);
        }
    }
    if (first + threadIdx.x < start) {
        powers.add(load_wide<1>(x, first + threadIdx.x));
    }
    if (end + threadIdx.x < last) {
        powers.add(load_wide<1>(x, end + threadIdx.x));
    }
    float largest = powers.largest, sum = powers.sum, all = block_max<THREADS>(largest);
    sum = block_sum<THREADS>(largest == least && sum == 0.0f ? 0.0f : sum * expf(largest - all));
    if (threadIdx.x == 0) {
        y[blockIdx.x] = all + logf(sum);
    }
}
