//! The run files of workloads, in `workloads`, and what is replaced in them as by `--set`; their
//! data and weights are never opened.

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

/// A toy model of superposition, taken apart with tied components.
const TMS: &str = include_str!("workloads/tms_5-2.toml");

/// The same with an identity layer inside.
const WITH_IDENTITY: &[&str] = &[
    "target.n_hidden_layers=1",
    "decomposition.sites=[{ pattern = 'linear1', C = 20 }, { pattern = 'linear2', C = 20 }, { pattern = 'hidden_layers.0', C = 20 }]",
];

/// The same, eight times as wide.
const WIDE: &[&str] = &[
    "target.n_features=40",
    "target.n_hidden=10",
    "decomposition.sites.linear1.C=200",
    "decomposition.sites.linear2.C=200",
    "loss.importance_minimality.coeff=1e-4",
    "loss.importance_minimality.p=2.0",
];

/// The smallest of all.
const TINY_TMS: &[&str] = &[
    "decomposition.sites.linear1.C=8",
    "decomposition.sites.linear2.C=8",
    "importance.hidden=[4]",
    "train.batch_size=64",
];

/// A residual MLP of two layers, its importance functions one MLP a site, with an adversary whose
/// source all positions share.
const RESID_MLP: &str = include_str!("workloads/resid_mlp2.toml");

/// One of one layer.
const ONE_LAYER: &[&str] = &[
    "target.d_mlp=50",
    "target.n_layer=1",
    "decomposition.sites.0.C=100",
    "decomposition.sites.1.C=100",
    "importance={ kind = 'mlp', hidden = [16] }",
    "loss=[{ kind = 'importance_minimality', coeff = 1e-5, p = 2.0 }, \
     { kind = 'stochastic_recon_layerwise', coeff = 1.0 }, { kind = 'stochastic_recon', coeff = 1.0 }]",
    "train.lr=2e-3",
];

/// The one of two layers, small.
const TINY_RESID: &[&str] = &[
    "target.n_features=10",
    "target.d_embed=20",
    "target.d_mlp=5",
    "data.probability=0.1",
    "decomposition.sites.0.C=12",
    "decomposition.sites.1.C=12",
    "importance.hidden=[8]",
    "train.batch_size=64",
];

/// Every matrix of a Llama, routed in subsets.
const LLAMA: &str = include_str!("workloads/full-ss-llama.toml");

/// The same, small.
const TINY_LLAMA: &[&str] = &[
    "target.vocab=50",
    "target.n_ctx=16",
    "target.d_model=32",
    "target.n_layer=2",
    "target.d_mlp=40",
    "data.seq_len=16",
    "decomposition.sites.0.C=12",
    "decomposition.sites.1.C=12",
    "decomposition.sites.2.C=12",
    "decomposition.sites.3.C=12",
    "decomposition.sites.4.C=12",
    "decomposition.sites.5.C=12",
    "decomposition.sites.6.C=12",
    "importance.hidden=[24]",
    "train.batch_size=4",
];

/// With an adversary of four steps.
const PGD: &[&str] = &[
    "loss=[{ kind = 'importance_minimality', coeff = 1e-3, p = 2.0, p_final = 0.3 }, \
     { kind = 'stochastic_recon_subset', coeff = 0.5 }, \
     { kind = 'pgd_recon_subset', coeff = 0.5, steps = 4, step_size = 0.5, scope = 'shared_across_batch' }, \
     { kind = 'faithfulness', coeff = 1e6 }]",
    "train.clip_components=0.01",
];

/// With given masks: the loss and the importance functions are in no program.
const SEED: &[&str] = &[
    "importance.hidden=[1]",
    "loss=[{ kind = 'stochastic_recon_subset', coeff = 1.0 }]",
    "train.lr=1e-4",
];

/// The batches of the large one with given masks.
const SEED_BATCHES: &[&str] = &["data.seq_len=256", "train.batch_size=64"];

/// One matrix of a GPT-2, layerwise.
const GPT2: &str = include_str!("workloads/full-gpt2-h1.toml");

