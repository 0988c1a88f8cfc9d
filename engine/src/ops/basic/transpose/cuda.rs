use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("transpose", include_str!("kernel.cu"));

pub(super) fn value([a, b, d]: [usize; 3], to: &mut Lowering<'_>) {
    let (x, y, add) = (to.input(0), to.output(0), to.adds(0));
    if d == 1 {
        to.kernel(KERNELS, "transpose", &constants![a, b, add])
            .blocks(a.div_ceil(32) * b.div_ceil(32), 1)
            .launch(&arguments![x, y]);
    } else {
        let constants = constants![a, b, d, add];
        to.kernel(KERNELS, "second_first", &constants)
            .fours(a * b, d)
            .launch(&arguments![x, y]);
    }
}
