use crate::cuda::lowering::{Argument, Lowering, Source};
use crate::ops::sum_squares::cuda::square_parts;

const KERNELS: Source = Source {
    name: "gradient_norm",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(to: &mut Lowering<'_>) {
    let norms = to.output(0);
    for index in 0..to.inputs() {
        let gradient = to.input(index);
        let parts = square_parts(gradient, to);
        to.kernel(KERNELS, "gradient_square", &[parts.len.into()])
            .launch(&[parts.into(), norms.into(), Argument::Int(index)]);
    }
    let count = to.inputs();
    to.kernel(KERNELS, "gradient_total", &[count.into()])
        .launch(&[norms.into()]);
}
