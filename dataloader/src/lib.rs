//! Token files to batches: mapped, shuffled without memory, prefetched.
//!
//! ```text
//! text --tokenize--> Dataset --Order--> Windows --fill--> Batch --Loader--> step
//! ```
//!
//! Reading order: [`tokenize()`] writes the files of `FORMAT.md`, [`Dataset`] maps them, [`Order`]
//! numbers the samples, [`Source::fill`] makes a batch, and [`Loader`] makes batches ahead of time
//! on threads of its own.
//!
//! A batch is a function of `(seed, position)`. The position, one integer that grows by the rows of
//! a batch, is the whole data state of a checkpoint. It means the same at any world size, prefetch
//! depth and number of threads.

mod batch;
mod checked_files;
mod dataset;
mod decode;
mod dtype;
mod error;
mod features;
mod hash;
mod index;
mod mapped;
mod megatron;
mod opened;
mod order;
mod plain;
mod prefetch;
mod publish;
mod reader;
mod shard;
mod tokenize;
mod tokens;
mod windows;

pub use batch::{Batch, Feed, Shard, Source};
pub use checked_files::CheckedFiles;
pub use dataset::Dataset;
pub use decode::TokenTexts;
pub use dtype::Dtype;
pub use error::DataError;
pub use features::Features;
pub use index::TokenizerId;
pub use order::{Epoch, Order};
pub use prefetch::{Ahead, Loader};
pub use tokenize::{Report, Tokenize, TokenizerChoice, Watch, tokenize};
pub use windows::{Documents, Rows, Windows};
