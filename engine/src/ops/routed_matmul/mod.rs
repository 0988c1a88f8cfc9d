//! Matrix products at the positions that are routed, and at no others.
//!
//! Of a matrix of all positions, a packed one holds the routed rows alone: they come first, in order, and what lies behind them
//! means nothing. With `r_i` the number of the `i`-th routed row,
//!
//! ```text
//! pack     H_i     = X_(r_i) W             X: unpack (G, W^T)      W: sums (X, G)
//! unpack   Y_(r_i) = H_i W, else 0
//! sums     W       = sum over i of A_i^T B_i, where one of A, B is packed and the other is of all positions
//! ```
//!
//! and without a product `H_i = X_(r_i)`, for the few `X W` that are not made from `X` (see `association`).
//!
//! What a packed matrix is, is known to the ops that make and read one: on a CUDA device it has all rows, and those that are not
//! routed are zero. On average a subset of the sites routes half of the positions to each, so half of the work of a masked site is not done. The
//! rows that are read or written where they lie are those of the narrow side, the layer's input and output: they are
//! copied, which next to a product with as many columns as there are components costs nothing.

mod cpu;
mod cuda;

pub(super) use cpu::scatter;

use crate::association::Right;
use crate::builder::Builder;
use crate::cpu::Frame;
use crate::cpu::gemm::Shape;
use crate::cuda::lowering::Lowering;
use crate::gradients::Gradients;
use crate::op::{BuildError, NodeView, Op, Result};
use crate::value::{Type, Value};

/// A product over routed rows: two factors and f32 `[rows]` of routes.
#[derive(Debug, Clone, Copy)]
pub struct RoutedMatMul {
    kind: Kind,
}

/// Which rows are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Those of the result.
    Pack {
        /// Whether the right factor is stored `[n, k]`.
        transposed: bool,
    },
    /// Those of the left factor; the right one is stored `[n, k]`.
    Unpack,
    /// Those that are summed over, of one factor.
    Sums {
        /// Of the left one.
        left: bool,
    },
}

impl RoutedMatMul {
    /// `X W^T`, packed, with `W` f32 `[n, k]`.
    pub(super) const PACK_TRANSPOSED: Self = Self {
        kind: Kind::Pack { transposed: true },
    };

    /// `A^T B` with `A` packed.
    pub(super) const SUMS_OF_PACKED: Self = Self {
        kind: Kind::Sums { left: true },
    };

    /// Rows and columns of the result, and sums, when all rows are routed.
    fn shape(self, inputs: &[&Type]) -> Shape {
        let (a, b) = (inputs[0], inputs[1]);
        match self.kind {
            Kind::Pack { transposed: false } => Shape {
                m: a.rows(),
                n: b.columns(),
                k: b.rows(),
            },
            Kind::Pack { transposed: true } | Kind::Unpack => Shape {
                m: a.rows(),
                n: b.rows(),
                k: b.columns(),
            },
            Kind::Sums { .. } => Shape {
                m: a.columns(),
                n: b.columns(),
                k: a.rows(),
            },
        }
    }

    /// Whether each factor is stored transposed.
    fn stored(self) -> [bool; 2] {
        match self.kind {
            Kind::Pack { transposed } => [false, transposed],
            Kind::Unpack => [false, true],
            Kind::Sums { .. } => [true, false],
        }
    }

    /// Columns of the rows that are copied.
    fn copied(self, shape: Shape) -> usize {
        match self.kind {
            Kind::Pack { .. } => shape.k,
            Kind::Unpack | Kind::Sums { left: true } => shape.n,
            Kind::Sums { left: false } => shape.m,
        }
    }
}

impl Builder {
    /// `x W` at the routed positions, packed: f32 `[.., k]`, `[k, n]` and routes f32 `[rows]`, zero where a position takes no
    /// part, to f32 `[.., n]`, of which only the first rows, one for each routed position, mean anything. The gradient flows to
    /// `x` and `w`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn routed_matmul(&mut self, x: Value, w: Value, route: Value) -> Result<Value> {
        let right = Right {
            w,
            transposed: false,
        };
        if self.reads_through(x, right) {
            let y = self.product(x, right, None)?;
            return self.pack_rows(y, route);
        }
        let kind = Kind::Pack { transposed: false };
        self.op1(RoutedMatMul { kind }, &[x, w, route])
    }

    /// The routed rows of `x`, packed: f32 `[.., n]` and routes f32 `[rows]`, as for [`Builder::routed_matmul`].
    ///
    /// # Errors
    ///
    /// When there is not one route for each row.
    pub fn pack_rows(&mut self, x: Value, route: Value) -> Result<Value> {
        self.op1(PackRows { back: false }, &[x, route])
    }
}

/// The routed rows, packed; or packed rows where they belong, and 0 elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct PackRows {
    back: bool,
}

impl Op for PackRows {
    fn name(&self) -> &'static str {
        "pack_rows"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (x, route) = (inputs[0], inputs[1]);
        if x.dims.is_empty() || x.rows() != route.len() {
            let reason = format!("needs a route for each row, found {x} and {route}");
            return Err(BuildError::new(self.name(), reason));
        }
        Ok(vec![x.clone()])
    }

    fn accumulates(&self) -> bool {
        self.back
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        inputs[1].bytes()
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let (Some(g), false) = (gradients.of(node.outputs[0]), self.back) else {
            return Ok(());
        };
        let [x, route] = [0, 1].map(|index| node.inputs[index]);
        gradients.emit(Self { back: true }, &[g, route], &[Some(x)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::pack_rows(self.back, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::pack_rows(to);
    }
}

impl Op for RoutedMatMul {
    fn name(&self) -> &'static str {
        "routed_matmul"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (a, b, route) = (inputs[0], inputs[1], inputs[2]);
        let Shape { n, k, .. } = self.shape(inputs);
        let fits = match self.kind {
            Kind::Pack { .. } | Kind::Unpack => a.columns() == k && b.dims.len() == 2,
            Kind::Sums { .. } => b.rows() == k,
        };
        if !fits || route.len() != a.rows() || a.dims.is_empty() {
            let reason = format!("{a}, {b} and routes {route} do not fit ({:?})", self.kind);
            return Err(BuildError::new(self.name(), reason));
        }
        let mut dims = match (self.kind, a.dims.split_last()) {
            (Kind::Pack { .. } | Kind::Unpack, Some((_, rows))) => rows.to_vec(),
            _ => vec![a.columns()],
        };
        dims.push(n);
        Ok(vec![Type::f32(&dims)])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let shape = self.shape(inputs);
        let rows = inputs[2].len();
        4 * (rows + rows * self.copied(shape) + shape.most_scratch(self.stored()))
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let (Kind::Pack { transposed: false }, [x, w, route]) = (self.kind, node.inputs) else {
            return Err(BuildError::new(self.name(), "a gradient has no gradient"));
        };
        let to = |kind| Self { kind };
        gradients.emit(to(Kind::Unpack), &[g, *w, *route], &[Some(*x)])?;
        let sums = to(Kind::Sums { left: false });
        gradients.emit(sums, &[*x, g, *route], &[Some(*w)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(*self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(*self, to);
    }

    /// Of half of the rows: the mean of subsets.
    fn flops(&self, inputs: &[&Type]) -> u64 {
        let Shape { m, n, k } = self.shape(inputs);
        (m * n * k) as u64
    }
}

#[cfg(test)]
mod tests;
