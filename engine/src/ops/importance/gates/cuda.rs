use super::{Gates, ImportanceGates, ImportanceGatesGrad, LogitNoise, Penalty};
use crate::cuda::lowering::{
    Argument, Lowering, RowSums, Source, THREADS, arguments, constants, lines,
};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new(
    "importance",
    concat!(include_str!("sigmoids.cuh"), include_str!("kernel.cu")),
);

/// The name of a pair of sigmoids in the kernels.
pub(crate) fn named(gates: Gates) -> &'static str {
    match gates {
        Gates::LeakyHard => "GATES_LEAKY_HARD",
        Gates::Hard => "GATES_HARD",
        Gates::UpperLeakyHard => "GATES_UPPER_LEAKY_HARD",
        Gates::Normal => "GATES_NORMAL",
        Gates::SwishHard => "GATES_SWISH_HARD",
    }
}

/// The pair of sigmoids, the noise, the penalty and its parameter's index for the kernels; and the
/// noise's stream.
pub(crate) fn settings(op: &ImportanceGates) -> ([String; 4], Argument) {
    let (noise, word) = match op.noise {
        LogitNoise::None => ("NOISE_NONE", 0),
        LogitNoise::Drawn(stream) => ("NOISE_DRAWN", stream.word()),
        LogitNoise::Given => ("NOISE_GIVEN", 0),
    };
    let penalty = match op.penalty {
        None => "PENALTY_NONE",
        Some((Penalty::Power, _)) => "PENALTY_POWER",
        Some((Penalty::Smooth { normalized: false }, _)) => "PENALTY_SMOOTH",
        Some((Penalty::Smooth { normalized: true }, _)) => "PENALTY_SMOOTH_NORMALIZED",
    };
    let parameter = op.penalty.map_or(-1, |(_, scalar)| i64::from(scalar.0));
    let settings = constants![named(op.gates), noise, penalty, parameter];
    (settings, Argument::Word(word))
}

/// Penalty sums and L0 while a kernel that computes importances makes parts of them.
pub(crate) struct Sums {
    rows: usize,
    columns: usize,
    /// Rows of a part.
    pub(crate) stretch: usize,
    /// Blocks of the kernel.
    pub(crate) blocks: [usize; 2],
    parts: Operand,
    counts: Operand,
}

impl Sums {
    pub(crate) fn new(rows: usize, columns: usize, to: &mut Lowering<'_>) -> Self {
        let RowSums {
            stretch,
            blocks,
            parts,
        } = to.row_sums(rows, columns, 4);
        Self {
            rows,
            columns,
            stretch,
            blocks,
            parts,
            counts: to.scratch(blocks[0] * blocks[1]),
        }
    }

    /// The parts of penalty sums and of counts, for the kernel.
    pub(crate) fn parts(&self) -> [Operand; 2] {
        [self.parts, self.counts].map(Operand::out)
    }

    /// Adds up the parts to penalty sums and L0, two results from the one at `first` on.
    pub(crate) fn finish(self, first: usize, to: &mut Lowering<'_>) {
        let (columns, count) = (self.columns, self.blocks[1]);
        let lines = lines(count);
        let constants = constants![columns, count, self.counts.len, lines];
        let [sums, active] = [first, first + 1].map(|at| to.output(at));
        let each = 1.0 / self.rows as f64;
        to.kernel(KERNELS, "importance_sums", &constants)
            .blocks((columns * lines).div_ceil(THREADS) + 1, 1)
            .launch(&arguments![self.parts, self.counts, sums, active, each]);
    }
}

/// Importances, penalty sums and L0, three results.
pub(super) fn value(op: &ImportanceGates, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let sums = Sums::new(rows, columns, to);
    let (settings, what) = settings(op);
    let constants = [&constants![rows, columns, sums.stretch][..], &settings].concat();
    let (parameters, z, g) = (to.parameters(), to.input(0), to.output(0));
    let given = op.is_given().then(|| to.input(1));
    let ([across, down], [parts, counts]) = (sums.blocks, sums.parts());
    to.kernel(KERNELS, "importance_gates", &constants)
        .blocks(across, down)
        .launch(&arguments![
            parameters, z, given, g, parts, counts, what, op.alive
        ]);
    sums.finish(1, to);
}

pub(super) fn gradient(op: &ImportanceGatesGrad, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let first = op.forward.inputs();
    let z = to.input(0);
    let given = op.forward.is_given().then(|| to.input(1));
    let of_importance = op.of_importance.then(|| to.input(first));
    let of_sums = first + usize::from(op.of_importance);
    let of_sums = op.of_sums.then(|| to.input(of_sums));
    let wants = constants![op.of_importance, op.of_sums, to.adds(0)];
    let (parameters, out) = (to.parameters(), to.output(0));
    let (settings, what) = settings(&op.forward);
    let constants = [&constants![rows, columns][..], &settings, &wants].concat();
    to.kernel(KERNELS, "importance_gates_grad", &constants)
        .fours(rows, columns)
        .launch(&arguments![
            parameters,
            z,
            given,
            of_importance,
            of_sums,
            out,
            what
        ]);
}
