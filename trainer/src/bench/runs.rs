//! The run file of a workload, `workloads/NAME.toml`; its data and weights are never opened.

use super::parts::{Part, WIDTH};
use crate::networks::{Custom, Encoder, Kaufmann, Mixing, Model, Spectral};
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
    /// Forward and backward pass and update of a network itself, or of a part of one, without a
    /// decomposition.
    Network(Part),
}

macro_rules! workload {
    ($name:literal) => {
        include_str!(concat!("workloads/", $name, ".toml"))
    };
}

/// The run of a kind of workload, at the size of its file, and what of it is timed; `None` when
/// there is no such kind.
pub(super) fn run(kind: &str) -> Option<(Run, Step)> {
    let given = |tokens| Step::GivenMasks { tokens };
    let network = Step::Network(Part::Whole);
    let part = Step::Network;
    let (text, step) = match kind {
        "seed" => (workload!("seed"), given(1000)),
        "tiny-seed" => (workload!("tiny-seed"), given(40)),
        "full-ss-llama" => (workload!("full-ss-llama"), Step::Training),
        "tiny-ss-llama" => (workload!("tiny-ss-llama"), Step::Training),
        "tms_5-2" => (workload!("tms_5-2"), Step::Training),
        "tms_5-2-id" => (workload!("tms_5-2-id"), Step::Training),
        "tms_40-10" => (workload!("tms_40-10"), Step::Training),
        "resid_mlp1" => (workload!("resid_mlp1"), Step::Training),
        "resid_mlp2" => (workload!("resid_mlp2"), Step::Training),
        "tiny-resid" => (workload!("tiny-resid"), Step::Training),
        "tiny-pgd" => (workload!("tiny-pgd"), Step::Training),
        "tiny-tms" => (workload!("tiny-tms"), Step::Training),
        "full-gpt2-h1" => (workload!("full-gpt2-h1"), Step::Training),
        "tiny-gpt2-h1" => (workload!("tiny-gpt2-h1"), Step::Training),
        "sd" => (workload!("sd"), network),
        "sd-plain" => (workload!("sd"), part(Part::Plain)),
        "kaufmann" => (workload!("kaufmann"), network),
        "kaufmann-plain" => (workload!("kaufmann"), part(Part::Plain)),
        "kaufmann-tail" => (workload!("kaufmann"), part(Part::TailFused)),
        "byte" => (workload!("byte"), network),
        "byte-spectral" => (workload!("byte-spectral"), network),
        "byte-loop" => (workload!("byte-loop"), network),
        "byte-traditional" => (workload!("byte-traditional"), network),
        "encoder" => (workload!("byte-loop"), part(Part::Encoder(Encoder::Loop))),
        "encoder-causal" => (
            workload!("byte-spectral"),
            part(Part::Encoder(Encoder::Causal)),
        ),
        "mixing" => (workload!("part"), part(Part::Mixing(Mixing::Causal))),
        "mixing-circular" => (workload!("part"), part(Part::Mixing(Mixing::Circular))),
        "attention" => (workload!("part"), part(Part::Attention)),
        _ => return None,
    };
    let mut run = Run::from_resolved(text).expect("a run file of ours");
    if step != Step::Training {
        run.losses.clear();
    }
    Some((run, step))
}

/// Positions of a row, where rows are sequences.
pub(super) fn length(run: &Run) -> Option<usize> {
    match (&run.data, &run.target.model) {
        (Data::Tokens { seq_len, .. }, _) => Some(*seq_len),
        (_, Model::Spectral(Spectral { positions, .. })) => Some(*positions),
        (_, Model::Kaufmann(Kaufmann { positions, .. })) => Some(*positions),
        (_, Model::Custom(custom)) => custom.n_features.map(|features| features / WIDTH),
        _ => None,
    }
}

/// Changes the positions of a row, where rows are sequences.
pub(super) fn set_length(run: &mut Run, to: usize) {
    match (&mut run.data, &mut run.target.model) {
        (Data::Tokens { seq_len, .. }, _) => *seq_len = to,
        (_, Model::Spectral(Spectral { positions, .. })) => *positions = to,
        (_, Model::Kaufmann(Kaufmann { positions, .. })) => *positions = to,
        (_, Model::Custom(Custom { n_features, .. })) => *n_features = Some(to * WIDTH),
        _ => {}
    }
}
