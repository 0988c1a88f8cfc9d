//! Operands of a kernel or a product, relative to their op.

use crate::value::DType;

/// Location of an operand, relative to its op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Input(usize),
    Output(usize),
    /// Bytes from the start of the op's scratch.
    Scratch(usize),
    /// Numbers of the step.
    Parameters,
}

/// An operand of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    pub(crate) at: At,
    pub dtype: DType,
    /// First element, and number of elements.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) written: bool,
}

impl Operand {
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
