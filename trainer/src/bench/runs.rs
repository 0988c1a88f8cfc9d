//! What the run file of a workload would say, without data or a trained target.

use std::path::PathBuf;

use spd_configs::{
    Activation, Active, Checkpoint, Data, Decomposition, Eval, FaithfulnessWarmup, Importance,
    ImportanceKind, Llama, Log, Loss, Model, OutputLoss, Pgd, PgdInit, PgdScope, Precision,
    Routing, Run, Sampling, Schedule, Shape, Sigmoid, SitePattern, Target, Term, TiedUpdate, Train,
};

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The step of the run.
    Training,
    /// A masked pass with given masks, the mean of its logits, backward, and the components' update.
    GivenMasks {
        /// Tokens are drawn from the first so many.
        tokens: usize,
    },
}

/// Steps of the run whose middle is timed.
const STEPS: u64 = 10_000;

/// The run of a name and what of it is timed; `None` when there is no such workload.
pub(super) fn run(name: &str) -> Option<(Run, Step)> {
    let gpt2 = |vocab, n_ctx, d_model, (n_layer, n_head)| Model::Gpt2 {
        vocab,
        n_ctx,
        d_model,
        n_layer,
        n_head,
        d_mlp: 4 * d_model,
    };
    let llama = |vocab, d_model, (n_layer, n_head), d_mlp, n_ctx| {
        Model::LlamaSimple(Llama {
            vocab,
            n_ctx,
            d_model,
            n_layer,
            n_head,
            n_kv_head: 2,
            d_mlp,
        })
    };
    let small = llama(4019, 128, (4, 4), 341, 512);
    let tiny = llama(50, 32, (2, 4), 40, 16);
    let given = |tokens| Step::GivenMasks { tokens };
    let run = match name {
        "seed-16x128" => return Some((seed(name, small, (16, 128), 1200), given(1000))),
        "seed-32x256" => return Some((seed(name, small, (32, 256), 1200), given(1000))),
        "seed-64x256" => return Some((seed(name, small, (64, 256), 1200), given(1000))),
        "seed-128x256" => return Some((seed(name, small, (128, 256), 1200), given(1000))),
        "tiny-seed" => return Some((seed(name, tiny, (4, 16), 12), given(40))),
        "full-ss-llama" | "full-ss-llama-32x512" => ss_llama(name, small, (32, 512), (1200, 1000)),
        "full-ss-llama-64x512" => ss_llama(name, small, (64, 512), (1200, 1000)),
        "tiny-ss-llama" => ss_llama(name, tiny, (4, 16), (12, 24)),
        "tms_5-2" => tms(name, (5, 2, 0), 4096, (20, 16), (3e-3, 1.0)),
        "tms_5-2-id" => tms(name, (5, 2, 1), 4096, (20, 16), (3e-3, 1.0)),
        "tms_40-10" => tms(name, (40, 10, 0), 4096, (200, 16), (1e-4, 2.0)),
        "resid_mlp1" => {
            let losses = vec![
                minimality(1e-5, 2.0, None),
                stochastic(1.0, Routing::Layerwise),
                stochastic(1.0, Routing::All),
            ];
            let mut run = resid_mlp(name, (100, 1000, 50, 1), (2048, 2e-3), (100, 16), losses);
            run.importance.kind = ImportanceKind::Mlp;
            run
        }
        "resid_mlp2" => {
            let losses = adversarial((1e-4, None), 2.0, (1, 1.0), 0.0);
            resid_mlp(name, (100, 1000, 25, 2), (2048, 3e-4), (400, 256), losses)
        }
        "tiny-resid" => {
            let losses = adversarial((1e-4, None), 2.0, (1, 1.0), 0.0);
            let mut run = resid_mlp(name, (10, 20, 5, 2), (64, 3e-4), (12, 8), losses);
            run.data = sparse(0.1, -1.0);
            run
        }
        "tiny-pgd" => {
            let mut run = ss_llama(name, tiny, (4, 16), (12, 24));
            run.losses = adversarial((1e-3, Some(0.3)), 0.5, (4, 0.5), 1e6);
            run.train.clip_components = Some(0.01);
            run
        }
        "tiny-tms" => tms(name, (5, 2, 0), 64, (8, 4), (3e-3, 1.0)),
        "full-gpt2-h1" => {
            let model = gpt2(50_257, 1024, 768, (12, 12));
            gpt2_h1(name, model, (2, 1024), (768, 12))
        }
        "tiny-gpt2-h1" => gpt2_h1(name, gpt2(50, 16, 16, (2, 2)), (2, 16), (12, 5)),
        _ => return None,
    };
    Some((run, Step::Training))
}

