//! Writes a value into the store at the end of a replay, or adds it to what is there, for the next
//! one to read.
//!
//! Until then the tensor is what the replay before left, so any part of a step may read it, at any
//! time. Nothing is written if a guard, such as the total of a
//! [`GradientNorm`](super::GradientNorm), is not finite.

mod cuda;

use crate::cpu::{Frame, Rows};
use crate::op::{Builder, Op, Result, op, refuse};
use crate::ops::grain;
use crate::value::{Type, Value};

/// Inputs: the tensor in the store, the value, and guards.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Keep {
    /// Whether the value is added to the tensor.
    adds: bool,
}

impl Builder {
    /// Keeps `x` in the place of `kept`, which is persistent and of its type, unless one of
    /// `guards` ends in a number that is not finite.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn keep(&mut self, kept: Value, x: Value, guards: &[Value]) -> Result<()> {
        let inputs = [&[kept, x], guards].concat();
        self.op(Keep { adds: false }, &inputs).map(|_| ())
    }

    /// Adds `x` to `kept`, which is persistent and of its type.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub(crate) fn keep_sum(&mut self, kept: Value, x: Value) -> Result<()> {
        self.op(Keep { adds: true }, &[kept, x]).map(|_| ())
    }
}

impl Op for Keep {
    op! {
        name "keep"; writes(self) 0..1;
        cuda(self) cuda::value(self.adds);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match inputs[0] == inputs[1] {
            true => Ok(Vec::new()),
            false => refuse!(self, "{} cannot hold {}", inputs[0], inputs[1]),
        }
    }

    fn run(&self, frame: &mut Frame<'_>) {
        if !frame.are_finite_from(2) {
            return;
        }
        let (kept, x, pool) = (frame.state(0), frame.input(1), frame.pool);
        pool.run(x.len(), grain(x.len()), Rows(kept, 1), |range, kept| {
            let x = &x[range];
            if self.adds {
                for (kept, x) in kept.0.iter_mut().zip(x) {
                    *kept += x;
                }
            } else {
                kept.0.copy_from_slice(x);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use crate::{Builder, Type};

    #[test]
    fn a_value_of_another_shape_is_refused() {
        let mut b = Builder::new();
        let kept = b.input("kept", &Type::f32(&[2])).unwrap();
        let x = b.input("x", &Type::f32(&[3])).unwrap();
        assert_eq!(
            b.keep(kept, x, &[]).unwrap_err().to_string(),
            "keep: f32 [2] cannot hold f32 [3]"
        );
    }
}
