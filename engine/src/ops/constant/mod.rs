//! A scalar that is known when the program is built. It has no inputs, hence no gradient.

use crate::cpu::Frame;
use crate::gradients::Gradients;
use crate::op::{NodeView, Op, Result};
use crate::value::Type;

/// A scalar.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    /// Its value.
    pub value: f32,
}

impl Op for Constant {
    fn name(&self) -> &'static str {
        "constant"
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::scalar()])
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, frame: &mut Frame<'_>) {
        frame.output(0).0[0] = self.value;
    }
}
