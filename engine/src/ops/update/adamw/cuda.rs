use super::Update;
use crate::cuda::lowering::{Argument, Lowering, MOST_OPERANDS, Source, constants, tensors};

const KERNELS: Source = Source::new("adamw", include_str!("kernel.cu"));

pub(super) fn value(op: &Update, to: &mut Lowering<'_>) {
    let (settings, all) = (&op.settings, op.tensors);
    let totals = to.totals(4 * all);
    let [lr, correction1, correction2] =
        [settings.lr, settings.correction1, settings.correction2].map(|scalar| scalar.0);
    let constants = constants![settings.clip.is_some(), lr, correction1, correction2];
    let numbers = [
        settings.beta1,
        settings.beta2,
        settings.eps,
        settings.decay,
        settings.clip.unwrap_or(0.0),
    ];
    let each: Vec<usize> = (0..all).collect();
    for some in each.chunks((MOST_OPERANDS - 1 - (to.inputs() - 4 * all)) / 4) {
        let some = some.iter().map(|&tensor| {
            let [weight, first, second] = [0, 1, 2].map(|kind| to.input(kind * all + tensor).out());
            vec![weight, first, second, to.input(3 * all + tensor)]
        });
        let (blocks, updated) = tensors(some);
        let mut arguments: Vec<Argument> = vec![to.parameters().into()];
        arguments.extend(numbers.map(Argument::from));
        arguments.extend([totals.clone(), updated]);
        to.kernel(KERNELS, "adamw", &constants)
            .blocks(blocks, 1)
            .launch(&arguments);
    }
}
