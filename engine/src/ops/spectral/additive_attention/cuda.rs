use super::{AdditiveAttention, Sizes};
use crate::cuda::lowering::{Lowering, Source, arguments, constants};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new("additive_attention", include_str!("kernel.cu"));

/// Queries and keys of a tile, and columns of the hidden layer in shared memory, as in `kernel.cu`.
const TILE: usize = 32;
/// f32s of a tile of scores, or of 32 columns of a side.
const SQUARE: usize = TILE * (TILE + 1);

/// A function of the kernels, for these sizes.
fn function(op: AdditiveAttention, sizes: Sizes, name: &str) -> String {
    let (positions, heads) = (sizes.positions, sizes.heads);
    let (hidden, size, causal) = (sizes.hidden, sizes.size, op.causal);
    format!("{name}<Additive<{positions}, {heads}, {hidden}, {size}, {causal}>>")
}

pub(super) fn value(op: AdditiveAttention, to: &mut Lowering<'_>) {
    let sizes = Sizes::new(to.ty(0), to.ty(4));
    let blocks = sizes.units() * sizes.positions.div_ceil(TILE);
    let operands = (0..8).map(|at| to.input(at));
    let operands = operands.chain([to.output(0), to.output(1)]);
    let operands: Vec<_> = operands.map(Into::into).collect();
    to.kernel(KERNELS, &function(op, sizes, "additive_attention"), &[])
        .blocks(blocks, 1)
        .shared(3 * SQUARE + TILE * (sizes.size + 1))
        .launch(&operands);
}

pub(super) fn gradient(op: AdditiveAttention, to: &mut Lowering<'_>) {
    let sizes = Sizes::new(to.ty(0), to.ty(4));
    let Sizes {
        batch,
        positions,
        heads,
        hidden,
        size,
    } = sizes;
    let [q, k, c, d, v, y, g, w, beta, scale, sums] =
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(|at| to.input(at));
    let blocks = sizes.units() * positions.div_ceil(TILE);
    let dots = to.head_dots([y, g], [batch, positions, heads]);
    let operands = [q, k, c, d, v, g, w, beta, scale, sums, dots];
    let w_parts = to.scratch(blocks * hidden);
    let [beta_parts, scale_parts] = [0; 2].map(|_| to.scratch(blocks));
    let padded = hidden.next_multiple_of(TILE);
    let heads_of_tile = 2 * TILE * (size + 1);
    let all = |more: &[Operand]| -> Vec<_> {
        let all = operands.iter().chain(more);
        all.map(|&operand| operand.into()).collect()
    };
    let made = [w_parts, beta_parts, scale_parts].map(Operand::out);
    let arguments = all(&[&[to.output(0)][..], &made].concat());
    let name = function(op, sizes, "additive_attention_grad_q");
    to.kernel(KERNELS, &name, &[])
        .blocks(blocks, 1)
        .shared(3 * SQUARE + heads_of_tile + (TILE + 8) * padded)
        .launch(&arguments);
    let arguments = all(&[to.output(1), to.output(4)]);
    let name = function(op, sizes, "additive_attention_grad_kv");
    to.kernel(KERNELS, &name, &[])
        .blocks(blocks, 1)
        .shared(4 * SQUARE + heads_of_tile + TILE * padded)
        .launch(&arguments);
    for (from, shared) in [(0, 2), (1, 3)] {
        let rows = batch * positions;
        let from = Operand {
            written: false,
            ..to.output(from)
        };
        let shared = to.output(shared);
        let constants = constants![rows, heads, hidden];
        to.kernel(KERNELS, "additive_attention_shared", &constants)
            .fours(rows, hidden)
            .launch(&arguments![from, shared]);
    }
    let of_w = to.output(5);
    to.sum_rows(w_parts, hidden, (of_w, false));
    for (parts, at) in [(beta_parts, 6), (scale_parts, 7)] {
        let y = to.output(at);
        to.sum_parts(parts, (y, false), 1.0);
    }
}
