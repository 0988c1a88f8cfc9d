//! `y = factor * sum of f(x, ..)` over all elements, a scalar. An operand gets `factor G f'`,
//! element by element.

use super::{Elementwise, Expr, Operand, cpu, cuda};
use crate::alike::{Alike, Of};
use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::cpu::reduce::rounded;
use crate::op::{Builder, Gradients, NodeView, Op, Result, op};
use crate::ops::grain;
use crate::value::{Type, Value};

/// A sum of one expression over all elements.
#[derive(Debug, Clone, PartialEq)]
pub struct ElementwiseSum {
    pub(super) of: Elementwise,
    pub(super) factor: f64,
}

impl Builder {
    /// The sum over all elements of an expression as [`elementwise`](Self::elementwise) takes it,
    /// times `factor`: a scalar. The gradient flows to each of `values`.
    ///
    /// # Errors
    ///
    /// As `elementwise`.
    pub fn elementwise_sum<const N: usize>(
        &mut self,
        names: [&'static str; 2],
        factor: f64,
        values: [Value; N],
        of: impl FnOnce([Expr; N]) -> Expr,
    ) -> Result<Value> {
        let of = Elementwise::of_values(self, names, values, of)?;
        self.op1(ElementwiseSum { of, factor }, &values)
    }
}

/// Number of summed elements.
fn len(inputs: &[&Type]) -> usize {
    inputs.iter().map(|ty| ty.len()).max().unwrap_or(0)
}

impl Op for ElementwiseSum {
    op! {
        name(self) self.of.name(); formats [Either] => [Full]; accumulates;
        cuda(self) cuda::sum(&self.of, self.factor);
        alike(self, _inputs, _outputs) Alike::of_elements(self.of.of_each().map(Of::Input));
        scratch_bytes(self, inputs) 4 * chunks(len(inputs), grain(len(inputs)));
        flops(self, inputs) self.of.flops(inputs) + len(inputs) as u64;
        expensive_ops(self, inputs) self.of.expensive_ops(inputs);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.of.outputs(inputs)?;
        Ok(vec![Type::scalar()])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let mut values = self.of.operands(node.inputs);
        let each = Expr::operand(values.len()) * rounded(self.factor);
        values.push(Operand {
            value: g,
            is_scalar: true,
        });
        let ups = [(&self.of.results[0], each)];
        self.of
            .pass_back(node.inputs, &values, &ups, |_| None, gradients)
    }

    fn run(&self, frame: &mut Frame<'_>) {
        let out = frame.output(0);
        let len = (0..frame.inputs()).map(|index| frame.ty(index).len()).max();
        let sum = rounded(self.factor * cpu::sum(&self.of, len.unwrap_or(0), frame));
        out.put([sum].into_iter());
    }
}
