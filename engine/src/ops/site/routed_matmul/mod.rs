//! Matrix products at the routed positions only.
//!
//! A compacted matrix holds the routed rows of a matrix of all positions: they come first, in
//! order, and the rows behind them are undefined. In a product `Y = A W` the rows of `A`, those of
//! `Y`, or both are compacted, each by its own routes, and the rows that both have are computed;
//! others of `Y` are 0. With `G` the gradient of `Y`:
//!
//! ```text
//! A: G W^T, from the rows of Y to the rows of A
//! W: sum over the rows i that both have of A_i^T G_i
//! ```
//!
//! and without a product `A_(r_i)`, with `r_i` the number of the `i`-th routed row.
//!
//! Random subsets route on average half of the positions to each site, and a third of them to each
//! two; masked sites need only that share of the work.
//!
//! This holds for the CPU. The number of routed rows is not known when a CUDA kernel is launched: a
//! device has [compacted matrices of fixed sizes](crate::cuda::routed_rows).

mod cpu;

use crate::cpu::shape::Shape;
use crate::op::{Builder, Gradients, NodeView, Op, Result, listed, op, refuse};
use crate::value::{Type, Value};

/// A product over routed rows. Inputs: two factors, and routes f32 `[rows]` for each compacted
/// matrix of rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoutedMatMul {
    pub(crate) kind: Kind,
    /// Whether the rows of the first matrix of rows, `A`, are compacted.
    pub(crate) first: bool,
    /// Whether those of the second, `Y` or `G`, are.
    pub(crate) second: bool,
}

/// The factors and the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `Y = A W`.
    Rows {
        /// Whether `W` is stored `[n, k]`.
        transposed: bool,
    },
    /// `W = A^T G`.
    Sums,
}

impl RoutedMatMul {
    /// `X W^T`, compacted, with `W` f32 `[n, k]`.
    pub(super) const COMPACT_TRANSPOSED: Self = Self {
        kind: Kind::Rows { transposed: true },
        first: false,
        second: true,
    };

    /// `A^T B` with `A` compacted.
    pub(super) const SUMS_OF_COMPACTED: Self = Self {
        kind: Kind::Sums,
        first: true,
        second: false,
    };

    /// `A W`, with rows of `A` and of the result compacted or not.
    pub(crate) fn product(first: bool, second: bool) -> Self {
        let kind = Kind::Rows { transposed: false };
        Self {
            kind,
            first,
            second,
        }
    }

    /// Whether it is a product of compacted rows, and the rows of its result are not.
    pub(crate) fn spreads(self) -> bool {
        matches!(self.kind, Kind::Rows { .. }) && self.first && !self.second
    }

    /// Rows and columns of the result, and terms of its sums, if all rows are routed.
    fn shape(self, inputs: &[&Type]) -> Shape {
        let (a, b) = (inputs[0], inputs[1]);
        let (m, n, k) = match self.kind {
            Kind::Rows { transposed: false } => (a.rows(), b.columns(), b.rows()),
            Kind::Rows { transposed: true } => (a.rows(), b.rows(), b.columns()),
            Kind::Sums => (a.columns(), b.columns(), a.rows()),
        };
        Shape { m, n, k }
    }

    /// Number of all rows.
    fn rows(self, shape: Shape) -> usize {
        match self.kind {
            Kind::Rows { .. } => shape.m,
            Kind::Sums => shape.k,
        }
    }

    /// Whether each factor is stored transposed.
    fn stored(self) -> [bool; 2] {
        match self.kind {
            Kind::Rows { transposed } => [false, transposed],
            Kind::Sums => [true, false],
        }
    }

    /// Columns to copy of the first and second matrix of rows; 0 if the multiplied rows are
    /// adjacent already.
    fn copied(self, shape: Shape) -> [usize; 2] {
        let columns = match self.kind {
            Kind::Rows { .. } => [shape.k, shape.n],
            Kind::Sums => [shape.m, shape.n],
        };
        let apart = [!self.first || self.second, !self.second || self.first];
        [0, 1].map(|which| if apart[which] { columns[which] } else { 0 })
    }
}

