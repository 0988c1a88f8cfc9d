use super::RmsNorm;
use crate::cuda::lowering::{Argument, Lowering, Source, row_threads, stretches};

const KERNELS: Source = Source::new("rms_norm", include_str!("kernel.cu"));

/// The norm of `x`, or of a sum, which is a result too.
pub(super) fn value(op: &RmsNorm, of_sum: bool, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let threads = row_threads(columns);
    let kernel = if of_sum {
        "rms_norm_of_sum"
    } else {
        "rms_norm"
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
    let [x, weight, factors, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let threads = row_threads(columns);
    let constants = [threads.into(), columns.into(), to.adds(0).into()];
    to.kernel(KERNELS, "rms_norm_grad", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&[x, weight, factors, g, out].map(Into::into));
}

pub(super) fn weight_gradient(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, factors, g] = [0, 1, 2].map(|index| to.input(index));
    let (stretch, count) = stretches(rows, columns);
    let parts = to.scratch(count * columns);
    let constants = [rows, columns, stretch].map(Into::into);
    to.kernel(KERNELS, "rms_norm_weight_parts", &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&[x, factors, g, parts.out()].map(Into::into));
    let out = (to.output(0), to.adds(0));
    to.add_stretches(parts, (0, columns), out);
}
