//! Sums of squares of the gradients of a group of tensors, and their total.
//!
//! The update reads the total to clip, and to test that every gradient is finite: one NaN or
//! infinity anywhere makes the total so.

mod cuda;

use crate::cpu::math::{dot, vectorised};
use crate::cpu::pool::chunks;
use crate::cpu::reduce::{rounded, total};
use crate::cpu::{Frame, PerChunk, Pool};
use crate::op::{Builder, Op, Result, op, refuse};
use crate::ops::grain;
use crate::value::{Type, Value};

/// Sums of squares, f32 `[tensors + 1]`: one for each input, then their total.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientNorm;

impl Builder {
    /// Sums of squares of `gradients` and, last, their total: f32 `[gradients + 1]`.
    ///
    /// # Errors
    ///
    /// When there are none.
    pub fn gradient_norm(&mut self, gradients: &[Value]) -> Result<Value> {
        self.op1(GradientNorm, gradients)
    }
}

impl Op for GradientNorm {
    op! {
        name "gradient_norm";
        cuda(self) cuda::value();
        scratch_bytes(self, inputs)
            4 * inputs.iter().map(|input| chunks(input.len(), grain(input.len()))).max().unwrap_or(0);
        flops(self, inputs) inputs.iter().map(|input| 2 * input.len() as u64).sum();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs.is_empty() {
            return refuse!(self, "there are no gradients");
        }
        Ok(vec![Type::f32(&[inputs.len() + 1])])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        let out = frame.output(0).values;
        let partials = frame.scratch();
        let (of_all, squares) = out.split_last_mut().expect("one more than the gradients");
        let mut sum = 0.0;
        for (index, square) in squares.iter_mut().enumerate() {
            *square = sum_squares(frame.pool, frame.input(index), partials);
            sum += f64::from(*square);
        }
        *of_all = rounded(sum);
    }
}

/// Sum of squares: lanes within a chunk in f32, chunks in order in f64.
fn sum_squares(pool: &Pool, x: &[f32], partials: &mut [f32]) -> f32 {
    let (len, each) = (x.len(), grain(x.len()));
    pool.run(len, each, PerChunk(partials, 1), |range, partial| {
        let x = &x[range];
        partial.0[0] = vectorised(
            #[inline(always)]
            || dot(x, x),
        );
    });
    rounded(total(&partials[..chunks(len, each)]))
}
