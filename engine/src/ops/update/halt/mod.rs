//! Stops all updates after a bad step: once a gradient is not finite, no later step changes
//! parameters.
//!
//! The host reads a step's numbers only now and then. If a bad step were merely skipped, training
//! would go on with an unseen gap; so the op writes `[step, infinity]` over the `[0, 0]` in the
//! store, and every [`AdamW`](super::AdamW) that has it among its guards writes nothing from then
//! on. The next reader finds parameters and moments as they were before the bad step, which can
//! then be run again to find the cause.

mod cuda;

use crate::cpu::Frame;
use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Writes the step into an f32 `[2]` of the store when a norm is not finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Halt;

impl Builder {
    /// Watches `norms` (each ends in its total). `halt` is f32 `[2]` in the store, zeros while all
    /// norms are finite.
    ///
    /// # Errors
    ///
    /// When `halt` has another shape.
    pub fn halt(&mut self, halt: Value, norms: &[Value]) -> Result<()> {
        let mut inputs = vec![halt];
        inputs.extend_from_slice(norms);
        self.op(Halt, &inputs).map(|_| ())
    }
}

impl Op for Halt {
    op! {
        name "halt"; writes(self) 0..1;
        cuda(self) cuda::value();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[0].dims != [2] {
            return refuse!(self, "needs f32 [2], found {}", inputs[0]);
        }
        Ok(Vec::new())
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a step past 2^24 is rounded to a few steps"
    )]
    fn run(&self, frame: &mut Frame<'_>) {
        let halt = frame.state(0);
        if halt[1].is_finite() && !frame.are_finite_from(1) {
            halt[0] = frame.parameters.step as f32;
            halt[1] = f32::INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::cpu::{Alone, Pool};
    use crate::{Builder, Store, Type};

    #[test]
    fn the_first_bad_step_stays() {
        let mut store = Store::new();
        let slot = store.zeros("halt", &[2]);
        let mut b = Builder::new();
        let halt = b.persistent(&store, slot);
        let gradient = b.input("gradient", &Type::f32(&[3])).unwrap();
        let norm = b.gradient_norm(&[gradient]).unwrap();
        b.halt(halt, &[norm]).unwrap();
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        for (step, gradient, expected) in [
            (1, 1.0, [0.0, 0.0]),
            (2, f32::NAN, [2.0, f32::INFINITY]),
            (3, 1.0, [2.0, f32::INFINITY]),
            (4, f32::INFINITY, [2.0, f32::INFINITY]),
        ] {
            executor.parameters.step = step;
            executor.input("gradient").fill(gradient);
            executor.run(&mut store);
            assert_eq!(store.get(slot), expected);
        }
    }
}
