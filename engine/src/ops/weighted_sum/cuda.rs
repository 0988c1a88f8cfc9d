use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source {
    name: "weighted_sum",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(weights: &[f64], to: &mut Lowering<'_>) {
    let mut arguments: Vec<Argument> = vec![to.output(0).into()];
    let terms = weights.iter().enumerate();
    arguments.extend(terms.map(|(index, &weight)| Argument::Term(to.input(index), weight)));
    let constants = [to.adds(0).into(), weights.len().into()];
    to.kernel(KERNELS, "weighted_sum", &constants)
        .threads(32)
        .launch(&arguments);
}
