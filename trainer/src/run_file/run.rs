//! A run as plain, checked values: one struct for each table of the file.
//!
//! Every default is filled in here, so that a resolved run can be printed, hashed and stored whole.
//! A run is made by reading a file, never by serde; it serialises to the tables a user would write.
//!
//! # Keys of `[checkpoint]`
//!
//! - `every`, `keep` | 1000, 2 | `save_freq` | steps between, newest kept
//!
//! # Keys of `[log]`
//!
//! - `every` | 100 | `train_log_freq` | steps between rows

use serde::Serialize;
use spd_configs::{Tracker, values::is_default, words};

use crate::component_model::{DataStream, Importance};
use crate::losses::Loss;
use crate::metrics::Eval;
use crate::run_file::{
    data::Data,
    decomposition::Decomposition,
    nontarget::Nontarget,
    target::Target,
    train::{Train, no_shards},
};

/// One run: which network is taken apart, on what data, how, and what is written down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Names the run directory `runs/<name>`; letters, digits, `.`, `_`, `-`.
    pub name: String,
    /// Keys every random number of the run.
    pub seed: u64,
    /// Arithmetic of the step.
    pub precision: Precision,
    /// The frozen network.
    pub target: Target,
    /// The source of batches.
    pub data: Data,
    /// Which matrices are decomposed, and into how many components.
    pub decomposition: Decomposition,
    /// The causal-importance functions.
    pub importance: Importance,
    /// The terms of the total loss, in the order of the file.
    #[serde(rename = "loss")]
    pub losses: Vec<Loss>,
    /// The second stream of data, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nontarget: Option<Nontarget>,
    /// The training loop of the decomposition.
    pub train: Train,
    /// Evaluation on held-out batches.
    pub eval: Eval,
    /// When states are saved, and how many stay.
    pub checkpoint: Checkpoint,
    /// When training rows are written.
    pub log: Log,
    /// Destinations of metrics; no part of a run's identity.
    #[serde(skip_serializing_if = "is_default")]
    pub tracker: Tracker,
}

words! {
    /// Arithmetic of the step.
    pub enum Precision {
        /// Everything in f32.
        F32 = "f32",
        /// GEMM operands in TF32, on a GPU alone; the rest in f32.
        Tf32 = "tf32",
        /// GEMM operands in bf16, and on a GPU stored activations; the rest in f32.
        Bf16 = "bf16",
    }
}

impl From<Precision> for spd_engine::Precision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Tf32 => Self::Tf32,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

/// When states are saved, and how many stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    /// Steps between checkpoints.
    pub every: u64,
    /// Newest checkpoints kept; at least 1.
    pub keep: usize,
}

/// When training rows are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Log {
    /// Steps between rows.
    pub every: u64,
}

/// The size of the batches of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchSize {
    /// Rows, of all ranks.
    pub(crate) rows: usize,
    /// Positions of a row, where they are not those of `[data]`.
    pub(crate) positions: Option<usize>,
}

impl Run {
    /// The streams of data of a step, each with the size of its batches and its losses.
    pub(crate) fn streams(&self) -> Vec<(DataStream, BatchSize, Vec<Loss>)> {
        let size = BatchSize {
            rows: self.train.batch_size,
            positions: None,
        };
        let target = (DataStream::Target, size, self.losses.clone());
        let nontarget = self.nontarget.iter().map(|said| {
            let size = BatchSize {
                rows: said.batch_size,
                positions: said.seq_len,
            };
            (DataStream::Nontarget, size, said.all_losses(&self.losses))
        });
        [target].into_iter().chain(nontarget).collect()
    }

    /// Why its batches, those of evaluations too, cannot be cut into so many shards, if so.
    pub fn refuses_shards(&self, shards: usize) -> Option<String> {
        let of_eval = ("eval.batch_size", self.eval.batch_size);
        let nontarget = self.nontarget.as_ref();
        let others = nontarget.map(|said| ("nontarget.batch_size", said.batch_size));
        self.train.refuses_shards(shards).or_else(|| {
            let mut others = others.into_iter().chain([of_eval]);
            others.find_map(|(key, rows)| no_shards(key, shards, rows))
        })
    }
}
