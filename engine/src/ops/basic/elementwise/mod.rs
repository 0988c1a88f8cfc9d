//! Element-wise ops, written as expressions: the gradient is the derivative of the expression, the
//! CPU runs its steps a tile at a time, and a device gets the text of a kernel. A function, or a
//! sum of one over all elements, is a line of `functions.rs`.

mod cpu;
mod cuda;
mod expr;
mod functions;
mod steps;
mod sum;
#[cfg(test)]
mod tests;

use std::fmt;

pub use expr::{Expr, GeluKind};
use expr::{Function, Term};
use steps::{Action, REGISTERS, Steps};
pub use sum::ElementwiseSum;

use crate::alike::{Alike, Of};
use crate::derivation::Derivation;
use crate::op::{Builder, ExpensiveOps, Gradients, NodeView, Op, Result, op, refuse};
use crate::precision::Format::{self, Either, Full};
use crate::value::{DType, Type, Value};

/// Most results of one op: gradients of two operands are made in one pass.
const RESULTS: usize = 2;

/// One or two expressions of some operands, element by element.
#[derive(Clone, PartialEq)]
pub struct Elementwise {
    /// Its name, and that of its gradient.
    names: [&'static str; 2],
    results: Vec<Expr>,
    /// For each operand, whether it is a scalar beside larger ones, and stands for all of their
    /// elements.
    is_scalar: Vec<bool>,
    /// Shape of the results, if no operand has it.
    dims: Option<Vec<usize>>,
    /// Whether no gradient passes through, and everything is kept in f32.
    is_constant: bool,
    /// They follow from the results.
    steps: Steps,
}

/// A value that an expression may read.
#[derive(Debug, Clone, Copy)]
struct Operand {
    value: Value,
    /// Whether it is a scalar beside larger ones, and stands for all of their elements.
    is_scalar: bool,
}

impl fmt::Debug for Elementwise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.names[0], self.results)?;
        if self.is_scalar.contains(&true) {
            write!(f, " scalars {:?}", self.is_scalar)?;
        }
        match &self.dims {
            Some(dims) => write!(f, " {dims:?}"),
            None => Ok(()),
        }
    }
}

