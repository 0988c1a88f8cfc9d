//! The same numbers in bf16, rounded to the nearest, to the even one of two: what a product reads of a value that is kept in
//! f32. `|round(x) - x| <= 2^-8 |x|`.
//!
//! It comes into a program when a device is to store it in bf16 ([`crate::Precision`]), after gradients have been made: its own is
//! that of the value itself.

use crate::cuda::device_op::Rewritten;
use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source::new("cast", include_str!("kernel.cu"));

/// bf16 of an f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cast;

impl Rewritten for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        let (x, y) = (to.input(0), to.output(0));
        to.kernel(KERNELS, "cast", &[y.len.into()])
            .fours(1, y.len)
            .launch(&[x.into(), y.into()]);
    }
}
