//! Toys from run file to summary: trained, decomposed, and compared with the known solution.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::scratch::{Scratch, launch};

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs");

/// resid_mlp1 at a tenth of its width, with an identity matrix before `mlp_in`.
const SMALL: [&str; 12] = [
    "target.n_features=10",
    "target.d_embed=100",
    "target.d_mlp=5",
    "target.train.steps=40",
    "data.synced_inputs=[[0, 1], [2, 3]]",
    "decomposition.sites=[{ pattern = 'layers.*', C = 12 }]",
    "decomposition.identity=[{ pattern = '*.mlp_in', C = 9 }]",
    "train.steps=30",
    "train.batch_size=64",
    "eval.batches=2",
    "eval.batch_size=64",
    "eval.known=[{ pattern = '*.mlp_in', identity = 10 }, { pattern = '*.mlp_out', dense = 5 }]",
];

#[test]
fn a_residual_mlp_is_compared_with_the_known_solution() {
    let scratch = Scratch::new();
    let config = Path::new(CONFIGS).join("resid_mlp1.toml");
    let mut arguments = vec![config.to_str().unwrap(), "--out", "out", "--threads", "1"];
    for set in SMALL {
        arguments.extend(["--set", set]);
    }
    let mut command = scratch.launcher(&arguments);
    command.env("SPD_CACHE", scratch.path().join("cache"));
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);

    let summary = fs::read(scratch.path().join("out/summary.json")).unwrap();
    let summary: Value = serde_json::from_slice(&summary).unwrap();
    let value = |name: &str| {
        let value = summary["values"][name].as_f64();
        value.unwrap_or_else(|| panic!("no {name} in {summary}"))
    };
    let (mlp_in, mlp_out) = ("layers.0.mlp_in", "layers.0.mlp_out");
    for suffix in ["", "_0p2"] {
        let of = |path: &str| value(&format!("ci_error{suffix}/{path}"));
        let total = value(&format!("ci_error{suffix}"));
        assert!((total - of(mlp_in) - of(mlp_out)).abs() < 0.5);
        assert!((0.0..=10.0).contains(&value(&format!("matched{suffix}/{mlp_in}"))));
        assert!((0.0..=5.0).contains(&value(&format!("matched{suffix}/{mlp_out}"))));
    }
    assert!((0.0..=1.0).contains(&value("mmcs")) && value("ml2r") > 0.0);
    assert!(value("eval/l0/layers.0.mlp_in.pre_identity") <= 9.0);
    let row = |start: &str| {
        let mut lines = ended.stdout.lines();
        lines.any(|line| line.trim_start().starts_with(start))
    };
    assert!(row("layers.0.mlp_in   one of 10 each"), "{}", ended.stdout);
    assert!(row("layers.0.mlp_out  5 in use"), "{}", ended.stdout);
    let unknown = summary["values"].get("ci_error/layers.0.mlp_in.pre_identity");
    assert!(
        unknown.is_none(),
        "a site without a known solution has no error"
    );
}

/// Every stochastic and adversarial reconstruction loss, for training and for evaluation.
const TERMS: [&str; 7] = [
    "target.train.steps=20",
    "train.steps=20",
    "train.batch_size=32",
    "train.faithfulness_warmup.steps=5",
    "eval.batches=2",
    "loss=[{ kind = 'stochastic_recon_subset', coeff = 1, probability = 0.5 }, \
     { kind = 'stochastic_hidden_acts_recon', coeff = 1 }, \
     { kind = 'pgd_recon', coeff = 1, steps = 2, step_size = 0.5, scope = 'unique_per_datapoint' }, \
     { kind = 'pgd_recon_layerwise', coeff = 1, steps = 1, step_size = 1, scope = 'shared_across_batch' }, \
     { kind = 'pgd_recon_subset', coeff = 1, steps = 1, step_size = 1, scope = 'shared_across_batch' }]",
    "eval.loss=[{ kind = 'pgd_recon', steps = 20, step_size = 0.1, scope = 'shared_across_batch' }, \
     { kind = 'stochastic_hidden_acts_recon', name = 'inside' }]",
];

#[test]
fn losses_are_trained_and_evaluated() {
    let scratch = Scratch::new();
    let config = Path::new(CONFIGS).join("tms_5-2.toml");
    let mut arguments = vec![config.to_str().unwrap(), "--out", "out", "--threads", "1"];
    for set in TERMS {
        arguments.extend(["--set", set]);
    }
    let mut command = scratch.launcher(&arguments);
    command.env("SPD_CACHE", scratch.path().join("cache"));
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let rows = fs::read_to_string(scratch.path().join("out/metrics.jsonl")).unwrap();
    for name in [
        "loss/stochastic_recon_subset",
        "loss/stochastic_hidden_acts_recon",
        "loss/pgd_recon",
        "loss/pgd_recon_layerwise",
        "loss/pgd_recon_subset",
        "start/loss/pgd_recon",
        "eval/loss/pgd_recon",
        "eval/loss/inside",
    ] {
        assert!(
            rows.contains(&format!("\"{name}\":")),
            "{name} is not in\n{rows}"
        );
    }
    let labels = [
        "pgd_recon (20 steps of 0.1, shared_across_batch)",
        "inside: stochastic_hidden_acts_recon",
    ];
    for label in labels {
        assert!(ended.stdout.contains(label), "{}", ended.stdout);
    }
}
