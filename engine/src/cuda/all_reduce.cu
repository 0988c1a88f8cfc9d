// Sum of one element of PARTS stretches, `stride` elements apart, as a tree: of n parts, the first
// half is the largest power of two below n.
template <int PARTS> DEVICE float tree(In<float> parts, i64 at, i64 stride) {
    if constexpr (PARTS == 1) {
        return parts[at];
    } else {
        const int HALF = PARTS > 64 ? 64 : PARTS > 32 ? 32 : PARTS > 16 ? 16 : PARTS > 8 ? 8 : PARTS > 4 ? 4 : PARTS > 2 ? 2 : 1;
        float first = tree<HALF>(parts, at, stride);
        return first + tree<PARTS - HALF>(parts, at + HALF * stride, stride);
    }
}

template <int PARTS> DEVICE void tree_sum(In<float> parts, Out<float> sum, u32 stride, u32 len) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < len) {
        sum[at] = tree<PARTS>(parts, at, stride);
    }
}
