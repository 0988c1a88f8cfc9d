use super::Attention;
use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source::new("attention", include_str!("kernel.cu"));

/// Queries and keys of a tile, as in `kernel.cu`.
const TILE: usize = 32;

/// The sizes as the kernels want them, and the operands: `q`, `k`, `v` and the rotary table, if there is one.
struct Problem {
    heads: String,
    units: usize,
    kv_units: usize,
    tiles: usize,
    positions: usize,
    /// f32s of a tile in shared memory.
    tile: usize,
    operands: [Argument; 4],
}

impl Problem {
    fn new(op: &Attention, to: &Lowering<'_>) -> Self {
        let sizes = op.sizes(&[to.ty(0)]);
        let d = op.heads * sizes.size;
        let [q, k, v] = if op.fused { [0, 0, 0] } else { [0, 1, 2] }.map(|index| to.input(index));
        let kv_stride = if op.fused {
            3 * d
        } else {
            op.kv_heads * sizes.size
        };
        let (q_stride, k_first, v_first) = if op.fused {
            (3 * d, d, 2 * d)
        } else {
            (d, 0, 0)
        };
        let table = op.rotary.then(|| to.input(op.operands()));
        let numbers = [
            sizes.positions,
            op.heads,
            op.kv_heads,
            sizes.size,
            usize::from(op.causal),
            usize::from(op.rotary),
            q_stride,
            kv_stride,
            k_first,
            v_first,
        ];
        let numbers = numbers.map(|number| number.to_string()).join(", ");
        Self {
            heads: format!("Heads<{numbers}>"),
            units: sizes.batch * op.heads,
            kv_units: sizes.batch * op.kv_heads,
            tiles: sizes.positions.div_ceil(TILE),
            positions: sizes.positions,
            tile: TILE * (sizes.size + 1),
            operands: [q.into(), k.into(), v.into(), table.into()],
        }
    }

    /// A function of these heads.
    fn function(&self, name: &str, constants: &[usize]) -> String {
        let constants: String = constants.iter().map(|c| format!(", {c}")).collect();
        format!("{name}<{}{constants}>", self.heads)
    }
}

pub(super) fn value(op: &Attention, to: &mut Lowering<'_>) {
    let problem = Problem::new(op, to);
    let [q, k, v, table] = problem.operands.clone();
    let (y, lse) = (to.output(0), to.output(1));
    to.kernel(KERNELS, &problem.function("attention", &[]), &[])
        .blocks(problem.tiles * problem.units, 1)
        .shared(2 * problem.tile + TILE * 33)
        .launch(&[q, k, v, table, y.into(), lse.into()]);
}

pub(super) fn gradient(op: &Attention, to: &mut Lowering<'_>) {
    let problem = Problem::new(op, to);
    let [q, k, v, table] = problem.operands.clone();
    let first = op.operands() + usize::from(op.rotary);
    let [y, lse, g] = [0, 1, 2].map(|index| to.input(first + index));
    let [of_q, of_k, of_v] = if op.fused { [0, 0, 0] } else { [0, 1, 2] };
    let rows = problem.units * problem.positions;
    let dots = to.scratch(rows);
    to.kernel(
        KERNELS,
        &problem.function("attention_dots", &[problem.units]),
        &[],
    )
    .blocks(rows.div_ceil(8), 1)
    .launch(&[y, g, dots.out()].map(Into::into));
    let operands = [q, k, v, table, lse.into(), g.into(), dots.into()];
    let adds = [of_k, of_v].map(|index| usize::from(to.adds(index)));
    let out = [of_k, of_v].map(|index| to.output(index));
    to.kernel(KERNELS, &problem.function("attention_grad_kv", &adds), &[])
        .blocks(problem.tiles * problem.kv_units, 1)
        .shared(4 * problem.tile + 2 * TILE * 33)
        .launch(&[&operands[..], &[out[0].into(), out[1].into()]].concat());
    let add = usize::from(to.adds(of_q));
    let out = to.output(of_q);
    to.kernel(KERNELS, &problem.function("attention_grad_q", &[add]), &[])
        .blocks(problem.tiles * problem.units, 1)
        .shared(4 * problem.tile + TILE * 33)
        .launch(&[&operands[..], &[out.into()]].concat());
}
