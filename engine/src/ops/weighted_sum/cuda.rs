use crate::cuda::lowering::{Argument, Lowering, Source};

const KERNELS: Source = Source {
    name: "weighted_sum",
    text: include_str!("kernel.cu"),
};

pub(super) fn value(weights: &[f64], to: &mut Lowering<'_>) {
    let terms = weights.iter().enumerate();
    let terms =
        terms.map(|(index, &weight)| Argument::List(vec![to.input(index).into(), weight.into()]));
    let arguments = [to.output(0).into(), Argument::List(terms.collect())];
    to.kernel(KERNELS, "weighted_sum", &[to.adds(0).into()])
        .threads(32)
        .launch(&arguments);
}
