//! What is computed element by element, written down as an expression: its gradient is the derivative of it, the CPU goes through its
//! steps a tile at a time, and a device gets it as the text of a kernel. A function is a line of `functions.rs`.

mod cpu;
mod cuda;
mod expr;
mod functions;
mod steps;
#[cfg(test)]
mod tests;

use std::fmt;

pub use expr::{Expr, GeluKind};
use expr::{Function, Term};
use steps::{Action, REGISTERS, Steps};

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::derivation::Derivation;
use crate::op::{BuildError, Builder, ExpensiveOps, Gradients, NodeView, Op, Result};
use crate::ops::WeightedSum;
use crate::precision::Format::{self, Either};
use crate::value::{DType, Type, Value};

/// Results of one op, at most: gradients of two operands are made in one pass.
const RESULTS: usize = 2;

/// One or two expressions of some operands, element by element.
#[derive(Clone)]
pub struct Elementwise {
    /// Its name, and that of its gradient.
    names: [&'static str; 2],
    results: Vec<Expr>,
    /// Operands that are a scalar beside larger ones: it stands for all of their elements.
    is_scalar: Vec<bool>,
    steps: Steps,
}

impl fmt::Debug for Elementwise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scalars = self.is_scalar.iter().enumerate();
        let scalars: Vec<usize> = scalars.filter(|(_, is)| **is).map(|(at, _)| at).collect();
        write!(f, "{} {:?}", self.names[0], self.results)?;
        match &scalars[..] {
            [] => Ok(()),
            scalars => write!(f, " of scalars {scalars:?}"),
        }
    }
}

impl Builder {
    /// An expression of elements of f32 of one shape, and of scalars, each of which stands for all elements. It has that shape, and the
    /// gradient flows to each of `values`. `names` are its own and that of its gradient, in errors and profiles.
    ///
    /// ```
    /// # use spd_engine::{Builder, Type};
    /// # fn main() -> spd_engine::Result<()> {
    /// # let mut b = Builder::new();
    /// # let [x, y] = ["x", "y"].map(|name| b.input(name, &Type::f32(&[2, 3])).unwrap());
    /// let names = ["squared_error", "squared_error_grad"];
    /// let error = b.elementwise(names, [x, y], |[x, y]| (&x - &y) * (&x - &y))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// When shapes differ, a value is no f32, or more than 32 numbers wait for others at once.
    pub fn elementwise<const N: usize>(
        &mut self,
        names: [&'static str; 2],
        values: [Value; N],
        of: impl FnOnce([Expr; N]) -> Expr,
    ) -> Result<Value> {
        let is_all = values.iter().all(|&value| self.ty(value).dims.is_empty());
        let is_scalar = values.map(|value| !is_all && self.ty(value).dims.is_empty());
        let result = of(std::array::from_fn(Expr::operand));
        let op = Elementwise::new(names, vec![result], is_scalar.to_vec())?;
        self.op1(op, &values)
    }
}

impl Elementwise {
    fn new(names: [&'static str; 2], results: Vec<Expr>, is_scalar: Vec<bool>) -> Result<Self> {
        let Some(steps) = Steps::new(&results, &is_scalar) else {
            let reason = format!("needs more than {REGISTERS} numbers at once: {results:?}");
            return Err(BuildError::new(names[0], reason));
        };
        Ok(Self {
            names,
            results,
            is_scalar,
            steps,
        })
    }

    /// The sum of so many operands.
    pub(crate) fn sum(operands: usize) -> Self {
        let terms = (0..operands).map(Expr::operand);
        let sum = terms.reduce(|sum, term| sum + term);
        let sum = sum.unwrap_or_else(|| Expr::from(0.0));
        Self::new(["add", "add_grad"], vec![sum], vec![false; operands])
            .expect("a sum keeps one number")
    }

    /// Whether it is the sum of its operands.
    pub(crate) fn is_sum(&self) -> bool {
        let is_sum = |sum: &Self| sum.results == self.results && sum.is_scalar == self.is_scalar;
        is_sum(&Self::sum(self.is_scalar.len()))
    }

    /// Of these values; those that are not read are left out.
    fn of(
        names: [&'static str; 2],
        results: &[Expr],
        values: &[(Value, bool)],
    ) -> Result<(Self, Vec<Value>)> {
        let mut used: Vec<usize> = Vec::new();
        let results = results.iter().map(|result| {
            result.replaced(&mut |term| match *term.0 {
                Term::Operand(index) => Some(Expr::operand(
                    used.iter()
                        .position(|known| *known == index)
                        .unwrap_or_else(|| {
                            used.push(index);
                            used.len() - 1
                        }),
                )),
                _ => None,
            })
        });
        let results = results.collect();
        let is_scalar = used.iter().map(|&index| values[index].1).collect();
        let operands = used.iter().map(|&index| values[index].0).collect();
        Ok((Self::new(names, results, is_scalar)?, operands))
    }
}

impl Op for Elementwise {
    fn name(&self) -> &'static str {
        self.names[0]
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either], &[Either]]
    }

