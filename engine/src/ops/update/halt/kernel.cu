// One thread records the first step at which a total, the last of each of the norms, is not
// finite.
template <int TOTALS> DEVICE void halt(In<u32> parameters, Out<float> memory, const float (&totals)[TOTALS]) {
    if (threadIdx.x > 0) {
        return;
    }
    bool all = true;
    for (float total : totals) {
        all = all && is_finite(total);
    }
    if (is_finite(memory[1]) && !all) {
        memory[0] = (float)parameters[2];
        memory[1] = f32(INFINITE);
    }
}
