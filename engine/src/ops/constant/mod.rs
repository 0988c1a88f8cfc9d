//! Numbers that are known when the program is built, all the same. It has no inputs, hence no gradient.

mod cuda;

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::op::{Builder, Gradients, NodeView, Op, Result};
use crate::value::{Type, Value};

/// A tensor, by default a scalar, whose elements are all the same.
#[derive(Debug, Clone, Default)]
pub struct Constant {
    /// Each element.
    pub value: f32,
    /// Shape.
    pub dims: Vec<usize>,
}

impl Builder {
    /// f32 `dims`, every element `value`.
    ///
    /// # Errors
    ///
    /// Never: it has no inputs.
    pub fn constant(&mut self, value: f32, dims: &[usize]) -> Result<Value> {
        let dims = dims.to_vec();
        self.op1(Constant { value, dims }, &[])
    }
}

impl Op for Constant {
    fn name(&self) -> &'static str {
        "constant"
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::f32(&self.dims)])
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, frame: &mut Frame<'_>) {
        frame.output(0).0.fill(self.value);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self.value, to);
    }
}
