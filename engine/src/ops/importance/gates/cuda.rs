use super::{Gates, ImportanceGates, ImportanceGatesGrad, LogitNoise, Penalty};
use crate::cuda::lowering::{
    Argument, Constant, Lowering, RowSums, Source, THREADS, arguments, constants, lines, scalar,
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
pub(crate) fn settings(op: &ImportanceGates) -> ([Constant; 4], Argument) {
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
    let parameter = op.penalty.map_or(Constant::from(-1), |(_, at)| scalar(at));
    let settings = constants![named(op.gates), noise, penalty, parameter];
    (settings, Argument::Word(word))
}

/// Importances, penalty sums and L0, three results; without `writes_importances` the last two alone.
pub(crate) fn value(op: &ImportanceGates, writes_importances: bool, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let z = to.input(0);
    let given = op.is_given().then(|| to.input(1));
    let RowSums {
        stretch,
        blocks: [across, count],
        parts,
    } = to.row_sums(rows, columns, 4);
    let counts = to.scratch(count * across);
    let ([gates, noise, penalty, parameter], what) = settings(op);
    let parameters = to.parameters();
    let first = usize::from(writes_importances);
    let g = writes_importances.then(|| to.output(0));
    let [sums, active] = [first, first + 1].map(|at| to.output(at));
    let constants = constants![
        rows,
        columns,
        stretch,
        gates,
        noise,
        penalty,
        parameter,
        writes_importances
    ];
    let [partial, counted] = [parts, counts].map(Operand::out);
    to.kernel(KERNELS, "importance_gates", &constants)
        .blocks(across, count)
        .launch(&arguments![
            parameters, z, given, g, partial, counted, what, op.alive
        ]);
    let lines = lines(count);
    let constants = constants![columns, count, counts.len, lines];
    to.kernel(KERNELS, "importance_sums", &constants)
        .blocks((columns * lines).div_ceil(THREADS) + 1, 1)
        .launch(&arguments![parts, counts, sums, active, 1.0 / rows as f64]);
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
