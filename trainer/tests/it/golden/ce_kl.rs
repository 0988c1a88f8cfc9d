//! The evaluation of a language model: divergence and cross-entropy under its six kinds of masks.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use spd_engine::Given;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::run_file::{self, FAITHFULNESS, Settings, number};
use crate::harness::Outcome;

/// Our names of masks, and theirs.
const MASKS: [(&str, &str); 6] = [
    ("ci_masked", "ci_masked"),
    ("unmasked", "unmasked"),
    ("stochastic", "stoch_masked"),
    ("random", "random_masked"),
    ("rounded", "rounded_masked"),
    ("zero", "zero_masked"),
];

pub(super) fn check(name: &str) -> Outcome {
    let case = Numbers::open(name)?;
    case.need("ce_kl")?;
    let all = case.info.as_object().expect("metadata");
    let recorded = all
        .iter()
        .find_map(|(key, theirs)| Some((key.strip_prefix("ce_kl_rounding")?, theirs)));
    let (threshold, theirs) = recorded.expect("recorded metrics");
    let settings = Settings {
        eval: &format!("rounding_threshold = {threshold}\n"),
        ..Settings::PLAIN
    };
    let run = run_file::run(&case, FAITHFULNESS, settings);
    let mut replica = Replica::new(&run, &case, "");
    let batch = case.get("batch");
    let mut replay = replica.replay();
    let held_out = replica.batch(batch);
    let feed = |given: &mut Given| {
        for site in &replica.decomposition.sites {
            for (kind, theirs) in [
                ("src", "m0.src"),
                ("dmask", "m0.dmask"),
                ("random", "random_mask"),
            ] {
                let theirs = format!("rng.ce_kl.{theirs}.{}", site.path());
                let ours = given.input(&format!("{kind}.eval.{}", site.path()));
                ours.copy_from_slice(&case.get(&theirs).f32());
            }
        }
    };
    let measured = replay.evaluate(&mut replica.store, &held_out, feed);
    let measured = measured.expect("a processor that works");

    // As for the transformer's single steps.
    let mut comparison = Comparison::new(&format!("{name} ce_kl"), 1e-4);
    comparison.group("ce_kl");
    compare(&mut comparison, &measured.into_iter().collect(), theirs);
    Ok(comparison.finish())
}

/// Compares the metrics of a batch, by name. Differences of cross-entropies are as exact as these,
/// not as themselves.
pub(super) fn compare(
    comparison: &mut Comparison,
    measured: &BTreeMap<String, f64>,
    theirs: &Json,
) {
    let ours = |name: &str| measured[name];
    let (clean, zero) = (ours("eval/ce/target"), ours("eval/ce/zero"));
    for (kind, key) in MASKS {
        let (kl, ce) = (
            ours(&format!("eval/kl/{kind}")),
            ours(&format!("eval/ce/{kind}")),
        );
        let name = format!("kl_{key}");
        comparison.number(&name, kl, number(theirs, &name));
        if kind != "zero" {
            let name = format!("ce_difference_{key}");
            let difference = number(theirs, &name);
            comparison.number(&name, ce, difference + clean);
            let name = format!("ce_unrecovered_{key}");
            let unrecovered = number(theirs, &name);
            comparison.number(&name, ce, unrecovered * (zero - clean) + clean);
        }
    }
}
