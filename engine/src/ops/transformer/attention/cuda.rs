use super::Attention;
use super::tiles::{self, Blocks, Tiles};
use crate::cuda::lowering::{Argument, Lowering, Pending, Source, THREADS, arguments};

const KERNELS: Source = Source {
    numbers: &[("TILE", TILE), ("TILE_THREADS", tiles::THREADS)],
    ..Source::new(
        "attention",
        concat!(include_str!("kernel.cu"), include_str!("tiles/kernel.cu")),
    )
};

/// Queries and keys of a tile.
const TILE: usize = 32;

/// The sizes for the kernels, and the operands: `q`, `k`, `v`, and the rotary table and documents,
/// if there are any.
struct Problem {
    heads: String,
    units: usize,
    kv_units: usize,
    /// Batch rows, positions and heads.
    shape: [usize; 3],
    /// f32s of a tile in shared memory.
    tile: usize,
    operands: [Argument; 5],
    scale: f32,
    tiles: Option<Tiles>,
}

impl Problem {
    /// The problem of an op; `further` is the operand that tensor cores multiply too.
    fn new(op: &Attention, to: &Lowering<'_>, further: Option<usize>) -> Self {
        let sizes = op.sizes(&[to.ty(0)]);
        let [q, k, v] = op.indices().map(|index| to.input(index));
        let [of_q, of_k, of_v] = op.columns(sizes.size);
        let [table, documents] = op
            .table_and_documents()
            .map(|index| index.map(|index| to.input(index)));
        // A window is at most all positions.
        let window = op.heads.window.unwrap_or(usize::MAX).min(sizes.positions);
        let numbers = [
            sizes.positions,
            op.heads.count,
            op.heads.kv,
            sizes.size,
            usize::from(op.heads.causal),
            window,
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
            shape: [sizes.batch, sizes.positions, op.heads.count],
            tile: TILE * (sizes.size + 1),
            operands: arguments![q, k, v, table, documents],
            scale: op.scale(sizes.size),
            tiles: Tiles::of(op, to, further),
        }
    }

    /// A launch for these heads, of blocks for each of `units`: the function on tensor cores, if
    /// they can, or else `name` with so many tiles of vectors and of scores in shared memory.
    fn launch<'l, 'a>(
        &self,
        to: &'l mut Lowering<'a>,
        (name, constants): (&str, &[usize]),
        units: usize,
        (on_tensor_cores, [vectors, scores]): (impl Fn(Tiles) -> Blocks, [usize; 2]),
    ) -> Pending<'l, 'a> {
        let (kind, blocks) = match self.tiles {
            Some(tiles) => ("attention_tiles", on_tensor_cores(tiles)),
            None => (
                "attention",
                Blocks {
                    rows: TILE,
                    threads: THREADS,
                    shared: vectors * self.tile + scores * TILE * 33,
                },
            ),
        };
        let constants: String = constants.iter().map(|c| format!(", {c}")).collect();
        let function = format!("{kind}{name}<{}{constants}>", self.heads);
        to.kernel(KERNELS, &function, &[])
            .blocks(self.shape[1].div_ceil(blocks.rows) * units, 1)
            .threads(blocks.threads)
            .shared(blocks.shared)
    }
}

pub(super) fn value(op: &Attention, to: &mut Lowering<'_>) {
    let problem = Problem::new(op, to, None);
    let (y, lse) = (to.output(0), to.output(1));
    problem
        .launch(to, ("", &[]), problem.units, (Tiles::forward, [2, 1]))
        .launch(&[&problem.operands[..], &arguments![y, lse, problem.scale]].concat());
}

pub(super) fn gradient(op: &Attention, to: &mut Lowering<'_>) {
    let first = op.all_operands();
    let problem = Problem::new(op, to, Some(first + 2));
    let [y, lse, g] = [0, 1, 2].map(|index| to.input(first + index));
    let [of_q, of_k, of_v] = op.indices();
    let dots = to.head_dots([y, g], problem.shape);
    let operands = [&problem.operands[..], &arguments![lse, g, dots]].concat();
    let adds = [of_k, of_v].map(|index| usize::from(to.adds(index)));
    let out = [of_k, of_v].map(|index| to.output(index));
    let kind = ("_grad_kv", &adds[..]);
    problem
        .launch(to, kind, problem.kv_units, (Tiles::of_keys, [4, 2]))
        .launch(&[&operands[..], &arguments![out[0], out[1], problem.scale]].concat());
    let add = usize::from(to.adds(of_q));
    let out = to.output(of_q);
    let kind = ("_grad_q", &[add][..]);
    problem
        .launch(to, kind, problem.units, (Tiles::of_queries, [4, 1]))
        .launch(&[&operands[..], &arguments![out, problem.scale]].concat());
}
