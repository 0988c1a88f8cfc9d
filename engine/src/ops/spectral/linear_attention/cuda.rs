use super::LinearAttention;
use crate::cuda::lowering::{Lowering, Source, arguments, constants};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new("linear_attention", include_str!("kernel.cu"));

/// Positions of a tile, as in `kernel.cu`.
const TILE: usize = 32;

pub(super) fn value(op: LinearAttention, to: &mut Lowering<'_>) {
    let sizes = op.sizes(to.ty(0));
    let (positions, heads, size) = (sizes.positions, sizes.heads, sizes.size);
    let (units, tiles) = (sizes.units(), positions.div_ceil(TILE));
    let ahead = op.is_ahead;
    let constants = format!("Linear<{positions}, {heads}, {size}, {ahead}>");
    let [q, k, v] = [0, 1, 2].map(|at| to.input(at));
    let elements = size * size;
    let states = to.scratch(units * tiles * elements);
    let tile = TILE * (size + 1);
    let function = format!("linear_attention_states<{constants}>");
    to.kernel(KERNELS, &function, &[])
        .blocks(units * tiles, 1)
        .shared(2 * tile)
        .launch(&arguments![k, v, states.out()]);
    let numbers = constants![units, tiles, elements, op.is_ahead];
    to.kernel(KERNELS, "linear_attention_sums", &numbers)
        .threads_over(units * elements)
        .launch(&arguments![states.out()]);
    let (y, add) = (to.output(0), to.adds(0));
    let scale = 1.0 / (size as f32).sqrt();
    let function = format!("linear_attention<{constants}, {add}>");
    let operands: [Operand; 5] = [q, k, v, states, y];
    let mut arguments = operands.map(Into::into).to_vec();
    arguments.push(scale.into());
    to.kernel(KERNELS, &function, &[])
        .blocks(units * tiles, 1)
        .shared(3 * tile + TILE * (TILE + 1))
        .launch(&arguments);
}
