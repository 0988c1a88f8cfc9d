//! The operations, one folder each: shape rule, gradient rule and derivation in `mod.rs`, CPU kernel in `cpu.rs`.

mod add;
mod constant;
mod matmul;
#[cfg(test)]
pub(crate) mod oracle;
mod sum_rows;
mod transpose;

pub use add::Add;
pub use constant::Constant;
pub use matmul::MatMul;
pub use sum_rows::SumRows;
pub use transpose::Transpose;

/// Elements that are worth a chunk of their own in element-wise kernels: some 10 microseconds.
pub(crate) const GRAIN: usize = 1 << 14;

/// Rows of `columns` elements that make a chunk of [`GRAIN`] elements.
pub(crate) fn grain_rows(columns: usize) -> usize {
    (GRAIN / columns.max(1)).max(1)
}
