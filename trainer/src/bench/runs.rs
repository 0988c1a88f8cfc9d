//! The run file of a workload, `workloads/NAME.toml`; its data and weights are never opened.

use crate::networks::{Kaufmann, Model, Spectral};
use crate::run_file::{Data, Run};

/// The timed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The step of the run.
    Training,
    /// A masked pass with given masks, the mean of its logits, backward, and the components'
    /// update.
    GivenMasks {
        /// Tokens are drawn from the first so many.
        tokens: usize,
    },
    /// Forward and backward pass and update of the network itself, without a decomposition.
    Network,
}

macro_rules! workload {
    ($name:literal) => {
        include_str!(concat!("workloads/", $name, ".toml"))
    };
}

/// The run of a name and what of it is timed; `None` when there is no such workload.
pub(super) fn run(name: &str) -> Option<(Run, Step)> {
    let given = |tokens| Step::GivenMasks { tokens };
    // With the shape of a batch, where it is not that of the file.
    let (text, batch, step) = match name {
        "seed-16x128" => (workload!("seed"), Some((16, 128)), given(1000)),
        "seed-32x256" => (workload!("seed"), Some((32, 256)), given(1000)),
        "seed-64x256" => (workload!("seed"), None, given(1000)),
        "seed-128x256" => (workload!("seed"), Some((128, 256)), given(1000)),
        "tiny-seed" => (workload!("tiny-seed"), None, given(40)),
        "full-ss-llama" | "full-ss-llama-32x512" => {
            (workload!("full-ss-llama"), None, Step::Training)
        }
        "full-ss-llama-64x512" => (workload!("full-ss-llama"), Some((64, 512)), Step::Training),
        "tiny-ss-llama" => (workload!("tiny-ss-llama"), None, Step::Training),
        "tms_5-2" => (workload!("tms_5-2"), None, Step::Training),
        "tms_5-2-id" => (workload!("tms_5-2-id"), None, Step::Training),
        "tms_40-10" => (workload!("tms_40-10"), None, Step::Training),
        "resid_mlp1" => (workload!("resid_mlp1"), None, Step::Training),
        "resid_mlp2" => (workload!("resid_mlp2"), None, Step::Training),
        "tiny-resid" => (workload!("tiny-resid"), None, Step::Training),
        "tiny-pgd" => (workload!("tiny-pgd"), None, Step::Training),
        "tiny-tms" => (workload!("tiny-tms"), None, Step::Training),
        "full-gpt2-h1" => (workload!("full-gpt2-h1"), None, Step::Training),
        "tiny-gpt2-h1" => (workload!("tiny-gpt2-h1"), None, Step::Training),
        "sd-2x64" => (workload!("sd"), None, Step::Network),
        "sd-1x128" => (workload!("sd"), Some((1, 128)), Step::Network),
        "kaufmann-2x64" => (workload!("kaufmann"), None, Step::Network),
        "kaufmann-1x128" => (workload!("kaufmann"), Some((1, 128)), Step::Network),
        "byte-4x64" => (workload!("byte"), None, Step::Network),
        "byte-spectral-4x64" => (workload!("byte-spectral"), None, Step::Network),
        "byte-loop-4x64" => (workload!("byte-loop"), None, Step::Network),
        "byte-traditional-4x64" => (workload!("byte-traditional"), None, Step::Network),
        _ => return None,
    };
    let mut run = Run::from_resolved(text).expect("a run file of ours");
    name.clone_into(&mut run.name);
    if let Some((rows, positions)) = batch {
        (run.train.batch_size, run.eval.batch_size) = (rows, rows);
        *length(&mut run).expect("rows of these workloads are sequences") = positions;
    }
    if step != Step::Training {
        run.losses.clear();
    }
    Some((run, step))
}

/// Positions of a row, where rows are sequences.
pub(super) fn length(run: &mut Run) -> Option<&mut usize> {
    match (&mut run.data, &mut run.target.model) {
        (Data::Tokens { seq_len, .. }, _) => Some(seq_len),
        (_, Model::Spectral(Spectral { positions, .. })) => Some(positions),
        (_, Model::Kaufmann(Kaufmann { positions, .. })) => Some(positions),
        _ => None,
    }
}
