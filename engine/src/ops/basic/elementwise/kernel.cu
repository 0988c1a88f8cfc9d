// `of` is the text of an expression of the operands behind it.

// `of(row, column)` for each four columns of each row.
template <i64 ROWS, i64 COLUMNS> DEVICE void elementwise(auto of, auto...) { each_four<ROWS, COLUMNS>(of); }

// The same, with sums over stretches of rows of what `of` returns.
template <i64 ROWS, i64 COLUMNS, i64 STRETCH> DEVICE void elementwise_summed(auto of, Out<float> parts, auto...) {
    each_four_summed<ROWS, COLUMNS, STRETCH>(parts, of);
}

// Sums of `of(at)` over parts of LEN elements.
template <i64 LEN> DEVICE void elementwise_parts(Out<float> parts, auto of, auto...) { part_sum<256, LEN>(parts, of); }
