// `of(row, column)` for each four of LEN elements: what an expression is printed as, of the operands behind it.
template <i64 LEN> DEVICE void elementwise(auto of, auto...) { each_four<1, LEN>(of); }
