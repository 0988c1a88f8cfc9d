//! The behaviour of each component of a decomposition over a dataset: how often it is active, on
//! which tokens, with which others, and in which text.
//!
//! ```text
//! importances of a batch -> Part -> Counts -> harvest.safetensors -> tables in parquet,
//!                                                                  lines for the page
//! ```
//!
//! [`Counts`] are integers, and sets of examples that a draw decides: two of them
//! [add up](Counts::add) to the same bytes in whatever order. So a harvest is cut into parts, which
//! any number of ranks make; a killed harvest keeps the parts that it has saved; and harvests of
//! several datasets are merged. `FORMAT.md` has the files.
//!
//! This crate knows no tensors beyond slices: the trainer measures, and hands batches over.

mod attributions;
mod counts;
mod examples;
mod lines;
mod parquet_file;
mod part;
mod setup;
mod sparse;
mod state;
mod tables;
#[cfg(test)]
mod tests;

pub use attributions::{Attribution, LOGITS, Source, write_attributions};
pub use counts::{Counts, OfSite};
pub use examples::{AROUND, Example};
pub use lines::write_lines;
pub use part::{LIKELY, Part, Text};
pub use setup::{Setup, Site};
pub use state::{FORMAT, StateError, load, save};
pub use tables::{Datasets, Removal, write_tables};
