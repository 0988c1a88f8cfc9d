//! `y = sum of inputs`, element by element; every input gets the gradient of `y`.

mod cpu;
mod cuda;

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::derivation::Derivation;
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::precision::Format::{self, Either};
use crate::value::{Type, Value};

/// Sum of one or more values of one f32 type.
#[derive(Debug, Clone, Copy)]
pub struct Add;

impl Builder {
    /// `a + b`, f32 of one shape; the gradient flows to both.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.op1(Add, &[a, b])
    }
}

impl Op for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn carries(&self) -> bool {
        true
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let first = inputs
            .first()
            .ok_or_else(|| BuildError::new(self.name(), "nothing to add"))?;
        match inputs.iter().find(|input| *input != first) {
            Some(other) => Err(BuildError::new(
                self.name(),
                format!("{first} and {other} differ"),
            )),
            None => Ok(vec![(*first).clone()]),
        }
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn derivation(&self, inputs: &[Value]) -> Option<Derivation> {
        Some(Derivation::Sum(inputs.to_vec()))
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(gradient) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        node.inputs
            .iter()
            .try_for_each(|&input| gradients.pass(input, gradient))
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        inputs.iter().map(|input| input.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn value_and_gradients_are_those_of_candle() {
        let (a, b) = (random(&[3, 5], 1), random(&[3, 5], 2));
        Oracle::new(&[a, b])
            .ours(|b, v| {
                let sum = b.add(v[0], v[1])?;
                b.add(sum, v[0])
            })
            .candle(|v| (&v[0] + &v[1])? + &v[0])
            // Sums of three numbers.
            .agree(1e-6);
    }
}
