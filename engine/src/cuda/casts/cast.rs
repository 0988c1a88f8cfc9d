//! Rounds f32 to bf16, to nearest, ties to even, for products that read a value kept in f32.
//! `|round(x) - x| <= 2^-8 |x|`.
//!
//! A device that stores in bf16 ([`crate::Precision`]) inserts it after gradients were made; the
//! gradient of the result is that of the operand.

use crate::cuda::device_op::Rewritten;
use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source::new("cast", include_str!("kernel.cu"));

/// The operand in bf16.
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