/// The same, small.
const TINY_GPT2: &[&str] = &[
    "target.vocab=50",
    "target.n_ctx=16",
    "target.d_model=16",
    "target.n_layer=2",
    "target.n_head=2",
    "data.seq_len=16",
    "decomposition.sites.0.C=12",
    "importance.hidden=[5]",
];

/// The causal byte-spectral model with a causal encoder, at the published size.
const BYTE: &str = include_str!("workloads/byte-spectral.toml");

/// The same with a table of bytes.
const OF_TABLE: &[&str] = &["target.encoder=embedding"];

/// The published byte-spectral model, which is LEAKY.
const LOOP: &[&str] = &[
    "target.encoder=loop",
    "target.mixing=circular",
    "target.allow_leak=true",
];

/// The published transformer on bytes.
const TRADITIONAL: &[&str] = &[
    "target.kind=byte_traditional",
    "target.n_head=8",
    "decomposition.sites.0.pattern=layers.*.linear*",
];

/// A part of a byte model that reads vectors, 256 wide.
const PART: &str = include_str!("workloads/part.toml");

/// The published spectral decomposition.
const SPECTRAL: &[&str] = &[
    "target={ kind = 'spectral', positions = 64, d_coords = 64, n_basis = 32, weights = 'none' }",
    "train.batch_size=2",
];

/// The published Kaufmann attention.
const KAUFMANN: &[&str] = &[
    "target={ kind = 'kaufmann', positions = 64, d_model = 512, n_head = 8, d_coords = 64, weights = 'none' }",
    "train.batch_size=2",
];

/// The run of a kind of workload, at the size of its file, and what of it is timed; `None` when
/// there is no such kind.
pub(super) fn run(kind: &str) -> Option<(Run, Step)> {
    let given = |tokens| Step::GivenMasks { tokens };
    let training = Step::Training;
    let network = Step::Network(Part::Whole);
    let part = Step::Network;
    let (text, set, step): (&str, &[&[&str]], Step) = match kind {
        "seed" => (LLAMA, &[SEED, SEED_BATCHES], given(1000)),
        "tiny-seed" => (LLAMA, &[TINY_LLAMA, SEED], given(40)),
        "full-ss-llama" => (LLAMA, &[], training),
        "tiny-ss-llama" => (LLAMA, &[TINY_LLAMA], training),
        "tms_5-2" => (TMS, &[], training),
        "tms_5-2-id" => (TMS, &[WITH_IDENTITY], training),
        "tms_40-10" => (TMS, &[WIDE], training),
        "resid_mlp1" => (RESID_MLP, &[ONE_LAYER], training),
        "resid_mlp2" => (RESID_MLP, &[], training),
        "tiny-resid" => (RESID_MLP, &[TINY_RESID], training),
        "tiny-pgd" => (LLAMA, &[TINY_LLAMA, PGD], training),
        "tiny-tms" => (TMS, &[TINY_TMS], training),
        "full-gpt2-h1" => (GPT2, &[], training),
        "tiny-gpt2-h1" => (GPT2, &[TINY_GPT2], training),
        "sd" => (PART, &[SPECTRAL], network),
        "sd-plain" => (PART, &[SPECTRAL], part(Part::Plain)),
        "kaufmann" => (PART, &[KAUFMANN], network),
        "kaufmann-plain" => (PART, &[KAUFMANN], part(Part::Plain)),
        "kaufmann-tail" => (PART, &[KAUFMANN], part(Part::TailFused)),
        "byte" => (BYTE, &[OF_TABLE], network),
        "byte-spectral" => (BYTE, &[], network),
        "byte-loop" => (BYTE, &[LOOP], network),
        "byte-traditional" => (BYTE, &[TRADITIONAL], network),
        "encoder" => (BYTE, &[LOOP], part(Part::Encoder(Encoder::Loop))),
        "encoder-causal" => (BYTE, &[], part(Part::Encoder(Encoder::Causal))),
        "mixing" => (PART, &[], part(Part::Mixing(Mixing::Causal))),
        "mixing-circular" => (PART, &[], part(Part::Mixing(Mixing::Circular))),
        "attention" => (PART, &[], part(Part::Attention)),
        _ => return None,
    };
    let set: Vec<String> = set.concat().into_iter().map(str::to_owned).collect();
    let mut run = Run::from_text(text, &set).expect("a run file of ours");
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
