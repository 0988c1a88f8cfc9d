use super::{Angles, RotaryScaling, RotaryTable};
use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("rotary_table", include_str!("kernel.cu"));

pub(super) fn value(op: &RotaryTable, to: &mut Lowering<'_>) {
    let table = to.output(0);
    let (positions, half) = (op.positions, op.size / 2);
    match op.angles {
        Angles::Fourier { period } => {
            let constants = constants![positions, half, period];
            to.kernel(KERNELS, "fourier_table", &constants)
                .threads_over(positions * half)
                .launch(&arguments![table]);
        }
        Angles::Rotary { base, scaling } => {
            // A factor of 1 leaves every angle unchanged.
            let scaling = scaling.unwrap_or(RotaryScaling {
                factor: 1.0,
                low: 1.0,
                high: 2.0,
                context: 1.0,
            });
            to.kernel(KERNELS, "rotary_table", &constants![positions, half])
                .threads_over(positions * half)
                .launch(&arguments![
                    table,
                    base,
                    scaling.factor,
                    scaling.low,
                    scaling.high,
                    scaling.context
                ]);
        }
    }
}
