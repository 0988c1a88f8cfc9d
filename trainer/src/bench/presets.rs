//! The workloads by name: what a run file would say, without data or a trained target.
//!
//! Names, sizes and settings are those of the peers' `workloads.py`. A step is timed half-way through training.

use std::path::PathBuf;

use spd_configs::{
    Activation, Active, Checkpoint, Data, Decomposition, Eval, FaithfulnessWarmup, Importance,
    ImportanceKind, Log, Loss, Model, OutputLoss, Precision, Routing, Run, Sampling, Schedule,
    Shape, Sigmoid, SitePattern, Target, Term, Train,
};

use crate::fault::Fault;

/// What this build can time.
const KNOWN: [&str; 6] = [
    "tms_5-2",
    "tms_40-10",
    "resid_mlp1",
    "full-gpt2-h1",
    "tiny-tms",
    "tiny-gpt2-h1",
];

/// What the peers can and this build cannot: targets, importance functions or losses are missing.
const NOT_YET: [&str; 20] = [
    "seed-16x128",
    "seed-16x128-bf16",
    "seed-32x256",
    "seed-32x256-bf16",
    "seed-64x256",
    "seed-64x256-bf16",
    "seed-128x256",
    "seed-128x256-bf16",
    "full-ss-llama",
    "full-ss-llama-32x512",
    "full-ss-llama-64x512",
    "full-pile-4l",
    "resid_mlp2",
    "tiny-seed",
    "tiny-seed-bf16",
    "tiny-ss-llama",
    "tiny-pile-4l",
    "tiny-pile-broadcast",
    "tiny-pgd",
    "tiny-resid",
];

/// Steps of the run whose middle is timed.
const STEPS: u64 = 10_000;

/// A workload: its name, with what was asked for in place of the preset's own, and its run.
#[derive(Debug, Clone, PartialEq)]
pub struct Preset {
    /// Name in the JSON line: `full-gpt2-h1@1x256@fp32`.
    pub name: String,
    /// The run; its data are never opened.
    pub run: Run,
}

/// What is asked for in place of a preset's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Overrides<'a> {
    /// Rows a step.
    pub batch: Option<usize>,
    /// Tokens a row; of no effect where there are none.
    pub seq: Option<usize>,
    /// Arithmetic: `fp32`, also written `f32`.
    pub precision: Option<&'a str>,
}

impl Preset {
    /// Tokens a row, if rows are tokens.
    pub(super) fn seq(&self) -> Option<usize> {
        match self.run.data {
            Data::Tokens { seq_len, .. } => Some(seq_len),
            Data::SparseFeatures { .. } => None,
        }
    }
}

/// One line that names all workloads.
pub fn known() -> String {
    format!("known: {}", KNOWN.join(", "))
}

/// A preset by name. The peers' presets of these names ask for bf16, so a name always ends in `@fp32` here, as it does there
/// with `--precision fp32`.
///
/// # Errors
///
/// When there is no such preset, or it cannot be as asked.
pub fn preset(name: &str, overrides: &Overrides<'_>) -> Result<Preset, Fault> {
    let refuse = |reason: String| Err(Fault::BadInput(format!("bench {name}: {reason}")));
    match overrides.precision {
        None | Some("fp32" | "f32") => {}
        Some(other @ ("bf16" | "tf32")) => {
            return refuse(format!("the CPU computes fp32, not {other}"));
        }
        Some(other) => return refuse(format!("no precision `{other}`; the CPU computes fp32")),
    }
    if NOT_YET.contains(&name) {
        return refuse(format!("not yet in this build; {}", known()));
    }
    let Some(mut run) = run(name) else {
        return refuse(format!(
            "no such workload; {}; not yet in this build: {}",
            known(),
            NOT_YET.join(", ")
        ));
    };
    let mut name = name.to_owned();
    let rows = overrides.batch.unwrap_or(run.train.batch_size);
    match &mut run.data {
        Data::Tokens { seq_len, .. } => {
            *seq_len = overrides.seq.unwrap_or(*seq_len);
            if overrides.batch.is_some() || overrides.seq.is_some() {
                name = format!("{name}@{rows}x{seq_len}");
            }
            if let Model::Gpt2 { n_ctx, .. } = run.target.model
                && *seq_len > n_ctx
            {
                return refuse(format!(
                    "{seq_len} tokens a row, the target has {n_ctx} positions"
                ));
            }
        }
        Data::SparseFeatures { .. } if overrides.batch.is_some() => name = format!("{name}@{rows}"),
        Data::SparseFeatures { .. } => {}
    }
    run.train.batch_size = rows;
    run.eval.batch_size = rows;
    Ok(Preset {
        name: format!("{name}@fp32"),
        run,
    })
}

