struct Squared {
    In<float> gradient;
    i64 len, first_block;
};

// Sum of squares of this block's share. sums: [blocks].
template <int TENSORS> DEVICE void gradient_squares(Out<float> sums, const Squared (&tensors)[TENSORS]) {
    float sum = 0.0f;
    each_share(tensors, [&](const Squared &tensor, i64 at) {
        Four g = load_until(tensor.gradient, at, tensor.len);
        for (int k = 0; k < 4; ++k) {
            sum += g.v[k] * g.v[k];
        }
    });
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
    }
}

// The sum of each gradient, one warp after the other, then the total; in f64. ENDS has the end of
// each gradient's shares.
template <i64... ENDS> DEVICE void gradient_sums(In<float> sums, Out<float> norms) {
    const int COUNT = sizeof...(ENDS);
    static constexpr i64 ends[] = {ENDS...};
    for (int of = threadIdx.x / 32; of < COUNT; of += 512 / 32) {
        double sum = 0.0;
        for (i64 at = (of == 0 ? 0 : ends[of - 1]) + threadIdx.x % 32; at < ends[of]; at += 32) {
            sum += (double)sums[at];
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) {
            norms[of] = (float)sum;
        }
    }
    __syncthreads();
    double total = 0.0;
    for (int of = threadIdx.x; of < COUNT; of += 512) {
        total += (double)norms[of];
    }
    total = block_sum<512>(total);
    if (threadIdx.x == 0) {
        norms[COUNT] = (float)total;
    }
}
