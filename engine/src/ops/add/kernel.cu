// y = [y +] the sum of one or more.
template <i64 LEN, bool ADD, OutFloats Y, InFloats... Inputs> DEVICE void add(Y y, Inputs... inputs) {
    each_four<1, LEN>([&](i64 row, i64 column) {
        Four total = fill(0.0f);
        bool first = !ADD;
        if (ADD) {
            total = load<LEN>(y, row, column);
        }
        const Four terms[] = {load<LEN>(inputs, row, column)...};
        for (const Four &term : terms) {
            total = first ? term : map([&](int k) { return total.v[k] + term.v[k]; });
            first = false;
        }
        store<LEN>(y, row, column, total);
    });
}
