// The bias in every row, to which a product is added.
template <i64 ROWS, i64 COLUMNS> DEVICE void rows_of_bias(In<float> bias, OutFloats auto y) {
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) { store<COLUMNS>(y, row, column, load<COLUMNS>(bias, 0, column)); });
}

// ---- One result for each component: all is read and written once. Rows of weights are rows of `x`.

// A thread keeps the weights of a component, for a stretch of rows.
template <i64 ROWS, i64 COMPONENTS, int INPUTS, int WIDTH, i64 STRETCH>
DEVICE void parallel_dots(InFloats auto x, InFloats auto w, In<float> bias, OutFloats auto y) {
    each_thread<COMPONENTS>([&](i64 component) {
        Wide<WIDTH> weights[INPUTS / WIDTH];
        for (int group = 0; group < INPUTS / WIDTH; ++group) {
            weights[group] = load_wide<WIDTH>(w, component * INPUTS + group * WIDTH);
        }
        float start = bias[component];
        i64 end = ((i64)blockIdx.y + 1) * STRETCH;
        end = end < ROWS ? end : ROWS;
#pragma unroll 2
        for (i64 row = (i64)blockIdx.y * STRETCH; row < end; ++row) {
            i64 at = row * COMPONENTS + component;
            float sum = 0.0f;
            for (int group = 0; group < INPUTS / WIDTH; ++group) {
                Wide<WIDTH> some = load_wide<WIDTH>(x, at * INPUTS + group * WIDTH);
                for (int k = 0; k < WIDTH; ++k) {
                    sum = fmaf(some.v[k], weights[group].v[k], sum);
                }
            }
            y[at] = start + sum;
        }
    });
}

// The gradient of each column's component.
template <i64 COLUMNS, int INPUTS, int WIDTH> DEVICE Wide<WIDTH> of_components(InFloats auto g, i64 row, i64 column) {
    Wide<WIDTH> wide;
    for (int k = 0; k < WIDTH; ++k) {
        u32 component = (u32)(INPUTS % WIDTH == 0 ? column : column + k) / INPUTS;
        wide.v[k] = g[row * (COLUMNS / INPUTS) + component];
    }
    return wide;
}

template <i64 ROWS, i64 COLUMNS, int INPUTS, bool ADD>
DEVICE void parallel_outer(InFloats auto g, InFloats auto w, OutFloats auto out) {
    const int WIDTH = COLUMNS % 4 == 0 ? 4 : 1;
    each_four<ROWS, COLUMNS>([&](i64 row, i64 column) {
        for (i64 at = column; at < column + 4 && at < COLUMNS; at += WIDTH) {
            Wide<WIDTH> product = of_components<COLUMNS, INPUTS, WIDTH>(g, row, at), weights = load_wide<WIDTH>(w, at);
            for (int k = 0; k < WIDTH; ++k) {
                product.v[k] *= weights.v[k];
            }
            give_wide<WIDTH, ADD>(out, row * COLUMNS + at, product);
        }
    });
}

template <i64 ROWS, i64 COLUMNS, i64 STRETCH, int INPUTS, int WIDTH>
DEVICE void parallel_weight_parts(InFloats auto g, InFloats auto x, Out<float> parts) {
    auto term = [&](i64 row, i64 column) {
        Wide<WIDTH> product = of_components<COLUMNS, INPUTS, WIDTH>(g, row, column);
        Wide<WIDTH> some = load_wide<WIDTH>(x, row * COLUMNS + column);
        for (int k = 0; k < WIDTH; ++k) {
            product.v[k] *= some.v[k];
        }
        return product;
    };
    wide_column_parts<ROWS, COLUMNS, STRETCH, WIDTH>(parts, term);
}
