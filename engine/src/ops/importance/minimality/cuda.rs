use super::ImportanceMinimality;
use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source::new("importance_minimality", include_str!("kernel.cu"));

fn settings(op: &ImportanceMinimality) -> [Argument; 4] {
    let weights = [op.activity, op.beta].map(f64::from);
    [op.rows as f64, weights[0], weights[1], op.scale()].map(Argument::from)
}

pub(super) fn value(op: &ImportanceMinimality, to: &mut Lowering<'_>) {
    let (sums, y) = (to.input(0), to.output(0));
    let arguments = [&[sums.into(), y.into()], &settings(op)[..]].concat();
    to.kernel(KERNELS, "importance_minimality", &[sums.len.into()])
        .threads(512)
        .launch(&arguments);
}

pub(super) fn gradient(op: &ImportanceMinimality, to: &mut Lowering<'_>) {
    let (g, sums, out) = (to.input(0), to.input(1), to.output(0));
    let arguments = [&[g.into(), sums.into(), out.into()], &settings(op)[..]].concat();
    let constants = [sums.len.into(), to.adds(0).into()];
    to.kernel(KERNELS, "importance_minimality_grad", &constants)
        .threads_over(sums.len)
        .launch(&arguments);
}
