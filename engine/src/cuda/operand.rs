//! Operands of a kernel or a product.

use crate::value::{DType, Type};

/// Location of an operand, relative to its op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    Input(usize),
    Output(usize),
    /// Bytes from the start of the op's scratch.
    Scratch(usize),
    /// Numbers of the step.
    Parameters,
}

/// An operand of a kernel, whose location is relative to its op until it has a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand<A = At> {
    pub(crate) at: A,
    pub dtype: DType,
    /// First element, and number of elements.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) written: bool,
}

impl<A> Operand<A> {
    /// `len` elements, to be read.
    pub(crate) fn new(at: A, dtype: DType, len: usize) -> Self {
        Self {
            at,
            dtype,
            first: 0,
            len,
            written: false,
        }
    }

    /// A whole value of a type, to be read.
    pub(crate) fn of(at: A, ty: &Type) -> Self {
        Self::new(at, ty.dtype, ty.len())
    }

    /// Bytes from its location to its first element.
    pub(crate) fn skipped(&self) -> usize {
        self.first * self.dtype.bytes()
    }

    /// A part of it: `len` elements from `first` on.
    pub(crate) fn part(self, first: usize, len: usize) -> Self {
        assert!(first + len <= self.len, "{first} + {len} of {}", self.len);
        Self {
            first: self.first + first,
            len,
            ..self
        }
    }

    /// The same operand, to be written.
    pub(crate) fn out(self) -> Self {
        Self {
            written: true,
            ..self
        }
    }
}