/// A toy model of superposition, taken apart with tied components.
fn tms(
    name: &str,
    (n_features, n_hidden, n_hidden_layers): (usize, usize, usize),
    rows: usize,
    (components, hidden): (usize, usize),
    (coeff, p): (f64, f64),
) -> Run {
    let model = Model::Tms {
        n_features,
        n_hidden,
        n_hidden_layers,
        zero_bias: true,
    };
    let losses = vec![
        minimality(coeff, p, None),
        stochastic(1.0, Routing::All),
        stochastic(1.0, Routing::Layerwise),
    ];
    let mut run = base(name, model, sparse(0.05, 0.0), (rows, 1e-3), losses);
    let hidden_layers = (0..n_hidden_layers).map(|layer| format!("hidden_layers.{layer}"));
    run.decomposition.sites = ["linear1", "linear2"]
        .map(str::to_owned)
        .into_iter()
        .chain(hidden_layers)
        .map(|pattern| SitePattern {
            pattern,
            components,
        })
        .collect();
    run.decomposition.tied = true;
    run.importance.kind = ImportanceKind::Mlp;
    run.importance.hidden = vec![hidden];
    run.train.output_loss = OutputLoss::Mse;
    run
}

/// A residual MLP, its importance functions one MLP a site.
fn resid_mlp(
    name: &str,
    (n_features, d_embed, d_mlp, n_layer): (usize, usize, usize, usize),
    (rows, lr): (usize, f64),
    (components, hidden): (usize, usize),
    losses: Vec<Loss>,
) -> Run {
    let model = Model::ResidMlp {
        n_features,
        d_embed,
        d_mlp,
        n_layer,
        activation: Activation::Relu,
        in_bias: false,
        out_bias: false,
    };
    let mut run = base(name, model, sparse(0.01, -1.0), (rows, lr), losses);
    run.decomposition.sites = ["layers.*.mlp_in", "layers.*.mlp_out"]
        .map(|pattern| SitePattern {
            pattern: pattern.to_owned(),
            components,
        })
        .to_vec();
    run.importance.kind = ImportanceKind::SharedMlp;
    run.importance.hidden = vec![hidden];
    run.train.output_loss = OutputLoss::Mse;
    run
}

/// Features on with a probability, uniform between `low` and 1.
fn sparse(probability: f64, low: f64) -> Data {
    Data::SparseFeatures {
        active: Active::ByChance {
            probability,
            synced_inputs: Vec::new(),
        },
        low,
        high: 1.0,
    }
}

/// One matrix of a GPT-2, layerwise.
fn gpt2_h1(
    name: &str,
    model: Model,
    (rows, seq_len): (usize, usize),
    (components, hidden): (usize, usize),
) -> Run {
    let losses = vec![
        minimality(3e-4, 2.0, Some(0.3)),
        stochastic(2.0, Routing::Layerwise),
    ];
    let mut run = base(name, model, tokens(seq_len), (rows, 3e-4), losses);
    run.decomposition.sites = vec![SitePattern {
        pattern: "transformer.h.1.attn.c_attn".to_owned(),
        components,
    }];
    run.importance.hidden = vec![hidden];
    run
}

/// Every matrix of a Llama, routed in subsets.
fn ss_llama(
    name: &str,
    model: Model,
    (rows, seq_len): (usize, usize),
    (components, hidden): (usize, usize),
) -> Run {
    let losses = vec![
        minimality(2e-3, 2.0, Some(0.3)),
        stochastic(1.0, Routing::UniformK),
    ];
    let mut run = base(name, model, tokens(seq_len), (rows, 2e-4), losses);
    run.decomposition.sites = llama_sites(components);
    run.importance.kind = ImportanceKind::SharedMlp;
    run.importance.hidden = vec![hidden];
    run
}

