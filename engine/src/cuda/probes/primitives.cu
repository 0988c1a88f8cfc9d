// Kernels of the primitive probes: one warp, which calls the functions that kernels of ops call.

// Each lane twice copies eight numbers and closes a group, the second time zeros in odd lanes; then
// it reports what its opposite lane copied.
DEVICE void probe_cp_async(In<bf16> x, Out<u32> y) {
    LAUNCHED(memory, 256);
    Shared<bf16> tile = part_of<bf16>(memory, 0);
    int own = 8 * threadIdx.x, other = 8 * (31 - threadIdx.x);
    copy_later(tile, own, x, own, true);
    close_group();
    copy_later(tile, 256 + own, x, 256 + own, threadIdx.x % 2 == 0);
    close_group();
    await_copies<1>();
    __syncthreads();
    for (int k = 0; k < 8; ++k) {
        y[own + k] = tile[other + k].bits;
    }
    await_copies<0>();
    __syncthreads();
    for (int k = 0; k < 8; ++k) {
        y[256 + own + k] = tile[256 + other + k].bits;
    }
}

// Four matrices of 8 x 8, plain and transposed.
DEVICE void probe_ldmatrix(In<bf16> x, Out<u32> y) {
    LAUNCHED(memory, 128);
    Shared<bf16> tile = part_of<bf16>(memory, 0);
    int own = 8 * threadIdx.x;
    for (int k = 0; k < 8; ++k) {
        tile[own + k] = (float)x[own + k];
    }
    __syncthreads();
    u32 as_it_lies[4], turned[4];
    load_matrices<false>(as_it_lies, tile, own);
    load_matrices<true>(turned, tile, own);
    for (int i = 0; i < 4; ++i) {
        y[4 * threadIdx.x + i] = as_it_lies[i];
        y[128 + 4 * threadIdx.x + i] = turned[i];
    }
}

// One half, plus a product of 16 x 16 by 16 x 8, in the layout of the lanes.
DEVICE void probe_mma(In<u32> a, In<u32> b, Out<float> y) {
    int lane = threadIdx.x;
    u32 left[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    float sum[4] = {0.5f, 0.5f, 0.5f, 0.5f};
    multiply_add(sum, left, b[2 * lane], b[2 * lane + 1]);
    for (int at = 0; at < 4; ++at) {
        y[4 * lane + at] = sum[at];
    }
}

// A Philox block, and the draws of four columns of a row.
DEVICE void probe_philox(In<u32> parameters, u32 what, Out<u32> y) {
    u32 lane = threadIdx.x;
    Words words = philox(parameters, lane, 0x10000000u * lane, what);
    Four draws = uniforms<8>(parameters, lane, 4 * lane, what);
    for (int k = 0; k < 4; ++k) {
        y[8 * lane + k] = words.v[k];
        y[8 * lane + 4 + k] = __float_as_uint(draws.v[k]);
    }
}

// Powers of e, logarithms, and powers of 2.
DEVICE void probe_exp(In<float> x, Out<float> y) {
    for (int at = threadIdx.x; at < 4096; at += 32) {
        y[at] = at < 2048 ? expf(x[at]) : at < 3072 ? fast_log2(x[at]) : fast_exp2(x[at]);
    }
}
