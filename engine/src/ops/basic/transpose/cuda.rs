use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source::new("transpose", include_str!("kernel.cu"));

pub(super) fn value([a, b, d]: [usize; 3], to: &mut Lowering<'_>) {
    let (x, y, add) = (to.input(0), to.output(0), to.adds(0));
    if d == 1 {
        to.kernel(KERNELS, "transpose", &[a.into(), b.into(), add.into()])
            .blocks(a.div_ceil(32) * b.div_ceil(32), 1)
            .launch(&[x.into(), y.into()]);
    } else {
        let constants = [a.into(), b.into(), d.into(), add.into()];
        to.kernel(KERNELS, "second_first", &constants)
            .fours(a * b, d)
            .launch(&[x.into(), y.into()]);
    }
}