fn run(name: &str) -> Option<Run> {
    let gpt2 = |vocab, n_ctx, d_model, (n_layer, n_head)| Model::Gpt2 {
        vocab,
        n_ctx,
        d_model,
        n_layer,
        n_head,
        d_mlp: 4 * d_model,
    };
    let run = match name {
        "tms_5-2" => tms(name, (5, 2), 4096, (20, 16), (3e-3, 1.0)),
        "tms_40-10" => tms(name, (40, 10), 4096, (200, 16), (1e-4, 2.0)),
        "tiny-tms" => tms(name, (5, 2), 64, (8, 4), (3e-3, 1.0)),
        "resid_mlp1" => resid_mlp1(name),
        "full-gpt2-h1" => {
            let model = gpt2(50_257, 1024, 768, (12, 12));
            gpt2_h1(name, model, (2, 1024), (768, 12))
        }
        "tiny-gpt2-h1" => gpt2_h1(name, gpt2(50, 16, 16, (2, 2)), (2, 16), (12, 5)),
        _ => return None,
    };
    Some(run)
}

/// A toy model of superposition, taken apart with tied components.
fn tms(
    name: &str,
    (n_features, n_hidden): (usize, usize),
    rows: usize,
    (components, hidden): (usize, usize),
    (coeff, p): (f64, f64),
) -> Run {
    let model = Model::Tms {
        n_features,
        n_hidden,
        n_hidden_layers: 0,
        zero_bias: true,
    };
    let losses = vec![
        minimality(coeff, p, None),
        stochastic(1.0, Routing::All),
        stochastic(1.0, Routing::Layerwise),
    ];
    let mut run = base(name, model, sparse(0.05, 0.0), (rows, 1e-3), losses);
    run.decomposition.sites = ["linear1", "linear2"]
        .map(|path| SitePattern {
            pattern: path.to_owned(),
            components,
        })
        .to_vec();
    run.decomposition.tied = true;
    run.importance.kind = ImportanceKind::Mlp;
    run.importance.hidden = vec![hidden];
    run.train.output_loss = OutputLoss::Mse;
    run
}

