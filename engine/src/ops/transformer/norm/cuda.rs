use super::{Kind, Norm, NormParameterGrad};
use crate::cuda::lowering::{Argument, Lowering, Source, arguments, constants, stretches, vector};
use crate::cuda::operand::Operand;
use crate::value::DType;

const KERNELS: Source = Source::new("norm", include_str!("kernel.cu"));

/// Threads of a block that has several rows: few enough that short tensors fill a large GPU.
const BLOCK: usize = 128;

/// The constants of a `Row` of the kernels and whether it is centred, and the numbers of blocks and
/// threads. A thread has at most four vectors of a row, unless the row has more than 2048 of these.
fn shape(kind: Kind, rows: usize, columns: usize, dtype: DType) -> ([String; 5], usize, usize) {
    let width = vector(columns, dtype);
    let vectors = columns.div_ceil(width);
    let least = vectors.next_power_of_two().min(32);
    let threads = vectors.div_ceil(4).next_power_of_two().clamp(least, 512);
    let block = if threads > 32 { threads } else { BLOCK };
    let constants = constants![rows, columns, threads, width, kind.is_centred()];
    (constants, (rows * threads).div_ceil(block), block)
}

/// The norm of `x`, or of a sum, which is a result too.
pub(crate) fn value(op: &Norm, of_sum: bool, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (constants, blocks, threads) = shape(op.kind, rows, columns, to.ty(0).dtype);
    let kernel = if of_sum { "norm_of_sum" } else { "norm" };
    let mut arguments: Vec<Argument> = (0..to.inputs()).map(|i| to.input(i).into()).collect();
    // The bias is the last input.
    arguments.extend(op.kind.either(None, Some(Argument::Nothing)));
    arguments.extend((0..to.outputs()).map(|i| Argument::from(to.output(i))));
    arguments.push(op.eps.into());
    to.kernel(KERNELS, kernel, &constants)
        .blocks(blocks, 1)
        .threads(threads)
        .launch(&arguments);
}

pub(super) fn gradient(kind: Kind, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, weight, statistics, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let (constants, blocks, threads) = shape(kind, rows, columns, to.ty(0).dtype);
    let constants = [&constants[..], &constants![to.adds(0)]].concat();
    to.kernel(KERNELS, "norm_grad", &constants)
        .blocks(blocks, 1)
        .threads(threads)
        .launch(&arguments![x, weight, statistics, g, out]);
}

pub(super) fn parameter_gradient(op: NormParameterGrad, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, statistics, g] = [0, 1, 2].map(|index| to.input(index));
    let (stretch, count) = stretches(rows, columns);
    let parts: Vec<_> = (0..op.count())
        .map(|_| to.scratch(count * columns))
        .collect();
    let constants = constants![rows, columns, stretch, op.0.is_centred()];
    // Only a centred norm writes the second.
    let [of_weight, of_bias] = [parts[0], parts[parts.len() - 1]].map(Operand::out);
    let operands = arguments![x, statistics, g, of_weight, of_bias];
    to.kernel(KERNELS, "norm_parameter_parts", &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&operands);
    for (index, parts) in parts.into_iter().enumerate() {
        let out = (to.output(index), to.adds(index));
        to.add_stretches(parts, (0, columns), out);
    }
}
