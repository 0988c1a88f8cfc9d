use super::LayerNorm;
use crate::cuda::lowering::{Argument, Lowering, Source, row_threads, stretches};

const KERNELS: Source = Source::new("layer_norm", include_str!("kernel.cu"));

/// The norm of `x`, or of a sum, which is a result too.
pub(super) fn value(op: &LayerNorm, of_sum: bool, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let threads = row_threads(columns);
    let kernel = if of_sum {
        "layer_norm_of_sum"
    } else {
        "layer_norm"
    };
    let mut arguments: Vec<Argument> = (0..to.inputs()).map(|i| to.input(i).into()).collect();
    arguments.extend((0..to.outputs()).map(|i| Argument::from(to.output(i))));
    arguments.push(op.eps.into());
    to.kernel(KERNELS, kernel, &[threads.into(), columns.into()])
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments);
}

pub(super) fn gradient(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, weight, stats, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let threads = row_threads(columns);
    let constants = [threads.into(), columns.into(), to.adds(0).into()];
    to.kernel(KERNELS, "layer_norm_grad", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&[x, weight, stats, g, out].map(Into::into));
}

pub(super) fn parameter_gradient(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, stats, g] = [0, 1, 2].map(|index| to.input(index));
    let (stretch, count) = stretches(rows, columns);
    let [weights, biases] = [0, 1].map(|_| to.scratch(count * columns));
    let constants = [rows, columns, stretch].map(Into::into);
    to.kernel(KERNELS, "layer_norm_parameter_parts", &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&[x, stats, g, weights.out(), biases.out()].map(Into::into));
    for (index, parts) in [weights, biases].into_iter().enumerate() {
        let out = (to.output(index), to.adds(index));
        to.add_stretches(parts, (0, columns), out);
    }
}
