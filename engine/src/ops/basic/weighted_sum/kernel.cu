// A weight, or the number of a step scalar, from 1.
struct Term {
    In<float> value;
    double weight;
    int scalar;
};

// One thread, in f64.
template <bool ADD, int COUNT> DEVICE void weighted_sum(In<u32> parameters, Out<float> y, const Term (&terms)[COUNT]) {
    if (threadIdx.x > 0) {
        return;
    }
    double sum = ADD ? (double)y[0] : 0.0;
    // A list of arguments that is indexed in a loop is copied to the stack.
#pragma unroll
    for (const Term &term : terms) {
        double weight = term.scalar > 0 ? (double)scalar(parameters, term.scalar - 1) : term.weight;
        sum += weight * (double)term.value[0];
    }
    y[0] = (float)sum;
}
