//! Rounds f32 to bf16, to nearest, ties to even, for products that read a value kept in f32.
//! `|round(x) - x| <= 2^-8 |x|`.
//!
//! A device that stores in bf16 ([`crate::Precision`]) inserts it after gradients were made; the
//! gradient of the result is that of the operand.

use crate::alike::{Alike, Of, Side};
use crate::cuda::lowering::{Lowering, MOST_OPERANDS, SHARED, tensors};
use crate::op::{Op, op};
use crate::value::Type;

/// The operands in bf16; a single one in either type. A longer result ends in zeros.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cast;

impl Op for Cast {
    op! { name "cast"; of_devices; }

    fn cuda(&self, to: &mut Lowering<'_>) {
        let all = 0..to.inputs();
        let (padded, rest): (Vec<usize>, Vec<usize>) =
            all.partition(|&tensor| to.ty(tensor).dims != to.output_ty(tensor).dims);
        for tensor in padded {
            let sizes = [to.ty(tensor), to.output_ty(tensor)].map(|ty| [ty.rows(), ty.columns()]);
            to.resize(sizes, to.input(tensor), (to.output(tensor), false));
        }
        if let &[tensor] = &rest[..] {
            let (x, y) = (to.input(tensor), to.output(tensor));
            return to.resize([[1, y.len]; 2], x, (y, false));
        }
        // Launches for as many tensors as a kernel takes.
        for some in rest.chunks(MOST_OPERANDS / 2) {
            let operands = some
                .iter()
                .map(|&tensor| vec![to.input(tensor), to.output(tensor)]);
            let (blocks, rounded) = tensors(operands);
            to.kernel(SHARED, "copy_all<bf16>", &[])
                .blocks(blocks, 1)
                .launch(&[rounded]);
        }
    }

    fn alike(&self, _inputs: &[&Type], outputs: &[&Type]) -> Vec<Alike> {
        let each = (0..outputs.len()).flat_map(|index| {
            let sides = [Side::Rows, Side::Columns];
            sides.map(|side| Alike::of([(Of::Output(index), side)]))
        });
        each.collect()
    }
}
