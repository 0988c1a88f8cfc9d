//! The rows of a run.

use std::fs;

use serde_json::Value;

use crate::scratch::{Scratch, launch};

const SHORT: [&str; 7] = [
    "train.steps=12",
    "train.batch_size=64",
    "train.faithfulness_warmup.steps=2",
    "target.train.steps=5",
    "eval.batches=1",
    "eval.batch_size=64",
    "log.every=5",
];

/// The rows of a spool file that have a value of this name.
fn rows(scratch: &Scratch, file: &str, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(scratch.path().join("runs/x").join(file)).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.filter(|row: &Value| row.get(name).is_some()).collect()
}

#[test]
fn gradient_norms_are_logged_for_each_site() {
    let scratch = Scratch::new();
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &SHORT));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for group in ["components", "importance"] {
        let total = format!("grad_norm/{group}");
        let found = rows(&scratch, "metrics.jsonl", &total);
        let steps: Vec<u64> = found
            .iter()
            .map(|row| row["step"].as_u64().unwrap())
            .collect();
        // Every five, and the last of twelve.
        assert_eq!(steps, [0, 5, 10, 11]);
        for row in &found {
            let norm = |name: &str| row[name].as_f64().unwrap();
            // The components of linear2 are those of linear1.
            let sites: &[&str] = match group {
                "components" => &["linear1"],
                _ => &["linear1", "linear2"],
            };
            let squares: f64 = sites
                .iter()
                .map(|site| norm(&format!("{total}/{site}")).powi(2))
                .sum();
            // The squares are added up in f32.
            assert!((squares.sqrt() / norm(&total) - 1.0).abs() < 1e-6, "{row}");
        }
    }
}

#[test]
fn the_parts_of_a_logged_step_are_timed() {
    let scratch = Scratch::new();
    let ended = launch(scratch.real("tms_5-2.toml", "runs/x", &SHORT));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let all = rows(&scratch, "system.jsonl", "time_ms/step");
    // First those of the target, then those of the decomposition.
    let (of_target, found): (Vec<&Value>, Vec<&Value>) = all
        .iter()
        .partition(|row| row.get("time_ms/losses").is_none());
    assert!(!of_target.is_empty());
    for row in of_target {
        let names = row.as_object().unwrap().keys();
        let parts: Vec<&str> = names
            .filter_map(|name| name.strip_prefix("time_ms/"))
            .collect();
        assert_eq!(
            parts,
            ["data_wait", "backward", "forward", "update", "step"],
            "{row}"
        );
    }
    assert_eq!(found.len(), 4);
    for row in found {
        let ms = |part: &str| row[format!("time_ms/{part}")].as_f64().unwrap();
        let parts = [
            "data_wait",
            "clean",
            "importance",
            "losses",
            "backward",
            "update",
        ];
        assert!(parts.iter().all(|part| ms(part) >= 0.0), "{row}");
        assert!(
            ["losses", "backward", "update"]
                .iter()
                .all(|part| ms(part) > 0.0),
            "{row}"
        );
        let sum: f64 = parts.iter().map(|part| ms(part)).sum();
        assert!(sum <= ms("step"), "{row}");
    }
}

#[test]
fn a_slow_evaluation_has_histograms_of_importances() {
    let scratch = Scratch::new();
    let mut command = scratch.real("tms_5-2.toml", "runs/x", &SHORT);
    command.args(["--set", "eval.slow_every=6"]);
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let figure = scratch
        .path()
        .join("runs/x/figures/step-00000012/importance_histograms.json");
    let figure: Value = serde_json::from_slice(&fs::read(figure).unwrap()).unwrap();
    for (panel, site) in ["linear1", "linear2"].iter().enumerate() {
        let name = format!("importance/{site}");
        let found = rows(&scratch, "metrics.jsonl", &name);
        let steps = found.iter().map(|row| row["step"].as_u64().unwrap());
        assert_eq!(steps.collect::<Vec<_>>(), [6, 12]);
        let numbers = |value: &Value| -> Vec<f64> {
            let all = value.as_array().unwrap().iter();
            all.map(|number| number.as_f64().unwrap()).collect()
        };
        let last = &found[1][&name];
        // Each site has two: importances, and the logits before the gate.
        assert_eq!(
            numbers(&last["counts"]),
            numbers(&figure[2 * panel]["counts"])
        );
        let edges = numbers(&last["edges"]);
        assert_eq!((edges.len(), edges[0], edges[50]), (51, 0.0, 1.0));
    }
}
