use super::{CausalMixing, Sizes};
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("causal_mixing", include_str!("kernel.cu"));

/// Results of a thread, as in `kernel.cu`.
const EIGHT: usize = 8;

fn constants(of: Sizes) -> Vec<String> {
    constants![of.batch, of.lags, of.positions, of.columns].to_vec()
}

/// Threads for eight of `rows` results of each batch row.
fn threads(sizes: Sizes, rows: usize) -> usize {
    sizes.batch * rows.div_ceil(EIGHT) * sizes.columns
}

pub(super) fn value(op: CausalMixing, to: &mut Lowering<'_>) {
    let sizes = Sizes::new(to.ty(0), to.ty(1).dims[0]);
    let (x, h, y) = (to.input(0), to.input(1), to.output(0));
    let bias = (!op.is_ahead).then(|| to.input(2));
    let mut constants = constants(sizes);
    constants.extend(constants![op.is_ahead, to.adds(0)]);
    to.kernel(KERNELS, "causal_mixing", &constants)
        .threads_over(threads(sizes, sizes.positions))
        .launch(&arguments![x, h, bias, y]);
}

pub(super) fn kernel_gradient(lags: usize, to: &mut Lowering<'_>) {
    let sizes = Sizes::new(to.ty(0), lags);
    let (x, g) = (to.input(0), to.input(1));
    let len = lags * sizes.columns;
    let parts = to.scratch(sizes.batch * len);
    to.kernel(KERNELS, "causal_mixing_kernel_parts", &constants(sizes))
        .threads_over(threads(sizes, lags))
        .launch(&arguments![x, g, parts.out()]);
    let out = (to.output(0), to.adds(0));
    to.add_stretches(parts, (0, len), out);
}
