//! Sizes of tiles in `tensor_cores.cuh`, which kernels of products of bf16 tiles include.

/// f32s of shared memory for a bf16 tile: rows are padded by 16 bytes.
pub(crate) const fn room(lines: usize, columns: usize) -> usize {
    lines * (columns + 8) / 2
}
