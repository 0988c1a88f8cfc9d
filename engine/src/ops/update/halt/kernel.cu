// One thread records the first step at which a total, the last of each of the norms, is not
// finite.
template <int TOTALS> DEVICE void halt(In<u32> parameters, Out<float> memory, const float (&totals)[TOTALS]) {
    if (threadIdx.x > 0) {
        return;
    }
    if (is_finite(memory[1]) && !all_finite(totals)) {
        memory[0] = (float)parameters[2];
        memory[1] = f32(INFINITE);
    }
}
