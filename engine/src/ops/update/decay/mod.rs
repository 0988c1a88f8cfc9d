//! Weight decay of each column or row of a matrix by how much it is needed.
//!
//! ```text
//! w_c <- w_c f_c      f_c = max(0, 1 - lr decay max(0, 1 - m_c)), or the root of that
//! ```
//!
//! `m_c` says how much line `c` is needed: at 1 or above it stays. It follows the update of the
//! step and changes no moment. `lr` is the step scalar of that name. Nothing is written if a guard,
//! such as the total of a [`GradientNorm`](super::GradientNorm), is not finite.

mod cpu;
mod cuda;

use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{StepScalar, Type, Value};

/// The lines of a matrix that decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lines {
    /// Its rows.
    Rows,
    /// Its columns.
    Columns,
}

/// Settings of a decay. Inputs: the matrix, `m`, and guards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decay {
    /// Learning rate.
    pub lr: StepScalar,
    /// Weight decay of a line that is not needed at all.
    pub decay: f32,
    /// Whether a factor is the root.
    pub root: bool,
    /// The lines.
    pub of: Lines,
}

impl Builder {
    /// Decays the lines of a matrix of the store at the end of a replay; `needed` has a number for
    /// each. Nothing is written if one of `guards` ends in a number that is not finite.
    ///
    /// # Errors
    ///
    /// When there is another number of lines.
    pub fn decay(&mut self, op: Decay, on: Value, needed: Value, guards: &[Value]) -> Result<()> {
        let inputs = [&[on, needed], guards].concat();
        self.op(op, &inputs).map(|_| ())
    }
}

impl Op for Decay {
    op! {
        name "decay"; writes(self) 0..1;
        kernels(self) cpu::run(self), cuda::value(self);
        flops(self, inputs) 3 * inputs[0].len() as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (matrix, needed) = (inputs[0], inputs[1]);
        let lines = match self.of {
            Lines::Rows => matrix.rows(),
            Lines::Columns => matrix.columns(),
        };
        if lines != needed.len() {
            return refuse!(self, "{:?} of {matrix} are not those of {needed}", self.of);
        }
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Decay, Lines};
    use crate::cpu::{Alone, Pool};
    use crate::ops::oracle::close;
    use crate::{Builder, Store, Type};

    // By hand: lr decay = 0.25. A line of importance 1 or above stays, and no factor is below 0.
    #[test]
    fn lines_decay_by_what_they_lack_and_a_bad_guard_leaves_them() {
        let needed = [0.0, 0.5, 1.0, 1.5, -5.0];
        for (of, dims) in [(Lines::Rows, [5, 2]), (Lines::Columns, [2, 5])] {
            for (root, factors) in [
                (false, [0.75, 0.875, 1.0, 1.0, 0.0]),
                (true, [0.866_025_4, 0.935_414_3, 1.0, 1.0, 0.0]),
            ] {
                let (mut b, mut store) = (Builder::new(), Store::new());
                let slot = store.add("w", &dims, vec![2.0; 10]);
                let w = b.persistent(&store, slot);
                let m = b.input("m", &Type::f32(&[1, 5])).unwrap();
                let guard = b.input("guard", &Type::f32(&[2])).unwrap();
                let op = Decay {
                    lr: b.step_scalar("lr"),
                    decay: 0.5,
                    root,
                    of,
                };
                b.decay(op, w, m, &[guard]).unwrap();
                let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
                executor.set_scalar("lr", 0.5);
                executor.input("m").copy_from_slice(&needed);
                executor.input("guard").fill(f32::NAN);
                executor.run(&mut store);
                assert_eq!(store.get(slot), [2.0; 10]);
                executor.input("guard").fill(1.0);
                executor.run(&mut store);
                let expected: Vec<f32> = (0..10)
                    .map(|at| 2.0 * factors[if of == Lines::Rows { at / 2 } else { at % 5 }])
                    .collect();
                // One rounding each of the root and of the product.
                close("decayed", store.get(slot), &expected, 2e-7);
            }
        }
    }

    #[test]
    fn another_number_of_lines_is_refused() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let slot = store.zeros("w", &[2, 5]);
        let w = b.persistent(&store, slot);
        let m = b.input("m", &Type::f32(&[5])).unwrap();
        let op = Decay {
            lr: b.step_scalar("lr"),
            decay: 0.5,
            root: false,
            of: Lines::Rows,
        };
        assert_eq!(
            b.decay(op, w, m, &[]).unwrap_err().to_string(),
            "decay: Rows of f32 [2, 5] are not those of f32 [5]"
        );
    }
}
