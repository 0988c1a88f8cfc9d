//! `loss_metric_configs` and `eval_metric_configs` of a run of ours.

use serde_json::{Map, Value, json};

use crate::component_model::Routing;
use crate::losses::{CLASSES, Loss, Term};
use crate::metrics::{Measure, known_importance::KnownSolution};
use crate::run_file::{Data, Run, Schedule};

pub(super) fn losses(losses: &[Loss], left_out: &mut Vec<String>) -> Vec<Value> {
    let rows = losses.iter().filter_map(|loss| {
        // In the place of knots, for which there is no word, stands the last value.
        let row = row(Some(loss.coeff.at(1, 2)), &loss.term);
        let moves = !matches!(loss.coeff, Schedule::Constant(_));
        let keys = loss.term.term().left_out().into_iter();
        let keys = keys.chain(moves.then_some("coeff"));
        let more = loss.auxiliaries.captures().next();
        let keys = keys.chain(more.map(|_| "auxiliaries"));
        let name = loss.term.name();
        match row {
            None => left_out.push(format!("[[loss]] {name}")),
            Some(_) => left_out.extend(keys.map(|key| format!("[[loss]] {name}: {key}"))),
        }
        row
    });
    rows.collect()
}

/// A loss under its class and keys there, if it is there.
fn row(coeff: Option<f64>, term: &Term) -> Option<Value> {
    let class = Some(CLASSES.word(term.name())).filter(|class| !class.is_empty())?;
    let mut row = Map::new();
    row.insert("classname".into(), json!(class));
    if let Some(coeff) = coeff {
        row.insert("coeff".into(), json!(coeff));
    }
    term.term().to_reference(&mut row);
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
    let eval = &run.eval.metrics;
    let mut rows = Vec::new();
    let (mut groups, mut include, mut exclude) = (Map::new(), Map::new(), Map::new());
    for subset in &eval.subsets.rows {
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
    if matches!(run.data, Data::Tokens { .. }) {
        let threshold = eval.masked_output.rounding_threshold;
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
    for known in &eval.known.rows {
        let pattern = &known.pattern;
        match known.solution {
            KnownSolution::Identity(n) => {
                identity.push(json!({ "layer_pattern": pattern, "n_features": n }));
            }
            KnownSolution::Dense(k) => dense.push(json!({ "layer_pattern": pattern, "k": k })),
        }
    }
    if !eval.known.rows.is_empty() {
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
    let measures = eval.terms.rows.iter().filter_map(|measure: &Measure| {
        let row = row(None, &measure.term);
        if row.is_none() {
            left_out.push(format!("[[eval.loss]] {}", measure.name));
        }
        row
    });
    rows.extend(measures);
    rows
}
