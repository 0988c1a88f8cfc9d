//! What a replay does, step by step, on operands that have places.

use std::ops::Range;

use super::kernel::{Kernel, Writer};
use super::product::{Algorithm, Key, Product};
use crate::profile::OpProfile;
use crate::store::Slot;
use crate::value::DType;

/// Numbers of the step before its scalars: seed (low, high), step, first row.
pub(crate) const FIXED_PARAMETERS: usize = 4;

/// Where an operand lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Bytes from the start of the arena.
    Arena(usize),
    Store(Slot),
    Parameters,
}

/// An operand in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) memory: Memory,
    pub(crate) dtype: DType,
    /// First element, and how many there are.
    pub(crate) first: usize,
    pub(crate) len: usize,
    pub(crate) written: bool,
}

impl Placed {
    /// Bytes from where its memory starts to its first element.
    pub(crate) fn skipped(&self) -> usize {
        self.first * self.dtype.bytes()
    }

    /// The tensor of the store that it is.
    pub(crate) fn slot(&self) -> Option<Slot> {
        match self.memory {
            Memory::Store(slot) => Some(slot),
            Memory::Arena(_) | Memory::Parameters => None,
        }
    }

    /// Bytes from the start of the arena, in which it lies.
    pub(crate) fn offset(&self) -> usize {
        match self.memory {
            Memory::Arena(offset) => offset + self.skipped(),
            Memory::Store(_) | Memory::Parameters => unreachable!("it lies in the arena"),
        }
    }
}

/// What a replay does, in order.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Launch {
        kernel: usize,
        blocks: [usize; 2],
        operands: Vec<Placed>,
        words: Vec<u32>,
    },
    Product(Box<PlacedProduct>),
    Copy {
        from: Placed,
        to: Placed,
    },
}

impl Step {
    /// All operands.
    pub(super) fn operands(&self) -> Vec<Placed> {
        match self {
            Self::Launch { operands, .. } => operands.clone(),
            Self::Copy { from, to } => vec![*from, *to],
            Self::Product(placed) => [placed.a, placed.b, placed.out]
                .into_iter()
                .chain(placed.bias)
                .collect(),
        }
    }
}

/// A product in its place.
#[derive(Debug, Clone)]
pub(crate) struct PlacedProduct {
    pub(crate) product: Product,
    /// Whether factors in f32 are rounded to TF32.
    pub(crate) tf32: bool,
    /// How cublasLt computes it, where that was decided; otherwise as it thinks best.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) a: Placed,
    pub(crate) b: Placed,
    pub(crate) out: Placed,
    pub(crate) bias: Option<Placed>,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// By an algorithm of cublasLt, or the one that it thinks best.
    CublasLt(Option<Algorithm>),
    /// By a kernel of our own.
    Own,
}

impl PlacedProduct {
    /// Everything that the choice of an algorithm depends on.
    pub(crate) fn key(&self) -> Key {
        self.product.key(self.product.alignment(), self.tf32)
    }

    /// Its kernel and its launch, where it is one of our own.
    pub(crate) fn alone(&self) -> (Vec<Kernel>, Step) {
        let mut writer = Writer::default();
        let step = self.launched(&mut writer);
        (writer.kernels, step)
    }

    pub(super) fn launched(&self, writer: &mut Writer) -> Step {
        let launch = self.product.launch();
        let (a, b, out) = (self.a, self.b, self.out);
        Step::Launch {
            kernel: writer.kernel(&launch),
            blocks: launch.blocks,
            operands: [a, b].into_iter().chain(self.bias).chain([out]).collect(),
            words: launch.words,
        }
    }
}

/// An op of a program.
#[derive(Debug)]
pub(crate) struct PlacedOp {
    /// Its work, and no time.
    pub(crate) work: OpProfile,
    pub(crate) part: &'static str,
    /// Of the program's steps.
    pub(crate) steps: Range<usize>,
}
