//! The same numbers in bf16, rounded to the nearest, to the even one of two: what a product reads of a value that is kept in
//! f32. `|round(x) - x| <= 2^-8 |x|`.
//!
//! It comes into a program when a device is to store it in bf16 ([`crate::Precision`]), after gradients have been made: its own is
//! that of the value itself.

use crate::cpu::Frame;
use crate::cuda::lowering::{Lowering, Source};
use crate::op::{BuildError, Gradients, NodeView, Op, Result};
use crate::value::{DType, Type};

const KERNELS: Source = Source {
    name: "cast",
    text: include_str!("kernel.cu"),
};

/// bf16 of an f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cast;

impl Op for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[0].dtype != DType::F32 {
            let reason = format!("rounds f32, found {}", inputs[0]);
            return Err(BuildError::new(self.name(), reason));
        }
        Ok(vec![Type {
            dtype: DType::Bf16,
            dims: inputs[0].dims.clone(),
        }])
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        let reason = "comes into a program after its gradients";
        Err(BuildError::new(self.name(), reason))
    }

    fn run(&self, _frame: &mut Frame<'_>) {
        unreachable!("the CPU executor computes f32 programs");
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        let (x, y) = (to.input(0), to.output(0));
        to.kernel(KERNELS, "cast", &[y.len.into()])
            .fours(1, y.len)
            .launch(&[x.into(), y.into()]);
    }
}
