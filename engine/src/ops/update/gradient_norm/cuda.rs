use crate::cuda::lowering::{Lowering, MOST_OPERANDS, Source, arguments, shares, tensors};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new("gradient_norm", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let gradients: Vec<Operand> = (0..to.inputs()).map(|index| to.input(index)).collect();
    let mut ends = Vec::with_capacity(gradients.len());
    let mut blocks = 0;
    for gradient in &gradients {
        blocks += shares(gradient.len);
        ends.push(blocks.to_string());
    }
    let sums = to.scratch(blocks);
    let mut first = 0;
    for some in gradients.chunks(MOST_OPERANDS - 1) {
        let (blocks, squared) = tensors(some.iter().map(|&gradient| vec![gradient]));
        let sums = sums.part(first, blocks).out();
        to.kernel(KERNELS, "gradient_squares", &[])
            .blocks(blocks, 1)
            .launch(&arguments![sums, squared]);
        first += blocks;
    }
    let norms = to.output(0);
    to.kernel(KERNELS, "gradient_sums", &ends)
        .threads(512)
        .launch(&arguments![sums, norms]);
}
