//! Copies of columns: concatenation, slices, and reshapes. Nothing is computed.
//!
//! Each input gives a run of columns to the result; columns that no input gives are 0. The gradient
//! of an input is the run backwards: the columns of the gradient that it gave, and 0 in its other
//! columns.

mod cpu;
mod cuda;

use std::ops::Range;

use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{DType, Type, Value};

/// A run of columns.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Run {
    /// Its first column in the input, and in the result.
    from: usize,
    to: usize,
    /// Columns.
    len: usize,
}

/// Copies of runs of columns. The runs cover all columns of the result, or there is a single run.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    name: &'static str,
    /// Shape of the result.
    dims: Vec<usize>,
    /// Columns of a row of the result: its last dimension, unless the shape changes.
    columns: usize,
    /// One for each input.
    runs: Vec<Run>,
}

impl Builder {
    /// Values side by side along the last axis, f32 `[.., c_1]`, `[.., c_2]` and so on to
    /// `[.., c_1 + c_2 + ..]`; the gradient flows to each.
    ///
    /// # Errors
    ///
    /// When there are none, one is a scalar or no f32, or their other dimensions differ.
    pub fn concatenate(&mut self, values: &[Value]) -> Result<Value> {
        let Some(&first) = values.first() else {
            return refuse!("concatenate", "there are no values");
        };
        let first = self.ty(first).clone();
        let Some((_, rows)) = first.dims.split_last() else {
            return refuse!("concatenate", "needs a last axis, found {first}");
        };
        let (mut columns, mut runs) = (0, Vec::new());
        for &value in values {
            let ty = self.ty(value);
            if ty.dims.split_last().map(|(_, rows)| rows) != Some(rows) {
                return refuse!(
                    "concatenate",
                    "{first} and {ty} differ before the last axis"
                );
            }
            runs.push(Run {
                from: 0,
                to: columns,
                len: ty.columns(),
            });
            columns += ty.columns();
        }
        let op = Columns {
            name: "concatenate",
            dims: [rows, &[columns]].concat(),
            columns,
            runs,
        };
        self.op1(op, values)
    }

    /// Some columns along the last axis, f32 `[.., c]` to `[.., range]`; the gradient flows back,
    /// and is 0 for the other columns.
    ///
    /// # Errors
    ///
    /// When `x` is a scalar or not f32, or the range is empty or outside the last axis.
    pub fn slice(&mut self, x: Value, range: Range<usize>) -> Result<Value> {
        let ty = self.ty(x);
        let mut dims = ty.dims.clone();
        let Some(columns) = dims.last_mut().filter(|c| range.end <= **c) else {
            return refuse!("slice", "columns {range:?} are not in {ty}");
        };
        if range.is_empty() {
            return refuse!("slice", "columns {range:?} of {ty} are empty");
        }
        let len = range.len();
        *columns = len;
        let op = Columns::of_run("slice", dims, len, [range.start, 0, len]);
        self.op1(op, &[x])
    }

    /// The same numbers in the same order in another shape, f32; the gradient flows back.
    ///
    /// # Errors
    ///
    /// When `x` is not f32, or has another number of elements than `dims`.
    pub fn reshape(&mut self, x: Value, dims: &[usize]) -> Result<Value> {
        let ty = self.ty(x);
        if Type::f32(dims).len() != ty.len() {
            return refuse!("reshape", "{ty} does not have the elements of {dims:?}");
        }
        let columns = ty.columns();
        let op = Columns::of_run("reshape", dims.to_vec(), columns, [0, 0, columns]);
        self.op1(op, &[x])
    }
}

impl Columns {
    /// A copy of one run: the first column in the input, the first in the result, and columns.
    fn of_run(
        name: &'static str,
        dims: Vec<usize>,
        columns: usize,
        [from, to, len]: [usize; 3],
    ) -> Self {
        Self {
            name,
            dims,
            columns,
            runs: vec![Run { from, to, len }],
        }
    }