impl Builder {
    /// `x W` at the routed positions, compacted: f32 `[.., k]`, `[k, n]` and routes f32 `[rows]`,
    /// zero for positions that take no part, to f32 `[.., n]`. Only its first rows, one for each
    /// routed position, are defined. The gradient flows to `x` and `w`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn routed_matmul(&mut self, x: Value, w: Value, route: Value) -> Result<Value> {
        self.routed_product(x, w, route)
    }

    /// The routed rows of `x`, compacted: f32 `[.., n]` and routes f32 `[rows]`, as for
    /// [`Builder::routed_matmul`].
    ///
    /// # Errors
    ///
    /// When there is not one route for each row.
    pub fn compact_rows(&mut self, x: Value, route: Value) -> Result<Value> {
        self.op1(CompactRows { back: false }, &[x, route])
    }
}

/// The routed rows, compacted; or compacted rows at their positions, and 0 elsewhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompactRows {
    pub(crate) back: bool,
}

impl Op for CompactRows {
    op! {
        name "compact_rows"; formats [Either, Full] => [Either]; accumulates(self) self.back;
        cpu(self) cpu::compact_rows(self.back);
        scratch_bytes(self, inputs) inputs[1].bytes();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (x, route) = (inputs[0], inputs[1]);
        if x.dims.is_empty() || x.rows() != route.len() {
            return refuse!(self, "needs a route for each row, found {x} and {route}");
        }
        Ok(vec![x.clone()])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        if self.back {
            return Ok(());
        }
        let [x, route] = [0, 1].map(|index| node.inputs[index]);
        gradients.emit(Self { back: true }, &[g, route], &[x])
    }
}

impl Op for RoutedMatMul {
    op! {
        name "routed_matmul"; formats [Factor, Factor, Full] => [Either]; accumulates;
        cpu(self) cpu::run(*self);
        packed_bytes(self, inputs) 4 * self.shape(inputs).packed(self.stored());
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (a, b, routes) = (inputs[0], inputs[1], &inputs[2..]);
        let shape = self.shape(inputs);
        let Shape { n, k, .. } = shape;
        let fits = match self.kind {
            Kind::Rows { .. } => a.columns() == k && b.dims.len() == 2,
            Kind::Sums => b.rows() == k,
        };
        let rows = self.rows(shape);
        let compacted = usize::from(self.first) + usize::from(self.second);
        if !fits
            || a.dims.is_empty()
            || routes.len() != compacted
            || routes.iter().any(|route| route.len() != rows)
        {
            let routes = listed(routes);
            return refuse!(
                self,
                "{a}, {b} and routes {routes} do not fit ({:?})",
                self.kind
            );
        }
        Ok(vec![match self.kind {
            Kind::Rows { .. } => a.with_columns(n),
            Kind::Sums => Type::f32(&[a.columns(), n]),
        }])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let shape = self.shape(inputs);
        let copied: usize = self.copied(shape).iter().sum();
        let product = shape.most_scratch(self.stored());
        4 * (self.rows(shape) * (cpu::LISTS + copied) + product)
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (Kind::Rows { transposed: false }, [a, w, routes @ ..]) = (self.kind, node.inputs)
        else {
            return refuse!(self, "a gradient has no gradient");
        };
        let of_a = Self {
            kind: Kind::Rows { transposed: true },
            first: self.second,
            second: self.first,
        };
        let back = [g, *w].into_iter().chain(routes.iter().rev().copied());
        gradients.emit(of_a, &back.collect::<Vec<_>>(), &[*a])?;
        let of_w = Self {
            kind: Kind::Sums,
            ..*self
        };
        let both = [*a, g].into_iter().chain(routes.iter().copied());
        gradients.emit(of_w, &both.collect::<Vec<_>>(), &[*w])
    }

    /// For half of the rows, or a third of them if both matrices are compacted: the means over
    /// subsets of many sites.
    fn flops(&self, inputs: &[&Type]) -> u64 {
        let Shape { m, n, k } = self.shape(inputs);
        let all = 2 * (m * n * k) as u64;
        all / if self.first && self.second { 3 } else { 2 }
    }
}

#[cfg(test)]
mod tests;
