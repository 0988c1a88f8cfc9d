// Sum of one gradient's parts, at its place.
template <i64 PARTS> DEVICE void gradient_square(In<float> parts, Out<float> norms, int index) {
    double sum = all_parts<256, PARTS>(parts);
    if (threadIdx.x == 0) {
        norms[index] = (float)sum;
    }
}

// The total, behind the others.
template <i64 COUNT> DEVICE void gradient_total(Out<float> norms) {
    double sum = 0.0;
    for (i64 at = threadIdx.x; at < COUNT; at += 256) {
        sum += (double)norms[at];
    }
    sum = block_sum<256>(sum);
    if (threadIdx.x == 0) {
        norms[COUNT] = (float)sum;
    }
}
