//! `loss_metric_configs` and `eval_metric_configs` of a run of ours.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::super::metrics::LOSSES;
use crate::run_file::{Loss, Measure, Routing, Run, Term, run::KnownSolution};

/// Our key of a loss, and theirs.
const KEYS: &[(&str, &str)] = &[
    ("coeff", "coeff"),
    ("p", "pnorm"),
    ("beta", "beta"),
    ("p_final", "p_anneal_final_p"),
    ("anneal_start", "p_anneal_start_frac"),
    ("anneal_end", "p_anneal_end_frac"),
    ("init", "init"),
    ("steps", "n_steps"),
    ("step_size", "step_size"),
    ("scope", "mask_scope"),
];

pub(super) fn losses(losses: &[Loss], left_out: &mut Vec<String>) -> Vec<Value> {
    let rows = losses.iter().filter_map(|loss| {
        let row = row(loss, &loss.term);
        if row.is_none() {
            left_out.push(format!("[[loss]] {}", loss.term.name()));
        }
        row
    });
    rows.collect()
}

/// A loss under its class and keys there, if it is there.
fn row(written: &impl Serialize, term: &Term) -> Option<Value> {
    let (class, _) = LOSSES.iter().find(|(_, kind)| *kind == term.name())?;
    let Ok(Value::Object(ours)) = serde_json::to_value(written) else {
        return None;
    };
    let mut row = Map::new();
    row.insert("classname".into(), json!(class));
    for (ours_key, key) in KEYS {
        if let Some(value) = ours.get(*ours_key).filter(|value| !value.is_null()) {
            row.insert((*key).into(), value.clone());
        }
    }
    match term {
        // There, an exponent without an end still has a course, of which nothing is left from 1 on.
        Term::ImportanceMinimality(penalty) if penalty.p_final.is_none() => {
            row.insert("p_anneal_start_frac".into(), json!(1.0));
        }
        _ => {}
    }
    match term.routing() {
        Some(Routing::UniformK) => {
            row.insert("routing".into(), json!({ "type": "uniform_k_subset" }));
        }
        Some(Routing::Probability(p)) => {
            let routing = json!({ "type": "static_probability", "p": p });
            row.insert("routing".into(), routing);
        }
        _ => {}
    }
    Some(row.into())
}

pub(super) fn evals(run: &Run, left_out: &mut Vec<String>) -> Vec<Value> {
    let eval = &run.eval;
    let mut rows = Vec::new();
    let (mut groups, mut include, mut exclude) = (Map::new(), Map::new(), Map::new());
    for subset in &eval.subsets {
        let (into, patterns) = match (subset.masked, subset.all_but.is_empty()) {
            (true, true) => (&mut include, &subset.sites),
            (true, false) => (&mut exclude, &subset.all_but),
            (false, true) => (&mut groups, &subset.sites),
            (false, false) => {
                left_out.push(format!("[[eval.subset]] {}", subset.name));
                continue;
            }
        };
        into.insert(subset.name.clone(), json!(patterns));
    }
    let of = |map: Map<String, Value>| match map.is_empty() {
        true => Value::Null,
        false => map.into(),
    };
    if matches!(run.data, crate::run_file::Data::Tokens { .. }) {
        let threshold = eval.rounding_threshold;
        rows.push(json!({ "classname": "CEandKLLosses", "rounding_threshold": threshold }));
    }
    rows.push(json!({ "classname": "CI_L0", "groups": of(groups) }));
    if !(include.is_empty() && exclude.is_empty()) {
        rows.push(json!({
            "classname": "StochasticReconSubsetCEAndKL",
            "include_patterns": of(include),
            "exclude_patterns": of(exclude),
        }));
    }
    let (mut identity, mut dense) = (Vec::new(), Vec::new());
    for known in &eval.known {
        let pattern = &known.pattern;
        match known.solution {
            KnownSolution::Identity { n } => {
                identity.push(json!({ "layer_pattern": pattern, "n_features": n }));
            }
            KnownSolution::Dense { k } => dense.push(json!({ "layer_pattern": pattern, "k": k })),
        }
    }
    if !eval.known.is_empty() {
        let rows_or_null = |rows: Vec<Value>| match rows.is_empty() {
            true => Value::Null,
            false => rows.into(),
        };
        rows.push(json!({
            "classname": "IdentityCIError",
            "identity_ci": rows_or_null(identity),
            "dense_ci": rows_or_null(dense),
        }));
    }
    let measures = eval.losses.iter().filter_map(|measure: &Measure| {
        let row = row(measure, &measure.term);
        if row.is_none() {
            left_out.push(format!("[[eval.loss]] {}", measure.name));
        }
        row
    });
    rows.extend(measures);
    rows
}
