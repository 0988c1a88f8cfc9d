//! The identity matrix, known when the program is built. It has no inputs and so no gradient.

mod cuda;

use crate::cpu::Frame;
use crate::op::{Builder, Op, Result, op};
use crate::value::{Type, Value};

/// Ones on the diagonal, zeros elsewhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Identity {
    /// Rows and columns.
    pub size: usize,
}

impl Builder {
    /// The identity matrix, f32 `[size, size]`.
    ///
    /// # Errors
    ///
    /// Never.
    pub fn identity(&mut self, size: usize) -> Result<Value> {
        self.op1(Identity { size }, &[])
    }
}

impl Op for Identity {
    op! {
        name "identity";
        results(self, _inputs) vec![Type::f32(&[self.size, self.size])];
        cuda(self) cuda::value(self.size);
    }

    fn run(&self, frame: &mut Frame<'_>) {
        let matrix = frame.output(0).values;
        matrix.fill(0.0);
        matrix
            .iter_mut()
            .step_by(self.size + 1)
            .for_each(|one| *one = 1.0);
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn the_identity_times_a_matrix_is_the_matrix() {
        for size in [1, 3, 17] {
            Oracle::new(&[random(&[5, size], 1)])
                .ours(|b, v| {
                    let identity = b.identity(size)?;
                    b.matmul(v[0], identity)
                })
                .candle(|v| &v[0] * 1.0)
                // Products with 1 and 0 are exact, and so are their sums.
                .agree(0.0);
        }
    }
}