/// A residual MLP of one layer.
fn resid_mlp1(name: &str) -> Run {
    let model = Model::ResidMlp {
        n_features: 100,
        d_embed: 1000,
        d_mlp: 50,
        n_layer: 1,
        activation: Activation::Relu,
        in_bias: false,
        out_bias: false,
    };
    let losses = vec![
        minimality(1e-5, 2.0, None),
        stochastic(1.0, Routing::Layerwise),
        stochastic(1.0, Routing::All),
    ];
    let mut run = base(name, model, sparse(0.01, -1.0), (2048, 2e-3), losses);
    run.decomposition.sites = ["layers.*.mlp_in", "layers.*.mlp_out"]
        .map(|pattern| SitePattern {
            pattern: pattern.to_owned(),
            components: 100,
        })
        .to_vec();
    run.importance.kind = ImportanceKind::Mlp;
    run.importance.hidden = vec![16];
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
    let data = Data::Tokens {
        train: PathBuf::new(),
        eval: PathBuf::new(),
        seq_len,
        make: None,
    };
    let losses = vec![
        minimality(3e-4, 2.0, Some(0.3)),
        stochastic(2.0, Routing::Layerwise),
    ];
    let mut run = base(name, model, data, (rows, 3e-4), losses);
    run.decomposition.sites = vec![SitePattern {
        pattern: "transformer.h.1.attn.c_attn".to_owned(),
        components,
    }];
    run.importance.hidden = vec![hidden];
    run
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
            alive_threshold: 0.0,
            rounding_threshold: 0.0,
            known: Vec::new(),
        },
        checkpoint: Checkpoint {
            every: STEPS,
            keep: 1,
        },
        log: Log { every: STEPS },
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::Store;

    use super::*;
    use crate::decomposition::Decomposition;

    fn named(name: &str, batch: Option<usize>, seq: Option<usize>) -> String {
        let overrides = Overrides {
            batch,
            seq,
            precision: None,
        };
        preset(name, &overrides).unwrap().name
    }

    fn refused(name: &str, overrides: &Overrides<'_>) -> String {
        match preset(name, overrides) {
            Err(Fault::BadInput(line)) => line,
            other => panic!("{other:?}"),
        }
    }

    // Counts by hand, tied components once. TMS 5-2: 20 (5 + 2), and per site 20 (16 + 16 + 16 + 1).
    // TMS 40-10: 200 (40 + 10), and 2 * 200 * 49. Residual MLP: 2 * 100 (1000 + 50), and 2 * 100 * 49. GPT-2: 768 (768 + 2304), and 768 (768 * 12 + 12 + 12 + 1).
    #[test]
    fn every_known_name_has_sites_and_parameters() {
        let counts = [
            (140, 1960),
            (10_000, 19_600),
            (210_000, 9800),
            (2_359_296, 7_097_088),
            (56, 208),
            (768, 1092),
        ];
        for (name, expected) in KNOWN.iter().zip(counts) {
            // Slots of zeros are not touched, so GPT-2 costs no time.
            let mut store = Store::new();
            let run = preset(name, &Overrides::default()).unwrap().run;
            let decomposition = Decomposition::new(&run, &mut store).unwrap();
            let of = |group| decomposition.parameters.of(&[group]).len(&store);
            let found = (
                of(crate::parameters::Group::Components),
                of(crate::parameters::Group::Importance),
            );
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn a_name_records_what_was_changed() {
        assert_eq!(named("tms_5-2", None, None), "tms_5-2@fp32");
        assert_eq!(named("tms_5-2", Some(64), Some(9)), "tms_5-2@64@fp32");
        assert_eq!(named("tms_5-2", None, Some(9)), "tms_5-2@fp32");
        let gpt2 = |batch, seq| named("full-gpt2-h1", batch, seq);
        assert_eq!(gpt2(None, None), "full-gpt2-h1@fp32");
        assert_eq!(gpt2(Some(1), Some(256)), "full-gpt2-h1@1x256@fp32");
        assert_eq!(gpt2(None, Some(256)), "full-gpt2-h1@2x256@fp32");
    }

    #[test]
    fn what_cannot_be_timed_is_refused_in_one_line() {
        let default = Overrides::default();
        let known = "known: tms_5-2, tms_40-10, resid_mlp1, full-gpt2-h1, tiny-tms, tiny-gpt2-h1";
        assert_eq!(
            refused("full-ss-llama", &default),
            format!("bench full-ss-llama: not yet in this build; {known}")
        );
        let unknown = refused("tmz", &default);
        assert!(
            unknown.starts_with(&format!("bench tmz: no such workload; {known}; not yet"))
                && !unknown.contains('\n'),
            "{unknown}"
        );
        let bf16 = Overrides {
            precision: Some("bf16"),
            ..default
        };
        assert_eq!(
            refused("tms_5-2", &bf16),
            "bench tms_5-2: the CPU computes fp32, not bf16"
        );
        let long = Overrides {
            seq: Some(17),
            ..default
        };
        assert_eq!(
            refused("tiny-gpt2-h1", &long),
            "bench tiny-gpt2-h1: 17 tokens a row, the target has 16 positions"
        );
    }
}
