//! Steps of a replay, on operands that have places.

use super::kernel::{Kernel, Writer};
use super::lowering::FIRST_SCALAR;
use super::operand::Operand;
use super::product::{Algorithm, Key, Product};
use crate::store::Slot;

/// Words of the numbers of a step, which follow the inputs.
pub(crate) fn numbers(scalars: usize) -> usize {
    FIRST_SCALAR + scalars
}

/// A frozen tensor in bf16, of so many rows and columns: there are zeros behind its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rounded {
    pub(crate) slot: Slot,
    pub(crate) dims: [usize; 2],
}

/// Memory that an operand lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Bytes from the start of the arena.
    Arena(usize),
    Store(Slot),
    Rounded(Rounded),
    /// Bytes from the start of what the program is given: inputs, then the numbers of the step.
    Given(usize),
}

/// An operand with its place.
pub(crate) type Placed = Operand<Memory>;

impl Placed {
    /// Its tensor of the store, if it is in the store.
    pub(crate) fn slot(&self) -> Option<Slot> {
        match self.at {
            Memory::Store(slot) | Memory::Rounded(Rounded { slot, .. }) => Some(slot),
            Memory::Arena(_) | Memory::Given(_) => None,
        }
    }
}

/// A step of a replay.
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

/// A product whose operands have places.
#[derive(Debug, Clone)]
pub struct PlacedProduct {
    /// The product, on operands of its op.
    pub product: Product,
    /// Whether f32 factors are rounded to TF32.
    pub tf32: bool,
    /// Algorithm of cublasLt, once chosen; otherwise cublasLt's first choice.
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) a: Placed,
    pub(crate) b: Placed,
    pub(crate) out: Placed,
    pub(crate) bias: Option<Placed>,
}

impl PlacedProduct {
    /// Everything that the choice of an algorithm depends on.
    pub(crate) fn key(&self) -> Key {
        self.product.key(self.product.alignment(), self.tf32)
    }

    /// Kernel and launch that compute it, if it is one of ours.
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
