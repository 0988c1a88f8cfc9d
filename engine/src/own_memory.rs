//! Memory of a program beside arena and store.

use crate::store::Slot;

/// Memory of a program beside arena and store.
#[derive(Debug, Default)]
pub struct OwnMemory {
    /// Bytes of inputs, and on a GPU of the numbers of the step and of two buffers in which both
    /// travel; the host then holds as many.
    pub inputs: usize,
    /// Bytes on a GPU for all-reduces.
    pub all_reduces: usize,
    /// Elements that each replay on the CPU all-reduces in memory that the ranks share.
    pub all_reduced_elements: usize,
    /// Most bytes that a CPU thread holds for its packed parts of products.
    pub packed: usize,
    /// For each bf16 product on the CPU with a frozen right factor: the matrix, whether the product
    /// reads it transposed, and the bytes of its packed form. The first replay in an arena packs
    /// it, once for all products and all programs that share the arena.
    pub packed_factors: Vec<((Slot, bool), usize)>,
}
