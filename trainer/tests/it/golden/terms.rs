//! What the JSON says, as a run of ours.

use std::path::PathBuf;

use serde_json::Value as Json;
use spd_configs::{
    Activation, Active, Checkpoint, Data, Decomposition, Eval, FaithfulnessWarmup, Importance,
    ImportanceKind, Llama, Log, Loss, Model, OutputLoss, Pgd, PgdInit, PgdScope, Precision,
    Routing, Run, Sampling, Schedule, Shape, Sigmoid, SitePattern, Target, Term, Train,
};

use super::numbers::Numbers;

/// Settings that belong to a term in the single-step files, and to a run in the trajectories.
#[derive(Clone, Copy)]
pub(super) struct Settings {
    pub(super) delta: bool,
    pub(super) sampling: Sampling,
    pub(super) mask_samples: usize,
}

pub(super) fn size(of: &Json, key: &str) -> usize {
    let size = of[key].as_u64().and_then(|size| usize::try_from(size).ok());
    size.unwrap_or_else(|| panic!("`{key}` is a number, found {}", of[key]))
}

pub(super) fn number(of: &Json, key: &str) -> f64 {
    let number = of[key].as_f64();
    number.unwrap_or_else(|| panic!("`{key}` is a number, found {}", of[key]))
}

pub(super) fn text<'j>(of: &'j Json, key: &str) -> &'j str {
    let text = of[key].as_str();
    text.unwrap_or_else(|| panic!("`{key}` is a string, found {}", of[key]))
}

pub(super) fn list<'j>(of: &'j Json, key: &str) -> &'j [Json] {
    let list = of[key].as_array();
    list.unwrap_or_else(|| panic!("`{key}` is a list, found {}", of[key]))
}

pub(super) fn texts(of: &Json, key: &str) -> Vec<String> {
    let texts = list(of, key).iter().map(Json::as_str);
    texts
        .map(|text| text.expect("a string").to_owned())
        .collect()
}

fn model(config: &Json) -> Model {
    if config.get("d_embed").is_some() {
        return Model::ResidMlp {
            n_features: size(config, "n_features"),
            d_embed: size(config, "d_embed"),
            d_mlp: size(config, "d_mlp"),
            n_layer: size(config, "n_layers"),
            activation: match text(config, "act_fn_name") {
                "relu" => Activation::Relu,
                "gelu" => Activation::Gelu,
                other => panic!("unknown activation `{other}`"),
            },
            in_bias: config["in_bias"] == true,
            out_bias: config["out_bias"] == true,
        };
    }
    if config.get("n_features").is_some() {
        return Model::Tms {
            n_features: size(config, "n_features"),
            n_hidden: size(config, "n_hidden"),
            n_hidden_layers: size(config, "n_hidden_layers"),
            zero_bias: config["init_bias_to_zero"] == true,
        };
    }
    let d_model = size(config, "n_embd");
    let llama = || Llama {
        vocab: size(config, "vocab_size"),
        n_ctx: size(config, "n_ctx"),
        d_model,
        n_layer: size(config, "n_layer"),
        n_head: size(config, "n_head"),
        n_kv_head: size(config, "n_key_value_heads"),
        d_mlp: size(config, "n_intermediate"),
    };
    match config["model_type"].as_str() {
        Some("LlamaSimple") => return Model::LlamaSimple(llama()),
        Some("LlamaSimpleMLP") => return Model::LlamaSimpleMlp(llama()),
        Some("GPT2Simple") => {
            return Model::Gpt2Simple {
                vocab: size(config, "vocab_size"),
                n_ctx: size(config, "block_size"),
                d_model,
                n_layer: size(config, "n_layer"),
                n_head: size(config, "n_head"),
                d_mlp: 4 * d_model,
            };
        }
        _ => {}
    }
    Model::Gpt2 {
        vocab: size(config, "vocab_size"),
        n_ctx: size(config, "n_positions"),
        d_model,
        n_layer: size(config, "n_layer"),
        n_head: size(config, "n_head"),
        d_mlp: match &config["n_inner"] {
            Json::Null => 4 * d_model,
            _ => size(config, "n_inner"),
        },
    }
}

pub(super) fn sampling(of: &Json) -> Sampling {
    match text(of, "sampling") {
        "continuous" => Sampling::Continuous,
        "binomial" => Sampling::Binomial,
        other => panic!("unknown sampling `{other}`"),
    }
}

