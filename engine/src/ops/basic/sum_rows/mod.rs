//! `y_o = sum over rows of x`: the gradient of a bias. It is never differentiated, so it has no
//! gradient.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cuda::Lowering;
use crate::op::{BuildError, Op, Result};
use crate::ops::grain_rows;
use crate::precision::Format::{self, Either, Full};
use crate::value::Type;

/// Sum over all dimensions but the last, f32 `[.., o]` to `dims`, whose product is `o`.
#[derive(Debug, Clone, PartialEq)]
pub struct SumRows {
    /// Shape of the result.
    pub dims: Vec<usize>,
}

impl Op for SumRows {
    fn name(&self) -> &'static str {
        "sum_rows"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Full]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.dims.iter().product::<usize>() != inputs[0].columns() {
            return Err(BuildError::new(
                self.name(),
                format!("{} to {:?}", inputs[0], self.dims),
            ));
        }
        Ok(vec![Type::f32(&self.dims)])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let (rows, columns) = (inputs[0].rows(), inputs[0].columns());
        4 * chunks(rows, grain_rows(columns)) * columns
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        inputs[0].len() as u64
    }
}
