use crate::cuda::lowering::{Argument, Lowering, MOST_OPERANDS, Source};

const KERNELS: Source = Source::new("weighted_sum", include_str!("kernel.cu"));

pub(super) fn value(weights: &[f64], to: &mut Lowering<'_>) {
    let terms = weights.iter().enumerate();
    let terms =
        terms.map(|(index, &weight)| Argument::List(vec![to.input(index).into(), weight.into()]));
    let terms: Vec<Argument> = terms.collect();
    let mut add = to.adds(0);
    for some in terms.chunks(MOST_OPERANDS - 1) {
        let arguments = [to.output(0).into(), Argument::List(some.to_vec())];
        to.kernel(KERNELS, "weighted_sum", &[add.into()])
            .threads(32)
            .launch(&arguments);
        add = true;
    }
}
