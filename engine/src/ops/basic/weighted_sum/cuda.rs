use super::Weight;
use crate::cuda::lowering::{Argument, Lowering, MOST_OPERANDS, Source, arguments, constants};

const KERNELS: Source = Source::new("weighted_sum", include_str!("kernel.cu"));

/// A weight and the number of a step scalar, from 1; 0 for a weight that is known.
fn numbers(weight: Weight) -> [Argument; 2] {
    match weight {
        Weight::Known(weight) => [weight.into(), Argument::Int(0)],
        Weight::Step(scalar) => [0.0_f64.into(), Argument::Int(1 + scalar.0 as usize)],
    }
}

pub(super) fn value(weights: &[Weight], to: &mut Lowering<'_>) {
    let terms = weights.iter().enumerate().map(|(index, &weight)| {
        let [weight, scalar] = numbers(weight);
        Argument::List(vec![to.input(index).into(), weight, scalar])
    });
    let terms: Vec<Argument> = terms.collect();
    let mut add = to.adds(0);
    for some in terms.chunks(MOST_OPERANDS - 2) {
        let arguments = arguments![to.parameters(), to.output(0), Argument::List(some.to_vec())];
        to.kernel(KERNELS, "weighted_sum", &constants![add])
            .threads(32)
            .launch(&arguments);
        add = true;
    }
}
