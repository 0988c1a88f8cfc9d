use super::{Uniform, UniformSubsets};
use crate::cuda::lowering::{Argument, Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("draws", include_str!("kernel.cu"));

pub(super) fn uniform(op: &Uniform, to: &mut Lowering<'_>) {
    let (parameters, y) = (to.parameters(), to.output(0));
    let (rows, columns) = (y.len / op.columns, op.columns);
    let what = Argument::Word(op.stream.word());
    let constants = constants![rows, columns, op.shared, op.below.is_some()];
    to.kernel(KERNELS, "uniform_rows", &constants)
        .fours(rows, columns)
        .launch(&arguments![parameters, what, y, op.below.unwrap_or(0.0)]);
}

pub(super) fn uniform_subsets(op: &UniformSubsets, to: &mut Lowering<'_>) {
    let what = Argument::Word(op.stream.word());
    let mut arguments: Vec<Argument> = vec![to.parameters().into(), what];
    arguments.extend((0..op.sites).map(|site| Argument::from(to.output(site))));
    let constants = constants![op.rows, op.sites];
    to.kernel(KERNELS, "uniform_subsets", &constants)
        .threads_over(op.rows)
        .launch(&arguments);
}
