//! Rounds f32 to bf16, to nearest, ties to even, for products that read a value kept in f32.
//! `|round(x) - x| <= 2^-8 |x|`.
//!
//! A device that stores in bf16 ([`crate::Precision`]) inserts it after gradients were made; the
//! gradient of the result is that of the operand.

use crate::cuda::device_op::Rewritten;
use crate::cuda::lowering::{Lowering, MOST_OPERANDS, Source, tensors};

const KERNELS: Source = Source::new("cast", include_str!("kernel.cu"));

/// The operands in bf16; a single one in either type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cast;

impl Rewritten for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        if to.inputs() > 1 {
            return round_all(to);
        }
        let (x, y) = (to.input(0), to.output(0));
        to.kernel(KERNELS, "cast", &[y.len.into()])
            .fours(1, y.len)
            .launch(&[x.into(), y.into()]);
    }
}

/// Launches for as many tensors as a kernel takes.
fn round_all(to: &mut Lowering<'_>) {
    let all: Vec<usize> = (0..to.inputs()).collect();
    for some in all.chunks(MOST_OPERANDS / 2) {
        let operands = some
            .iter()
            .map(|&tensor| vec![to.input(tensor), to.output(tensor)]);
        let (blocks, rounded) = tensors(operands);
        to.kernel(KERNELS, "round_all", &[])
            .blocks(blocks, 1)
            .launch(&[rounded]);
    }
}
