use super::AdamW;
use crate::cuda::lowering::{Argument, Lowering, Source, scalar};

const KERNELS: Source = Source {
    name: "adamw",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(op: &AdamW, to: &mut Lowering<'_>) {
    let [weight, first, second] = [0, 1, 2].map(|index| to.input(index).out());
    let gradient = to.input(3);
    let operands = [to.parameters(), weight, first, second, gradient];
    let mut arguments: Vec<Argument> = operands.map(Argument::from).to_vec();
    let settings = [op.beta1, op.beta2, op.eps, op.decay, op.clip.unwrap_or(0.0)];
    arguments.extend(settings.map(Argument::from));
    let norms = (4..to.inputs()).map(|index| to.input(index));
    arguments.extend(norms.map(|norms| Argument::Element(norms, norms.len - 1)));
    let constants = [
        gradient.len.into(),
        op.clip.is_some().into(),
        scalar(op.lr),
        scalar(op.correction1),
        scalar(op.correction2),
    ];
    to.kernel(KERNELS, "adamw", &constants)
        .fours(1, gradient.len)
        .launch(&arguments);
}
