//! An operand of a kernel or a product, seen from its op.

use crate::value::DType;

/// Where an operand lies, seen from its op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Input(usize),
    Output(usize),
    /// Bytes from the start of the op's scratch.
    Scratch(usize),
    /// The numbers of the step.
    Parameters,
}

/// An operand of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Operand {
    pub(crate) at: At,
    pub(crate) dtype: DType,
    /// First element that is meant, and how many.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) written: bool,
}

impl Operand {
    /// `len` of its elements, from `first` on.
    pub(crate) fn part(self, first: usize, len: usize) -> Self {
        assert!(first + len <= self.len, "{first} + {len} of {}", self.len);
        Self {
            first: self.first + first,
            len,
            ..self
        }
    }

    /// The same, to be written to.
    pub(crate) fn out(self) -> Self {
        Self {
            written: true,
            ..self
        }
    }
}
