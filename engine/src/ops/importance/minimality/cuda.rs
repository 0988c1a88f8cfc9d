use super::ImportanceMinimality;
use crate::cuda::lowering::{Argument, Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("importance_minimality", include_str!("kernel.cu"));

fn settings(op: &ImportanceMinimality) -> [Argument; 4] {
    let weights = [op.activity, op.beta].map(f64::from);
    arguments![op.rows as f64, weights[0], weights[1], op.scale()]
}

pub(super) fn value(op: &ImportanceMinimality, to: &mut Lowering<'_>) {
    let (sums, y) = (to.input(0), to.output(0));
    let arguments = [&arguments![sums, y], &settings(op)[..]].concat();
    to.kernel(KERNELS, "importance_minimality", &constants![sums.len])
        .threads(512)
        .launch(&arguments);
}

pub(super) fn gradient(op: &ImportanceMinimality, to: &mut Lowering<'_>) {
    let (g, sums, out) = (to.input(0), to.input(1), to.output(0));
    let arguments = [&arguments![g, sums, out], &settings(op)[..]].concat();
    let constants = constants![sums.len, to.adds(0)];
    to.kernel(KERNELS, "importance_minimality_grad", &constants)
        .threads_over(sums.len)
        .launch(&arguments);
}
