use super::Attention;
use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source::new("attention", include_str!("kernel.cu"));

/// Queries and keys of a tile, as in `kernel.cu`.
const TILE: usize = 32;

/// The sizes for the kernels, and the operands: `q`, `k`, `v`, and the rotary table and documents,
/// if there are any.
struct Problem {
    heads: String,
    units: usize,
    kv_units: usize,
    tiles: usize,
    /// Batch rows, positions and heads.
    shape: [usize; 3],
    /// f32s of a tile in shared memory.
    tile: usize,
    operands: [Argument; 5],
    scale: Argument,
}

impl Problem {
    fn new(op: &Attention, to: &Lowering<'_>) -> Self {
        let sizes = op.sizes(&[to.ty(0)]);
        let [q, k, v] = op.indices().map(|index| to.input(index));
        let [of_q, of_k, of_v] = op.columns(sizes.size);
        let [table, documents] =
            [op.table(), op.documents()].map(|index| index.map(|index| to.input(index)));
        let numbers = [
            sizes.positions,
            op.heads.count,
            op.heads.kv,
            sizes.size,
            usize::from(op.heads.causal),
            // A window is at most all positions.
            op.heads
                .window
                .unwrap_or(sizes.positions)
                .min(sizes.positions),
            usize::from(op.documents),
            op.turned,
            of_q.step,
            of_q.stride,
            of_k.stride,
            of_k.first,
            of_v.first,
        ];
        let numbers = numbers.map(|number| number.to_string()).join(", ");
        Self {
            heads: format!("Heads<{numbers}>"),
            units: sizes.batch * op.heads.count,
            kv_units: sizes.batch * op.heads.kv,
            tiles: sizes.positions.div_ceil(TILE),
            shape: [sizes.batch, sizes.positions, op.heads.count],
            tile: TILE * (sizes.size + 1),
            operands: [q.into(), k.into(), v.into(), table.into(), documents.into()],
            scale: op.scale(sizes.size).into(),
        }
    }

    /// A kernel function for these heads.
    fn function(&self, name: &str, constants: &[usize]) -> String {
        let constants: String = constants.iter().map(|c| format!(", {c}")).collect();
        format!("{name}<{}{constants}>", self.heads)
    }
}

pub(super) fn value(op: &Attention, to: &mut Lowering<'_>) {
    let problem = Problem::new(op, to);
    let [q, k, v, table, documents] = problem.operands.clone();
    let (y, lse) = (to.output(0), to.output(1));
    to.kernel(KERNELS, &problem.function("attention", &[]), &[])
        .blocks(problem.tiles * problem.units, 1)
        .shared(2 * problem.tile + TILE * 33)
        .launch(&[
            q,
            k,
            v,
            table,
            documents,
            y.into(),
            lse.into(),
            problem.scale,
        ]);
}

pub(super) fn gradient(op: &Attention, to: &mut Lowering<'_>) {
    let problem = Problem::new(op, to);
    let [q, k, v, table, documents] = problem.operands.clone();
    let first = op.all_operands();
    let [y, lse, g] = [0, 1, 2].map(|index| to.input(first + index));
    let [of_q, of_k, of_v] = op.indices();
    let dots = to.head_dots([y, g], problem.shape);
    let operands = [q, k, v, table, documents, lse.into(), g.into(), dots.into()];
    let adds = [of_k, of_v].map(|index| usize::from(to.adds(index)));
    let out = [of_k, of_v].map(|index| to.output(index));
    to.kernel(KERNELS, &problem.function("attention_grad_kv", &adds), &[])
        .blocks(problem.tiles * problem.kv_units, 1)
        .shared(4 * problem.tile + 2 * TILE * 33)
        .launch(
            &[
                &operands[..],
                &[out[0].into(), out[1].into(), problem.scale.clone()],
            ]
            .concat(),
        );
    let add = usize::from(to.adds(of_q));
    let out = to.output(of_q);
    to.kernel(KERNELS, &problem.function("attention_grad_q", &[add]), &[])
        .blocks(problem.tiles * problem.units, 1)
        .shared(4 * problem.tile + TILE * 33)
        .launch(&[&operands[..], &[out.into(), problem.scale]].concat());
}
