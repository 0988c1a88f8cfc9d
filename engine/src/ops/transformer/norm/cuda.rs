use super::{Norm, NormParameterGrad};
use crate::cuda::lowering::{
    Argument, Constant, Lowering, Source, arguments, constants, stretches, vector,
};
use crate::value::DType;

const KERNELS: Source = Source::new("norm", include_str!("kernel.cu"));

/// Threads of a block that has several rows: few enough that short tensors fill a large GPU.
const BLOCK: usize = 128;

/// The constants of a `Row` of the kernels, and the numbers of blocks and threads. A thread has at
/// most four vectors of a row, unless the row has more than 2048 of these.
fn shape(rows: usize, columns: usize, dtype: DType) -> ([Constant; 4], usize, usize) {
    let width = vector(columns, dtype);
    let vectors = columns.div_ceil(width);
    let least = vectors.next_power_of_two().min(32);
    let threads = vectors.div_ceil(4).next_power_of_two().clamp(least, 512);
    let block = if threads > 32 { threads } else { BLOCK };
    let constants = constants![rows, columns, threads, width];
    (constants, (rows * threads).div_ceil(block), block)
}

/// The norm of `x`, or of a sum, which is a result too.
pub(super) fn value(op: &Norm, of_sum: bool, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (constants, blocks, threads) = shape(rows, columns, to.ty(0).dtype);
    let kernel = match of_sum {
        false => op.kind.either("layer_norm", "rms_norm"),
        true => op.kind.either("layer_norm_of_sum", "rms_norm_of_sum"),
    };
    let mut arguments: Vec<Argument> = (0..to.inputs()).map(|i| to.input(i).into()).collect();
    arguments.extend((0..to.outputs()).map(|i| Argument::from(to.output(i))));
    arguments.push(op.eps.into());
    to.kernel(KERNELS, kernel, &constants)
        .blocks(blocks, 1)
        .threads(threads)
        .launch(&arguments);
}

/// - `kernel`: the name of the op is that of its kernel
pub(super) fn gradient(kernel: &'static str, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let [x, weight, statistics, g] = [0, 1, 2, 3].map(|index| to.input(index));
    let out = to.output(0);
    let (constants, blocks, threads) = shape(rows, columns, to.ty(0).dtype);
    let constants = [&constants[..], &[to.adds(0).into()]].concat();
    to.kernel(KERNELS, kernel, &constants)
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
    let kernel =
        op.0.either("layer_norm_parameter_parts", "rms_norm_weight_parts");
    let constants = constants![rows, columns, stretch];
    let operands = [x, statistics, g].into_iter();
    let operands = operands.chain(parts.iter().map(|parts| parts.out()));
    let operands: Vec<Argument> = operands.map(Into::into).collect();
    to.kernel(KERNELS, kernel, &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&operands);
    for (index, parts) in parts.into_iter().enumerate() {
        let out = (to.output(index), to.adds(index));
        to.add_stretches(parts, (0, columns), out);
    }
}
