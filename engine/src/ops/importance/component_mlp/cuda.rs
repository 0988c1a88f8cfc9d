use crate::cuda::lowering::{Lowering, Source, arguments, constants, stretches};

const KERNELS: Source = Source::new("component_mlp", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let hidden = to.ty(1).columns();
    let [a, w1, b1, w2, b2] = [0, 1, 2, 3, 4].map(|index| to.input(index));
    let z = to.output(0);
    let constants = constants![rows, columns, hidden];
    to.kernel(KERNELS, "component_mlp", &constants)
        .blocks(columns.div_ceil(32), rows.div_ceil(32))
        .launch(&arguments![a, w1, b1, w2, b2, z]);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(1).rows(), to.ty(1).columns());
    let hidden = to.ty(2).columns();
    let [g, a, w1, b1, w2] = [0, 1, 2, 3, 4].map(|index| to.input(index));
    let of_a = to.output(0);
    let weights = columns * hidden;
    let stride = 3 * weights + columns;
    let (stretch, count) = stretches(rows, columns);
    let parts = to.scratch(count * stride);
    let constants = constants![rows, columns, hidden, stretch, to.adds(0)];
    to.kernel(KERNELS, "component_mlp_grad", &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&arguments![g, a, w1, b1, w2, of_a, parts.out()]);
    for (index, first) in [0, weights, 2 * weights, 3 * weights]
        .into_iter()
        .enumerate()
    {
        let out = (to.output(1 + index), to.adds(1 + index));
        to.add_stretches(parts, (first, stride), out);
    }
}
