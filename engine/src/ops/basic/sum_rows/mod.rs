//! `y_o = sum over rows of x`: the gradient of a bias. It is never differentiated, so it has no
//! gradient.

mod cpu;
mod cuda;

use crate::op::{Op, Result, op, refuse};
use crate::ops::row_chunks;
use crate::value::Type;

/// Sum over all dimensions but the last, f32 `[.., o]` to `dims`, whose product is `o`.
#[derive(Debug, Clone, PartialEq)]
pub struct SumRows {
    /// Shape of the result.
    pub dims: Vec<usize>,
}

impl Op for SumRows {
    op! {
        name "sum_rows"; formats [Either] => [Full]; accumulates;
        kernels(self) cpu::run(), cuda::value();
        scratch_bytes(self, inputs) 4 * row_chunks(inputs[0]) * inputs[0].columns();
        flops(self, inputs) inputs[0].len() as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.dims.iter().product::<usize>() != inputs[0].columns() {
            return refuse!(self, "{} to {:?}", inputs[0], self.dims);
        }
        Ok(vec![Type::f32(&self.dims)])
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::Store;
    use crate::cuda::casts::rounded_wherever_possible;
    use crate::cuda::program::Program;
    use crate::cuda::tests::replay;
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::step_parameters::StepParameters;

    // Numbers of bf16, in vectors of 8, 4 and 1, several blocks side by side, and many stretches, the
    // last of them shorter. A sum of up to 999 numbers is off by 999 2^-24 of their magnitudes.
    #[test]
    fn a_device_adds_every_row_once() {
        for dims in [[600, 520], [33, 300], [999, 37], [40, 8]] {
            let values = random(&dims, 1).values.into_iter();
            let values: Vec<f32> = values.map(|x| bf16::from_f32(x).to_f32()).collect();
            let (mut b, mut store) = (Builder::new(), Store::new());
            let slot = store.add("x", &dims, values.clone());
            let x = b.persistent(&store, slot);
            let columns = dims[1..].to_vec();
            let y = b.op1(SumRows { dims: columns }, &[x]).unwrap();
            b.output("y", y);
            let rounded = rounded_wherever_possible(&b);
            for program in [Program::new(&b), Program::of(&rounded)] {
                let Some((device, found)) =
                    replay(program, &store, &[], &StepParameters::default())
                else {
                    return;
                };
                for (column, found) in found[0].1.iter().enumerate() {
                    let of_column = || values.iter().skip(column).step_by(dims[1]);
                    let sum: f64 = of_column().map(|&x| f64::from(x)).sum();
                    let size: f64 = of_column().map(|&x| f64::from(x).abs()).sum();
                    let off = (f64::from(*found) - sum).abs();
                    assert!(off <= 6e-5 * size, "{dims:?} {device}: {found}, not {sum}");
                }
            }
        }
    }
}
