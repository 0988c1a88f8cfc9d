use super::{Kind, Norm, NormParameterGrad};
use crate::cuda::lowering::{Argument, Lowering, Source, row_threads, stretches};

const KERNELS: Source = Source::new("norm", include_str!("kernel.cu"));

/// The norm of `x`, or of a sum, which is a result too.
pub(super) fn value(op: &Norm, of_sum: bool, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let threads = row_threads(columns);
    let kernel = match (op.kind, of_sum) {
        (Kind::Layer, false) => "layer_norm",
        (Kind::Layer, true) => "layer_norm_of_sum",
        (Kind::Rms, false) => "rms_norm",
        (Kind::Rms, true) => "rms_norm_of_sum",
    };
    let mut arguments: Vec<Argument> = (0..to.inputs()).map(|i| to.input(i).into()).collect();
    arguments.extend((0..to.outputs()).map(|i| Argument::from(to.output(i))));
    arguments.push(op.eps.into());
    to.kernel(KERNELS, kernel, &[threads.into(), columns.into()])
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments);
}

/// - `kernel`: the name of the op is that of its kernel
pub(super) fn gradient(kernel: &'static str, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, weight, statistics, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let threads = row_threads(columns);
    let constants = [threads.into(), columns.into(), to.adds(0).into()];
    to.kernel(KERNELS, kernel, &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&[x, weight, statistics, g, out].map(Into::into));
}

pub(super) fn parameter_gradient(op: NormParameterGrad, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, statistics, g] = [0, 1, 2].map(|index| to.input(index));
    let (stretch, count) = stretches(rows, columns);
    let parts: Vec<_> = (0..op.count())
        .map(|_| to.scratch(count * columns))
        .collect();
    let kernel = match op.0 {
        Kind::Layer => "layer_norm_parameter_parts",
        Kind::Rms => "rms_norm_weight_parts",
    };
    let constants = [rows, columns, stretch].map(Into::into);
    let operands = [x, statistics, g].into_iter();
    let operands = operands.chain(parts.iter().map(|parts| parts.out()));
    let operands: Vec<Argument> = operands.map(Into::into).collect();
    to.kernel(KERNELS, kernel, &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&operands);
    for (index, parts) in parts.into_iter().enumerate() {
        let out = (to.output(index), to.adds(index));
        to.add_stretches(parts, (0, columns), out);
    }
}
