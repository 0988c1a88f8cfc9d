//! What ships the metrics spool, and may be slow, wrong or dead without a run noticing.
//!
//! ```text
//! RUN/metrics.jsonl, system.jsonl -> reader -> driver, one a sink -> sink: tensorboard, wandb, mlflow
//!                                              RUN/sinks/NAME.json      (what was sent)
//! ```
//!
//! Reading order: `run`, `sink`, `http`, `credentials`, `driver`, `picture`, `system_row`, then a folder for each sink, and `machine`,
//! which measures.

mod credentials;
mod http;
pub mod machine;
mod mlflow;
mod picture;
mod run;
mod sink;
mod system_row;
mod tensorboard;
//! Reading order: `run`, `sink`, `http`, `credentials`, `netrc`, `driver`, then a folder for each sink.
mod netrc;
mod wandb;