/// The term of a loss configuration; `None` when we have no such loss.
pub(super) fn term(config: &Json) -> Option<Term> {
    let subset = || match config.get("routing") {
        Some(routing) if text(routing, "type") == "static_probability" => {
            Routing::Probability(number(routing, "p"))
        }
        Some(routing) => {
            assert_eq!(routing["type"], "uniform_k_subset");
            Routing::UniformK
        }
        None => Routing::UniformK,
    };
    Some(match text(config, "classname") {
        "FaithfulnessLoss" => Term::Faithfulness,
        "ImportanceMinimalityLoss" => Term::ImportanceMinimality {
            p: number(config, "pnorm"),
            p_final: config["p_anneal_final_p"].as_f64(),
            anneal_start: number(config, "p_anneal_start_frac"),
            anneal_end: number(config, "p_anneal_end_frac"),
            beta: number(config, "beta"),
        },
        "UnmaskedReconLoss" => Term::UnmaskedRecon,
        "CIMaskedReconLoss" => ci(Routing::All),
        "CIMaskedReconLayerwiseLoss" => ci(Routing::Layerwise),
        "CIMaskedReconSubsetLoss" => ci(subset()),
        "StochasticReconLoss" => stochastic(Routing::All),
        "StochasticReconLayerwiseLoss" => stochastic(Routing::Layerwise),
        "StochasticReconSubsetLoss" => stochastic(subset()),
        "StochasticHiddenActsReconLoss" => Term::StochasticHiddenActsRecon,
        "PGDReconLoss" => pgd(config, Routing::All),
        "PGDReconLayerwiseLoss" => pgd(config, Routing::Layerwise),
        "PGDReconSubsetLoss" => pgd(config, subset()),
        _ => return None,
    })
}

fn ci(routing: Routing) -> Term {
    Term::CiMaskedRecon { routing }
}

fn stochastic(routing: Routing) -> Term {
    Term::StochasticRecon { routing }
}

fn pgd(config: &Json, routing: Routing) -> Term {
    Term::PgdRecon(Pgd {
        routing,
        init: match text(config, "init") {
            "random" => PgdInit::Random,
            "ones" => PgdInit::Ones,
            "zeroes" => PgdInit::Zeroes,
            other => panic!("unknown start `{other}`"),
        },
        steps: size(config, "n_steps"),
        step_size: number(config, "step_size"),
        scope: match text(config, "mask_scope") {
            "unique_per_datapoint" => PgdScope::UniquePerDatapoint,
            "shared_across_batch" => PgdScope::SharedAcrossBatch,
            other => panic!("unknown scope `{other}`"),
        },
    })
}

pub(super) fn schedule(config: &Json) -> Schedule {
    let or = |key: &str, default: f64| config[key].as_f64().unwrap_or(default);
    Schedule {
        start: number(config, "start_val"),
        shape: match config["fn_type"].as_str() {
            None | Some("constant") => Shape::Constant,
            Some("linear") => Shape::Linear,
            Some("cosine") => Shape::Cosine,
            Some(other) => panic!("unknown schedule `{other}`"),
        },
        warmup: or("warmup_pct", 0.0),
        final_fraction: or("final_val_frac", 1.0),
    }
}

/// A run on the target of a case. Components are not tied: the files have parameters of their own for each site.
pub(super) fn run(case: &Numbers, losses: Vec<Loss>, settings: Settings) -> Run {
    let info = &case.info;
    let (identity, sites): (Vec<String>, Vec<String>) = texts(info, "sites")
        .into_iter()
        .partition(|path| info["module_types"][path] == "Identity");
    let components = |path: &str| case.get(&format!("comp.{path}.U")).dims[0];
    let sites = sites.into_iter().map(|pattern| SitePattern {
        components: components(&pattern),
        pattern,
    });
    let identity = identity.into_iter().map(|path| SitePattern {
        components: components(&path),
        pattern: path
            .strip_suffix(".pre_identity")
            .expect("named by its layer")
            .to_owned(),
    });
    let unused = Schedule {
        start: 0.0,
        shape: Shape::Constant,
        warmup: 0.0,
        final_fraction: 1.0,
    };
    Run {
        name: "golden".into(),
        seed: 0,
        precision: Precision::F32,
        target: Target {
            model: model(&info["target_config"]),
            weights: Some(PathBuf::new()),
            train: None,
        },
        data: Data::SparseFeatures {
            active: Active::Exactly { exactly_active: 1 },
            low: 0.0,
            high: 1.0,
        },
        decomposition: Decomposition {
            sites: sites.collect(),
            identity: identity.collect(),
            delta: settings.delta,
            tied: false,
        },
        importance: Importance {
            kind: match text(info, "ci_fn_type") {
                "mlp" => ImportanceKind::Mlp,
                "vector_mlp" => ImportanceKind::VectorMlp,
                "shared_mlp" => ImportanceKind::SharedMlp,
                other => panic!("unknown importance function `{other}`"),
            },
            hidden: list(info, "ci_fn_hidden_dims")
                .iter()
                .map(|width| width.as_u64().and_then(|width| usize::try_from(width).ok()))
                .map(|width| width.expect("a width"))
                .collect(),
            sigmoid: Sigmoid::LeakyHard,
            sampling: settings.sampling,
        },
        losses,
        train: Train {
            steps: 1,
            batch_size: 1,
            mask_samples: settings.mask_samples,
            output_loss: match text(info, "output_loss_type") {
                "kl" => OutputLoss::Kl,
                "mse" => OutputLoss::Mse,
                other => panic!("unknown output loss `{other}`"),
            },
            lr: unused,
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
            batch_size: 1,
            figures_every: 0,
            alive_threshold: 0.0,
            rounding_threshold: 0.0,
            known: Vec::new(),
            losses: Vec::new(),
        },
        checkpoint: Checkpoint { every: 1, keep: 1 },
        log: Log { every: 1 },
    }
}