    fn carries(&self) -> bool {
        self.is_sum()
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let refuse = |reason| Err(BuildError::new(self.name(), reason));
        let mut shaped = inputs.iter().zip(&self.is_scalar).filter(|(_, is)| !**is);
        let Some((first, _)) = shaped.next() else {
            return refuse("there are no values".to_owned());
        };
        if let Some((other, _)) = shaped.find(|(other, _)| other != &first) {
            return refuse(format!("{first} and {other} differ"));
        }
        if let Some(other) = inputs.iter().find(|ty| ty.dtype != DType::F32) {
            return refuse(format!("needs f32, found {other}"));
        }
        Ok(vec![(*first).clone(); self.results.len()])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn derivation(&self, inputs: &[Value]) -> Option<Derivation> {
        self.is_sum().then(|| Derivation::Sum(inputs.to_vec()))
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        // What the derivatives are of: operands, results, and the gradients of these.
        let inputs = node
            .inputs
            .iter()
            .copied()
            .zip(self.is_scalar.iter().copied());
        let mut values: Vec<(Value, bool)> = inputs.collect();
        values.extend(node.outputs.iter().map(|&output| (output, false)));
        let mut ups = Vec::new();
        for (result, &output) in self.results.iter().zip(node.outputs) {
            if let Some(up) = gradients.of(output) {
                ups.push((result, Expr::operand(values.len())));
                values.push((up, false));
            }
        }
        let mut made = |term: &Expr| {
            let made = self.results.iter().position(|result| result == term);
            made.map(|at| Expr::operand(node.inputs.len() + at))
        };
        let names = [self.names[1]; 2];
        let mut parts = Vec::new();
        for (index, &input) in node.inputs.iter().enumerate() {
            if !gradients.wants(input) {
                continue;
            }
            let terms = ups.iter().map(|(result, up)| result.derivative(index) * up);
            let gradient = terms.fold(Expr::from(0.0), |sum, term| sum + term);
            match *gradient.0 {
                Term::Constant(_) => {}
                Term::Operand(up) if !self.is_scalar[index] => {
                    gradients.pass(input, values[up].0)?
                }
                _ => parts.push((index, gradient.replaced(&mut made))),
            }
        }
        let (scalars, parts): (Vec<_>, Vec<_>) = parts
            .into_iter()
            .partition(|(index, _)| self.is_scalar[*index]);
        for pair in parts.chunks(RESULTS) {
            let (targets, results): (Vec<_>, Vec<_>) = pair
                .iter()
                .cloned()
                .map(|(index, part)| (Some(node.inputs[index]), part))
                .unzip();
            let (op, operands) = Self::of(names, &results, &values)?;
            gradients.emit(op, &operands, &targets)?;
        }
        for (index, part) in scalars {
            let (op, operands) = Self::of(names, &[part], &values)?;
            let b = gradients.builder();
            let each = b.op1(op, &operands)?;
            let mean = b.mean(each)?;
            let weights = vec![b.ty(each).len() as f64];
            gradients.emit(
                WeightedSum { weights },
                &[mean],
                &[Some(node.inputs[index])],
            )?;
        }
        Ok(())
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let of = |action| match action {
            Action::Of(Function::Exp | Function::Logistic, _) => 20,
            Action::Both(..) => 1,
            Action::Of(..) | Action::Copy(_) => 0,
        };
        self.count(inputs, of)
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        let gelu = |action| u64::from(matches!(action, Action::Of(Function::Gelu(_), _)));
        let slope = |action| u64::from(matches!(action, Action::Of(Function::GeluSlope(_), _)));
        ExpensiveOps {
            gelus: self.count(inputs, gelu),
            gelu_slopes: self.count(inputs, slope),
            ..ExpensiveOps::default()
        }
    }
}

impl Elementwise {
    /// Sum over its steps and elements.
    fn count(&self, inputs: &[&Type], of: impl Fn(Action) -> u64) -> u64 {
        let len = inputs.iter().map(|ty| ty.len() as u64).max();
        let each: u64 = self.steps.steps.iter().map(|step| of(step.action)).sum();
        each * len.unwrap_or(0)
    }
}
