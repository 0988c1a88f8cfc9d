//! Dimensions of an op's operands that a device may make longer with zeros, if it does so to all of
//! them alike.
//!
//! A product of bf16 matrices is several times slower on a GPU if the contiguous dimension of its
//! result, or the dimension that it sums over, is not a multiple of 8. An op that computes the same
//! numbers on longer operands, with zeros where these are longer, says so by
//! [`Op::alike`](crate::Op::alike).

use crate::cpu::shape::Shape;
use crate::value::{DType, Type};

/// An operand of an op, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// An input.
    Input(usize),
    /// A result.
    Output(usize),
}

/// A dimension of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The first one of a matrix.
    Rows,
    /// The last one.
    Columns,
}

/// Dimensions that may only be made longer together.
#[derive(Debug, Clone)]
pub struct Alike {
    /// All of them; all are equally long.
    pub(crate) dimensions: Vec<(Of, Side)>,
    /// Whether a product of the op is slow if they are no multiple of 8.
    pub(crate) of_product: bool,
}

/// Shortest side of a product that is worth a copy of an operand.
pub(crate) const LEAST: usize = 64;

impl Alike {
    /// Dimensions of an op without a product.
    pub(crate) fn of(dimensions: impl IntoIterator<Item = (Of, Side)>) -> Self {
        Self {
            dimensions: dimensions.into_iter().collect(),
            of_product: false,
        }
    }

    /// The columns of these operands of an op without a product, and no other dimensions.
    pub(crate) fn columns(operands: impl IntoIterator<Item = Of>) -> Vec<Self> {
        let columns = operands.into_iter().map(|of| (of, Side::Columns));
        vec![Self::of(columns)]
    }

    /// The columns of all matrices of the same columns, and the rows of all: for ops that treat
    /// every element alike.
    pub(crate) fn of_elements(operands: impl Iterator<Item = Of> + Clone) -> Vec<Self> {
        [Side::Rows, Side::Columns]
            .map(|side| Self::of(operands.clone().map(|of| (of, side))))
            .to_vec()
    }

    /// Dimensions along which a product sums, or those of its contiguous results.
    pub(crate) fn of_product(
        Shape { m, n, k }: Shape,
        dimensions: impl IntoIterator<Item = (Of, Side)>,
    ) -> Self {
        Self {
            of_product: m.min(n).min(k) >= LEAST,
            ..Self::of(dimensions)
        }
    }

    /// The dimensions of `Y = A W` with `W` `[k, n]`, or `[n, k]` if it is transposed: those of the
    /// sums, and those of the columns of `Y`. Empty if the factors are not bf16.
    pub(crate) fn of_rows(
        shape: Shape,
        types: [&Type; 2],
        y: &Type,
        transposed: bool,
    ) -> Vec<Self> {
        if !are_bf16(types) || types[1].dims.len() != 2 {
            return Vec::new();
        }
        let [k, n] = match transposed {
            false => [Side::Rows, Side::Columns],
            true => [Side::Columns, Side::Rows],
        };
        let sums = [(Of::Input(0), Side::Columns), (Of::Input(1), k)];
        let mut columns = Self::of_product(shape, [(Of::Input(1), n)]);
        if y.dtype == DType::Bf16 {
            columns.dimensions.push((Of::Output(0), Side::Columns));
        } else {
            // It is trimmed, at the price of a copy of all of it.
            columns.of_product = false;
        }
        vec![Self::of_product(shape, sums), columns]
    }

    /// The dimensions of `W = A^T G`: the rows of `W` and its columns, which are trimmed if `W` is
    /// f32. Empty if the factors are not bf16.
    pub(crate) fn of_sums(shape: Shape, types: [&Type; 2], w: &Type) -> Vec<Self> {
        if !are_bf16(types) {
            return Vec::new();
        }
        let of = |side: Side| (w.dtype == DType::Bf16).then_some((Of::Output(0), side));
        let rows = [(Of::Input(0), Side::Columns)].into_iter();
        let columns = [(Of::Input(1), Side::Columns)].into_iter();
        vec![
            Self::of(rows.chain(of(Side::Rows))),
            Self::of_product(shape, columns.chain(of(Side::Columns))),
        ]
    }
}

fn are_bf16(types: [&Type; 2]) -> bool {
    types.iter().all(|ty| ty.dtype == DType::Bf16)
}