    /// Rows of the result.
    fn rows(&self) -> usize {
        self.dims.iter().product::<usize>() / self.columns.max(1)
    }
}

impl Op for Columns {
    op! {
        name(self) self.name; formats [Either] => [Either]; accumulates; carries;
        kernels(self) cpu::run(self), cuda::value(self);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match inputs.iter().find(|ty| ty.dtype != DType::F32) {
            Some(ty) => refuse!(self.name, "needs f32, found {ty}"),
            None => Ok(vec![Type::f32(&self.dims)]),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        for (&input, &Run { from, to, len }) in node.inputs.iter().zip(&self.runs) {
            let ty = gradients.builder().ty(input);
            let columns = ty.len() / self.rows().max(1);
            let back = Self::of_run("columns_grad", ty.dims.clone(), columns, [to, from, len]);
            gradients.emit(back, &[g], &[input])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Tensor;

    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    // Only gradients of several readers are added up.
    const TOLERANCE: f32 = 1e-6;

    #[test]
    fn concatenations_agree_with_candle() {
        for [a, b] in [[3, 5], [4, 8], [33, 1]] {
            let samples = [random(&[7, 3, a], 1), random(&[7, 3, b], 2)];
            Oracle::new(&samples)
                .ours(|b, v| b.concatenate(&[v[0], v[1], v[0]]))
                .candle(|v| Tensor::cat(&[&v[0], &v[1], &v[0]], 2))
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn slices_agree_with_candle() {
        for (dims, first, second) in [
            (&[7][..], 0..3, 2..7),
            (&[5, 3, 12], 4..8, 8..12),
            (&[300, 130], 1..70, 60..130),
        ] {
            let ours = [first.clone(), second.clone()];
            Oracle::new(&[random(dims, 1)])
                .ours(|b, v| {
                    let [first, second] = ours.clone().map(|range| b.slice(v[0], range).unwrap());
                    b.concatenate(&[second, first])
                })
                .candle(|v| {
                    let last = v[0].rank() - 1;
                    let [first, second] = [first.clone(), second.clone()]
                        .map(|range| v[0].narrow(last, range.start, range.len()).unwrap());
                    Tensor::cat(&[second, first], last)
                })
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn reshapes_agree_with_candle() {
        for (from, to) in [(&[6, 35][..], &[2, 3, 5, 7][..]), (&[], &[1, 1])] {
            Oracle::new(&[random(from, 1)])
                .ours(|b, v| {
                    let y = b.reshape(v[0], to)?;
                    b.add(y, y)
                })
                .candle(|v| v[0].reshape(to)? * 2.0)
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let mut b = Builder::new();
        let [x, other, scalar] = [("x", &[2, 3][..]), ("other", &[3, 3]), ("scalar", &[])]
            .map(|(name, dims)| b.input(name, &Type::f32(dims)).unwrap());
        let ids = b.input("ids", &Type::u32(&[2, 3])).unwrap();
        for (found, expected) in [
            (b.concatenate(&[]), "concatenate: there are no values"),
            (
                b.concatenate(&[scalar]),
                "concatenate: needs a last axis, found f32 []",
            ),
            (
                b.concatenate(&[x, other]),
                "concatenate: f32 [2, 3] and f32 [3, 3] differ before the last axis",
            ),
            (
                b.concatenate(&[x, ids]),
                "concatenate: needs f32, found u32 [2, 3]",
            ),
            (
                b.slice(x, 1..4),
                "slice: columns 1..4 are not in f32 [2, 3]",
            ),
            (
                b.slice(x, 2..2),
                "slice: columns 2..2 of f32 [2, 3] are empty",
            ),
            (
                b.reshape(x, &[5]),
                "reshape: f32 [2, 3] does not have the elements of [5]",
            ),
        ] {
            assert_eq!(found.unwrap_err().to_string(), expected);
        }
    }
}