impl Builder {
    /// An expression of elements of f32 of one shape, and of scalars, each of which stands for all
    /// elements. It has that shape, and the gradient flows to each of `values`. `names` are its own
    /// and that of its gradient, in errors and profiles.
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
    /// When shapes differ, a value is no f32, or more than 32 intermediate numbers are needed at
    /// once.
    pub fn elementwise<const N: usize>(
        &mut self,
        names: [&'static str; 2],
        values: [Value; N],
        of: impl FnOnce([Expr; N]) -> Expr,
    ) -> Result<Value> {
        let op = Elementwise::of_values(self, names, values, of)?;
        self.op1(op, &values)
    }

    /// The same as a constant to what reads it: no gradient passes through. Operands and result are
    /// in f32 whatever the precision: it is for what moves from step to step.
    ///
    /// # Errors
    ///
    /// As [`elementwise`](Self::elementwise).
    pub fn elementwise_constant<const N: usize>(
        &mut self,
        name: &'static str,
        values: [Value; N],
        of: impl FnOnce([Expr; N]) -> Expr,
    ) -> Result<Value> {
        let op = Elementwise {
            is_constant: true,
            ..Elementwise::of_values(self, [name; 2], values, of)?
        };
        self.op1(op, &values)
    }
}

impl Elementwise {
    fn new(names: [&'static str; 2], results: Vec<Expr>, is_scalar: Vec<bool>) -> Result<Self> {
        let Some(steps) = Steps::new(&results, &is_scalar) else {
            return refuse!(
                names[0],
                "needs more than {REGISTERS} numbers at once: {results:?}"
            );
        };
        Ok(Self {
            names,
            results,
            is_scalar,
            dims: None,
            is_constant: false,
            steps,
        })
    }

    /// An expression of values: scalars beside larger values stand for all elements.
    fn of_values<const N: usize>(
        b: &Builder,
        names: [&'static str; 2],
        values: [Value; N],
        of: impl FnOnce([Expr; N]) -> Expr,
    ) -> Result<Self> {
        let is_scalar = values.map(|value| b.ty(value).dims.is_empty());
        let are_all = is_scalar.iter().all(|is_scalar| *is_scalar);
        let is_scalar = is_scalar.map(|is_scalar| is_scalar && !are_all);
        let result = of(std::array::from_fn(Expr::operand));
        Self::new(names, vec![result], is_scalar.to_vec())
    }

    /// f32 `dims`, every element `value`.
    pub(crate) fn constant(value: f32, dims: &[usize]) -> Self {
        let names = ["constant", "constant_grad"];
        let op = Self::new(names, vec![Expr::from(value)], Vec::new());
        let dims = Some(dims.to_vec());
        Self {
            dims,
            ..op.expect("one number")
        }
    }

    /// The sum of so many operands.
    pub(crate) fn sum(operands: usize) -> Self {
        let terms = (0..operands).map(Expr::operand);
        let sum = terms.reduce(|sum, term| sum + term);
        let sum = sum.unwrap_or_else(|| Expr::from(0.0));
        Self::new(["add", "add_grad"], vec![sum], vec![false; operands])
            .expect("a sum keeps one number")
    }

    /// The first operand times the second, a scalar.
    pub(crate) fn scaled(name: &'static str) -> Self {
        let product = Expr::operand(0) * Expr::operand(1);
        Self::new([name; 2], vec![product], vec![false, true]).expect("a product keeps two numbers")
    }

    /// Whether it is the sum of its operands.
    pub(crate) fn is_sum(&self) -> bool {
        let is_sum = |sum: &Self| sum.results == self.results && sum.is_scalar == self.is_scalar;
        !self.is_scalar.is_empty() && is_sum(&Self::sum(self.is_scalar.len()))
    }

    /// Its operands, which are `inputs`.
    fn operands(&self, inputs: &[Value]) -> Vec<Operand> {
        let operands = inputs.iter().zip(&self.is_scalar);
        operands
            .map(|(&value, &is_scalar)| Operand { value, is_scalar })
            .collect()
    }

    /// Expressions of those of `values` that they read, with the shape `dims`.
    fn of_used(
        names: [&'static str; 2],
        results: &[Expr],
        values: &[Operand],
        dims: &[usize],
    ) -> Result<(Self, Vec<Value>)> {
        let mut used: Vec<usize> = Vec::new();
        let mut operand = |index| {
            let known = used.iter().position(|known| *known == index);
            known.unwrap_or_else(|| {
                used.push(index);
                used.len() - 1
            })
        };
        let results = results.iter().map(|result| {
            result.replaced(&mut |term| match *term.0 {
                Term::Operand(index) => Some(Expr::operand(operand(index))),
                _ => None,
            })
        });
        let results = results.collect();
        let is_scalar: Vec<bool> = used.iter().map(|&index| values[index].is_scalar).collect();
        let operands = used.iter().map(|&index| values[index].value).collect();
        let has_shape = is_scalar.contains(&false);
        let mut op = Self::new(names, results, is_scalar)?;
        op.dims = (!has_shape).then(|| dims.to_vec());
        Ok((op, operands))
    }

    /// Emits the gradients of operands: derivatives of results, each times its entry in `ups`. The
    /// expressions are of `values`: the operands, the results if these are `made`, and the
    /// gradients of the results.
    fn pass_back(
        &self,
        inputs: &[Value],
        values: &[Operand],
        ups: &[(&Expr, Expr)],
        mut made: impl FnMut(&Expr) -> Option<Expr>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        let names = [self.names[1]; 2];
        let mut parts = Vec::new();
        for (index, &input) in inputs.iter().enumerate() {
            if !gradients.wants(input) {
                continue;
            }
            let terms = ups.iter().map(|(result, up)| result.derivative(index) * up);
            let gradient = terms.fold(Expr::from(0.0), |sum, term| sum + term);
            match *gradient.0 {
                Term::Constant(_) => {}
                Term::Operand(up) if self.is_scalar[index] == values[up].is_scalar => {
                    gradients.pass(input, values[up].value)?;
                }
                _ => parts.push((index, gradient.replaced(&mut made))),
            }
        }
        let (scalars, parts): (Vec<_>, Vec<_>) = parts
            .into_iter()
            .partition(|(index, _)| self.is_scalar[*index]);
        for pair in parts.chunks(RESULTS) {
            let targets: Vec<_> = pair.iter().map(|part| inputs[part.0]).collect();
            let results: Vec<_> = pair.iter().map(|part| part.1.clone()).collect();
            let dims = gradients.builder().ty(inputs[pair[0].0]).dims.clone();
            let (op, operands) = Self::of_used(names, &results, values, &dims)?;
            gradients.emit(op, &operands, &targets)?;
        }
        for (index, part) in scalars {
            let (of, operands) = Self::of_used(names, &[part], values, &[])?;
            let op = ElementwiseSum { of, factor: 1.0 };
            gradients.emit(op, &operands, &[inputs[index]])?;
        }
        Ok(())
    }
}

impl Op for Elementwise {
    op! {
        name(self) self.names[0]; accumulates; is_constant(self) self.is_constant;
        carries(self) self.is_sum();
        kernels(self) cpu::run(self), cuda::value(self);
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        match self.is_constant {
            true => [&[Full], &[Full]],
            false => [&[Either], &[Either]],
        }
    }

    fn alike(&self, _inputs: &[&Type], outputs: &[&Type]) -> Vec<Alike> {
        let outputs = (0..outputs.len()).map(Of::Output);
        Alike::of_elements(self.of_each().map(Of::Input).chain(outputs))
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if let Some(other) = inputs.iter().find(|ty| ty.dtype != DType::F32) {
            return refuse!(self, "needs f32, found {other}");
        }
        let shaped = inputs.iter().zip(&self.is_scalar).filter(|(_, is)| !**is);
        let mut shaped = shaped.map(|(ty, _)| (*ty).clone());
        let Some(first) = shaped.next().or(self.dims.as_deref().map(Type::f32)) else {
            return refuse!(self, "there are no values");
        };
        match shaped.find(|other| *other != first) {
            Some(other) => refuse!(self, "{first} and {other} differ"),
            None => Ok(vec![first; self.results.len()]),
        }
    }

    fn derivation(&self, inputs: &[Value]) -> Option<Derivation> {
        let is_linear = self.is_sum() && !self.is_constant;
        is_linear.then(|| Derivation::Sum(inputs.to_vec()))
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        if self.is_constant {
            return Ok(());
        }
        // The expressions of the derivatives: operands, results, and the gradients of these.
        let whole = |value| Operand {
            value,
            is_scalar: false,
        };
        let mut values = self.operands(node.inputs);
        values.extend(node.outputs.iter().copied().map(whole));
        let mut ups = Vec::new();
        for (result, &output) in self.results.iter().zip(node.outputs) {
            if let Some(up) = gradients.of(output) {
                ups.push((result, Expr::operand(values.len())));
                values.push(whole(up));
            }
        }
        let made = |term: &Expr| {
            let made = self.results.iter().position(|result| result == term);
            made.map(|at| Expr::operand(node.inputs.len() + at))
        };
        self.pass_back(node.inputs, &values, &ups, made, gradients)
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
    /// Operands with an element for each of the result.
    fn of_each(&self) -> impl Iterator<Item = usize> + Clone {
        let operands = self.is_scalar.iter().enumerate();
        operands
            .filter(|(_, is_scalar)| !**is_scalar)
            .map(|(index, _)| index)
    }

    /// Sum over its steps and elements.
    fn count(&self, inputs: &[&Type], of: impl Fn(Action) -> u64) -> u64 {
        let len = inputs.iter().map(|ty| ty.len() as u64).max();
        let each: u64 = self.steps.steps.iter().map(|step| of(step.action)).sum();
        each * len.unwrap_or(0)
    }
}