/// Every matrix of a Llama, its masks given. The importance functions are in no program, and of no size.
fn seed(name: &str, model: Model, (rows, seq_len): (usize, usize), components: usize) -> Run {
    let mut run = base(name, model, tokens(seq_len), (rows, 1e-4), Vec::new());
    run.decomposition.sites = llama_sites(components);
    run.importance.kind = ImportanceKind::SharedMlp;
    run.importance.hidden = vec![1];
    run
}

fn llama_sites(components: usize) -> Vec<SitePattern> {
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("h.*.mlp.{name}"));
    let attention = ["q", "k", "v", "o"].map(|name| format!("h.*.attn.{name}_proj"));
    let patterns = mlp.into_iter().chain(attention);
    patterns
        .map(|pattern| SitePattern {
            pattern,
            components,
        })
        .collect()
}

fn tokens(seq_len: usize) -> Data {
    Data::Tokens {
        train: PathBuf::new(),
        eval: PathBuf::new(),
        seq_len,
        make: None,
    }
}

fn minimality(coeff: f64, p: f64, p_final: Option<f64>) -> Loss {
    let term = Term::ImportanceMinimality {
        p,
        p_final,
        anneal_start: 0.0,
        anneal_end: 1.0,
        beta: 0.0,
    };
    Loss { coeff, term }
}

/// Subsets of the sites, masked by chance and by an adversary whose source all positions share.
fn adversarial(
    (minimality_coeff, p_final): (f64, Option<f64>),
    coeff: f64,
    (steps, step_size): (usize, f64),
    faithfulness_coeff: f64,
) -> Vec<Loss> {
    let adversary = Pgd {
        routing: Routing::UniformK,
        init: PgdInit::Random,
        steps,
        step_size,
        scope: PgdScope::SharedAcrossBatch,
    };
    vec![
        minimality(minimality_coeff, 2.0, p_final),
        stochastic(coeff, Routing::UniformK),
        Loss {
            coeff,
            term: Term::PgdRecon(adversary),
        },
        Loss {
            coeff: faithfulness_coeff,
            term: Term::Faithfulness,
        },
    ]
}

fn stochastic(coeff: f64, routing: Routing) -> Loss {
    let term = Term::StochasticRecon { routing };
    Loss { coeff, term }
}

fn base(name: &str, model: Model, data: Data, (rows, lr): (usize, f64), losses: Vec<Loss>) -> Run {
    Run {
        name: name.to_owned(),
        seed: 0,
        precision: Precision::F32,
        target: Target {
            model,
            weights: None,
            train: None,
        },
        data,
        decomposition: Decomposition {
            sites: Vec::new(),
            identity: Vec::new(),
            delta: true,
            tied: false,
            tied_update: TiedUpdate::Summed,
        },
        importance: Importance {
            kind: ImportanceKind::VectorMlp,
            hidden: Vec::new(),
            sigmoid: Sigmoid::LeakyHard,
            sampling: Sampling::Continuous,
        },
        losses,
        train: Train {
            steps: STEPS,
            batch_size: rows,
            mask_samples: 1,
            output_loss: OutputLoss::Kl,
            lr: Schedule {
                start: lr,
                shape: Shape::Constant,
                warmup: 0.0,
                final_fraction: 1.0,
            },
            clip_components: None,
            clip_importance: None,
            faithfulness_warmup: FaithfulnessWarmup {
                steps: 0,
                lr: 0.0,
                weight_decay: 0.0,
            },
        },
        eval: Eval {
            every: 0,
            batches: 1,
            batch_size: rows,
            figures_every: 0,
            alive_threshold: 0.0,
            rounding_threshold: 0.0,
            known: Vec::new(),
            losses: Vec::new(),
        },
        checkpoint: Checkpoint {
            every: STEPS,
            keep: 1,
        },
        log: Log { every: STEPS },
    }
}
