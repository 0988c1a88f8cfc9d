//! Numbers that need no program: schedules, annealing, and known solutions.

use serde_json::Value as Json;
use spd_trainer::losses::ImportanceMinimality;
use spd_trainer::losses::exponent;
use spd_trainer::metrics::known_importance::{dense_error, identity_error};
use spd_trainer::run_file::{Decay, Schedule, Shape};

use super::numbers::Numbers;
use super::run_file::{list, number, text};
use crate::harness::{Compared, Outcome};

/// Both compute in f64, with another order of operations here and there.
const EXACT: f64 = 1e-12;

fn close(ours: f64, theirs: f64, scale: f64, what: &str) {
    assert!(
        (ours - theirs).abs() <= EXACT * scale,
        "{what}: {ours} is not {theirs}"
    );
}

/// Entries of an object whose keys are numbers.
fn at(values: &Json) -> impl Iterator<Item = (f64, f64)> {
    let values = values.as_object().expect("values by place").iter();
    values.map(|(key, value)| {
        (
            key.parse().expect("a number"),
            value.as_f64().expect("a number"),
        )
    })
}

/// One of them ends above its start, which a run file may not say.
fn decay(config: &Json) -> Decay {
    let or = |key: &str, default: f64| config[key].as_f64().unwrap_or(default);
    Decay {
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

// Errors relative to the start: next to the end of a cosine, 1 + cos cancels.
pub(super) fn schedules() -> Outcome {
    let scalars = Numbers::open("scalars")?;
    for said in list(&scalars.info, "schedules") {
        let decay = decay(&said["cfg"]);
        let schedule = Schedule::Decay(decay);
        let steps = said["total"].as_u64().expect("steps");
        for (step, theirs) in at(&said["vals"]) {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a step"
            )]
            let ours = schedule.at(step as u64, steps);
            let what = format!("{schedule:?} at {step} of {steps}");
            close(ours, theirs, decay.start, &what);
        }
    }
    Ok(Compared::default())
}

pub(super) fn annealing() -> Outcome {
    let scalars = Numbers::open("scalars")?;
    for said in list(&scalars.info, "anneal") {
        let args = list(said, "args");
        let arg = |index: usize| args[index].as_f64();
        let needed = |index: usize| arg(index).expect("a number");
        let penalty = ImportanceMinimality {
            p: needed(0),
            p_final: arg(2),
            anneal_start: needed(1),
            anneal_end: needed(3),
            beta: 0.0,
        };
        for (fraction, theirs) in at(&said["vals"]) {
            let ours = exponent(&penalty, fraction);
            let what = format!("{args:?} after {fraction}");
            close(ours, theirs, needed(0), &what);
        }
    }
    Ok(Compared::default())
}

pub(super) fn known_importances() -> Outcome {
    let scalars = Numbers::open("scalars")?;
    for said in list(&scalars.info, "ci_patterns") {
        let key = text(said, "key");
        let recorded = scalars.get(key);
        let (importance, features, c) = (recorded.f32(), recorded.dims[0], recorded.dims[1]);
        for (name, theirs) in said.as_object().expect("errors by name") {
            // `identity_err_0p1`, `dense_err_k2_0p1`
            let words: Vec<&str> = name.split('_').collect();
            let tolerance = || words[words.len() - 1].replace('p', ".").parse::<f32>();
            let ours = match words[0] {
                "identity" => {
                    identity_error(&importance, features, c, tolerance().expect("a number"))
                }
                "dense" => {
                    let k = words[2].strip_prefix('k').expect("columns");
                    let k = k.parse().expect("a number");
                    dense_error(&importance, c, k, tolerance().expect("a number"))
                }
                _ => continue,
            };
            assert_eq!(Some(ours as u64), theirs.as_u64(), "{name} of {key}");
        }
    }
    Ok(Compared::default())
}
