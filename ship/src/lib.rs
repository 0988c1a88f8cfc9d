//! Ships the metrics spool to trackers, which may be slow, wrong or dead without an effect on the
//! run.
//!
//! ```text
//! RUN/metrics.jsonl, system.jsonl -> reader -> driver -> sink: tensorboard, wandb, mlflow
//!                                              RUN/sinks/NAME.json      (the rows that were sent)
//! ```
//!
//! Reading order: `run`, `sink`, `http`, `credentials`, `netrc`, `cursor`, `feed`,
//! `driver`, `trackers`, `shipper`, `picture`, `messages`, `system_row`, then a folder for each
//! tracker, and `machine`, which measures.

mod credentials;
mod cursor;
mod driver;
mod feed;
mod http;
pub mod machine;
mod messages;
mod mlflow;
mod netrc;
mod picture;
mod run;
mod shipper;
mod sink;
mod system_row;
mod tensorboard;
mod trackers;
mod wandb;

pub use run::About;
pub use shipper::{Shipper, Told};
pub use wandb::offline::{ExportError, Exported, export};
