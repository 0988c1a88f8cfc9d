//! The ops, one folder each, in groups: shape rule, gradient rule and derivation in `mod.rs`, CPU
//! kernel in `cpu.rs`, CUDA kernels in `kernel.cu` and their launches in `cuda.rs`.
//!
//! # Adding an op
//!
//! An element-wise function, or a sum of one over all elements, is an expression ([`Expr`]): a
//! method of [`Builder`](crate::Builder) in `basic/elementwise/functions.rs`, or next to its only
//! caller, and one use in `cuda/every_op.rs`. Its gradient and its kernels follow from the
//! expression.
//!
//! For other ops, [`softmax`](crate::Builder::softmax) is the smallest example of each of these
//! files:
//!
//! - `ops/GROUP/NAME/mod.rs`: a struct of the op's settings that implements [`Op`](crate::Op), one
//!   for its gradient, and the method of [`Builder`](crate::Builder) that checks shapes and adds
//!   it. Its module doc derives the gradient. `Op` has defaults for everything but the name and the
//!   two kernels; by default the result is of the type of the first input, and there is no
//!   gradient. Names, kernels and other short answers are lines of the macro `op!` (`op.rs`).
//! - `ops/GROUP/NAME/cpu.rs`: reads and writes the views of a [`Frame`](crate::cpu::Frame). Work
//!   for several threads is cut by shape alone (`each_chunk!`), so that the bits are the same for
//!   any number of threads.
//! - `ops/GROUP/NAME/kernel.cu`, `cuda.rs`: kernels without atomics, and their launches
//!   ([`Lowering`](crate::cuda::Lowering)).
//! - `ops/GROUP/mod.rs`: one line for the module, one for its name.
//! - `cuda/every_op.rs`: one use of it, which the tests of all kernels run.
//!
//! Its tests compare value and gradient with candle's by `oracle.rs`, which runs the CUDA kernels
//! on the emulated device as well.

mod basic;
pub(crate) mod importance;
mod loss;
#[cfg(test)]
pub(crate) mod oracle;
pub(crate) mod site;
mod spectral;
mod transformer;
mod update;

use crate::cpu::pool::chunks;
pub use crate::derivation::SiteInputs;
use crate::value::Type;
pub use basic::*;
pub use importance::*;
pub use loss::*;
pub use site::*;
pub use spectral::*;
pub use transformer::*;
pub use update::*;

/// Most elements of a chunk in element-wise kernels: some 10 microseconds.
pub(crate) const GRAIN: usize = 1 << 14;

/// Elements of a chunk of so many.
pub(crate) fn grain(len: usize) -> usize {
    grain_rows(len, 1)
}

/// Rows of a chunk of a matrix. Chunks are a power of two: threads have equal shares, and the same
/// rows in all kernels, which are in their caches then.
pub(crate) fn grain_rows(rows: usize, columns: usize) -> usize {
    rows.div_ceil(most_chunks(rows, columns)).max(1)
}

/// Most chunks of a matrix of so many rows, or of fewer.
pub(crate) fn most_chunks(rows: usize, columns: usize) -> usize {
    (rows * columns).div_ceil(GRAIN).next_power_of_two()
}

/// Chunks of the rows of a matrix.
pub(crate) fn row_chunks(ty: &Type) -> usize {
    chunks(ty.rows(), grain_rows(ty.rows(), ty.columns()))
}

/// Indices, from `first` on, of those operands that are there.
pub(crate) fn indices<const N: usize>(first: usize, are_there: [bool; N]) -> [Option<usize>; N] {
    let mut next = first..;
    are_there.map(|is_there| is_there.then(|| next.next()).flatten())
}

/// Calls a block for each chunk of so many rows and columns, or of so many rows and rows of a
/// chunk, with its range of rows and its parts of the results: [`Pool::run`](crate::cpu::Pool) with
/// work that is compiled for the widest vectors of this processor.
macro_rules! each_chunk {
    (
        $frame:expr, [$rows:expr, $columns:expr], $parts:expr,
        |$range:pat_param, $part:pat_param| $work:block
    ) => {
        $crate::ops::each_chunk! {
            $frame, $rows, $crate::ops::grain_rows($rows, $columns), $parts, |$range, $part| $work
        }
    };
    (
        $frame:expr, $rows:expr, $chunk_rows:expr, $parts:expr,
        |$range:pat_param, $part:pat_param| $work:block
    ) => {
        $frame
            .pool
            .run($rows, $chunk_rows, $parts, |$range, $part| {
                $crate::cpu::math::vectorised(
                    #[inline(always)]
                    || $work,
                );
            })
    };
}
pub(crate) use each_chunk;

#[cfg(test)]
mod tests {
    use super::*;

    // By hand.
    #[test]
    fn chunks_are_a_power_of_two_and_no_longer_than_the_grain() {
        for ((rows, columns), expected) in [
            ((4096, 5), 2048),
            ((4096, 20), 512),
            ((2048, 400), 32),
            ((100, 3), 100),
            ((3, 1 << 20), 1),
            ((0, 7), 1),
        ] {
            assert_eq!(grain_rows(rows, columns), expected, "{rows} {columns}");
        }
    }
}
