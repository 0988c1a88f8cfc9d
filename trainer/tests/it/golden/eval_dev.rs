//! The evaluation as the reference's branch dev has it, on two batches: outputs under six kinds of
//! masks, subsets, L0 of sites and of groups, mean importances and activation densities.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value as Json;
use spd_engine::Given;
use spd_trainer::replay::Replay;

use super::ce_kl;
use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::run_file::{self, FAITHFULNESS, Settings, number, size};
use crate::harness::Outcome;

/// As for the transformer's single steps.
const TOLERANCE: f64 = 1e-4;

const BATCHES: [&str; 2] = ["batch.0", "batch.1"];

pub(super) fn check() -> Outcome {
    let case = Numbers::open("modern/eval_dev")?;
    let mut comparison = Comparison::new("eval_dev", TOLERANCE);
    let terms = case.info["terms"].as_object().expect("terms by name");
    let (compared, left): (Vec<_>, Vec<_>) = terms.iter().partition(|(term, _)| {
        let starts = ["ce_kl", "l0", "subset_ce_kl"];
        starts.iter().any(|start| term.starts_with(start))
    });
    for (term, said) in compared {
        comparison.group(term);
        if let Some(threshold) = term.strip_prefix("ce_kl_rounding") {
            masked_outputs(&case, threshold, &said["per_batch"], &mut comparison);
        } else if let Some(threshold) = term.strip_prefix("l0_") {
            active(&case, threshold, said, &mut comparison);
        } else {
            subsets(&case, term, said, &mut comparison);
        }
    }
    comparison.group("importances");
    importances(&case, &mut comparison);
    // Squared errors of what comes out of a site (ours are of what goes in), errors of attention
    // patterns, and adversaries over several batches: no metric of a run.
    let left = left.into_iter().map(|(term, _)| term.as_str());
    let left: Vec<&str> = left.collect();
    comparison.note(format!("left out: {}", left.join(", ")));
    Ok(comparison.finish())
}

/// The case with an evaluation.
struct Evaluation<'c> {
    case: &'c Numbers,
    replica: Replica,
    replay: Replay,
}

impl<'c> Evaluation<'c> {
    fn new(case: &'c Numbers, delta: bool, eval: &str) -> Self {
        let mut replica = replica(case, delta, eval);
        let replay = replica.replay();
        Self {
            case,
            replica,
            replay,
        }
    }

    /// The metrics of a batch by name, with the draws recorded as `rng.<of>.<kind>.<site>`.
    ///
    /// - `kinds`: ours, and theirs
    fn measure(
        &mut self,
        batch: &str,
        (of, kinds): (&str, &[(&str, &str)]),
    ) -> BTreeMap<String, f64> {
        let replica = &mut self.replica;
        let held_out = replica.batch(self.case.get(batch));
        let sites = &replica.decomposition.sites;
        let feed = |given: &mut Given| {
            for path in sites.iter().map(|site| site.path()) {
                for (ours, theirs) in kinds {
                    let recorded = self.case.get(&format!("rng.{of}.{theirs}.{path}"));
                    let input = given.input(&format!("{ours}.eval.{path}"));
                    input.copy_from_slice(&recorded.f32());
                }
            }
        };
        let measured = self.replay.evaluate(&mut replica.store, &held_out, feed);
        let measured = measured.expect("a processor that works");
        measured.into_iter().collect()
    }
}

fn replica(case: &Numbers, delta: bool, eval: &str) -> Replica {
    let settings = Settings {
        delta,
        eval,
        ..Settings::PLAIN
    };
    let from = ("comp.", case.get(BATCHES[0]));
    let text = run_file::text_of(&case.info, case, from, FAITHFULNESS, settings);
    Replica::new(&run_file::read(&text), case, "")
}

fn masked_outputs(case: &Numbers, threshold: &str, per_batch: &Json, comparison: &mut Comparison) {
    let eval = format!("rounding_threshold = {threshold}\n");
    let mut evaluation = Evaluation::new(case, true, &eval);
    let kinds = [
        ("src", "m0.src"),
        ("dmask", "m0.dmask"),
        ("random", "random_mask"),
    ];
    for (index, batch) in BATCHES.into_iter().enumerate() {
        let draws = format!("ce_kl.b{index}");
        let measured = evaluation.measure(batch, (&draws, &kinds));
        ce_kl::compare(comparison, &measured, &per_batch[index]);
    }
}

/// L0 of sites, and its sums over groups.
fn active(case: &Numbers, threshold: &str, said: &Json, comparison: &mut Comparison) {
    let mut eval = format!("alive_threshold = {threshold}\n");
    for (name, patterns) in said["groups"].as_object().expect("groups by name") {
        // Theirs end anywhere.
        let patterns = patterns.as_array().expect("patterns").iter();
        let patterns = patterns.map(|pattern| format!("{}*", pattern.as_str().expect("text")));
        let patterns: Vec<String> = patterns.collect();
        eval += &row(name, "sites", &patterns, false);
    }
    let mut evaluation = Evaluation::new(case, true, &eval);
    let measured = BATCHES.map(|batch| evaluation.measure(batch, ("", &[])));
    let replica = &evaluation.replica;
    let l0 = |path: &str| mean(&measured, &format!("eval/l0/{path}"));
    let sites = &replica.decomposition.sites;
    let theirs = |name: &str| number(&said["result"], &format!("{threshold}_{name}"));
    for path in sites.iter().map(|site| site.path()) {
        comparison.number(path, l0(path), theirs(path));
        if threshold == "0.1" {
            let name = format!("l0_above_0.1/{path}");
            comparison.number(
                &name,
                mean(&measured, &format!("eval/{name}")),
                theirs(path),
            );
        }
    }
    for group in &replica.decomposition.run.eval.metrics.subsets.rows {
        let sites = sites.iter().map(|site| site.path());
        let sum: f64 = sites.filter(|path| group.has(path)).map(l0).sum();
        comparison.number(&group.name, sum, theirs(&group.name));
    }
}

fn subsets(case: &Numbers, term: &str, said: &Json, comparison: &mut Comparison) {
    let mut eval = String::new();
    for (theirs, ours) in [
        ("include_patterns", "sites"),
        ("exclude_patterns", "all_but"),
    ] {
        for (name, patterns) in said[theirs].as_object().expect("subsets by name") {
            let patterns = patterns.as_array().expect("patterns").iter();
            let patterns = patterns.map(|pattern| pattern.as_str().expect("text").to_owned());
            eval += &row(name, ours, &patterns.collect::<Vec<_>>(), true);
        }
    }
    let delta = said["use_delta"] == true;
    let mut evaluation = Evaluation::new(case, delta, &eval);
    let kinds = [("src", "src"), ("dmask", "dmask")];
    let kinds = &kinds[..if delta { 2 } else { 1 }];
    let mut measured = Vec::new();
    for (index, batch) in BATCHES.into_iter().enumerate() {
        for sample in 0..size(said, "n_mask_samples") {
            let draws = format!("{term}.b{index}.m{sample}");
            measured.push(evaluation.measure(batch, (&draws, kinds)));
        }
    }
    for subset in said["subset_modules"].as_object().expect("subsets").keys() {
        for measure in ["kl", "ce"] {
            let ours = mean(&measured, &format!("eval/subset/{subset}/{measure}"));
            let theirs = format!("{subset}_{measure}");
            comparison.number(&theirs, ours, number(&said["result"], &theirs));
        }
    }
}

/// Mean importances, and how often an importance is above 0.1.
fn importances(case: &Numbers, comparison: &mut Comparison) {
    let mut replica = replica(case, true, "");
    let (mut b, clean_pass) = replica.clean_pass();
    let paths = replica.decomposition.sites.iter().map(|site| site.path());
    let paths: Vec<String> = paths.map(str::to_owned).collect();
    for (path, values) in paths.iter().zip(&clean_pass.sites) {
        b.output(path, values.importance);
    }
    let mut all: BTreeMap<&str, Vec<Vec<f32>>> = BTreeMap::new();
    for batch in BATCHES {
        let mut executor = replica.executor(&b, case.get(batch));
        let ran = executor.run_and_fetch(&mut replica.store);
        ran.expect("a processor that works");
        for (path, site) in paths.iter().zip(&replica.decomposition.sites) {
            let rows = executor.output(path, &replica.store);
            let rows = rows.chunks(site.components).map(<[f32]>::to_vec);
            all.entry(path).or_default().extend(rows);
        }
    }
    for (path, rows) in all {
        let columns = |of: fn(f32) -> f32| -> Vec<f32> {
            let sum = |c: usize| rows.iter().map(|row| of(row[c])).sum::<f32>();
            let columns = 0..rows[0].len();
            columns.map(|c| sum(c) / rows.len() as f32).collect()
        };
        let density = columns(|importance| if importance > 0.1 { 1.0 } else { 0.0 });
        for (name, ours) in [("ci_mean", columns(|g| g)), ("density_thr0.1", density)] {
            let name = format!("{name}.{path}");
            comparison.tensor(&name, &ours, &case.get(&name).values);
        }
    }
}

/// A row of `[[eval.subset]]`.
fn row(name: &str, key: &str, patterns: &[String], masked: bool) -> String {
    let mut row = String::from("[[eval.subset]]\n");
    let keys = format!("name = {name:?}\n{key} = {patterns:?}\nmasked = {masked}\n");
    write!(row, "{keys}").expect("memory");
    row
}

fn mean(measured: &[BTreeMap<String, f64>], name: &str) -> f64 {
    let of = |all: &BTreeMap<String, f64>| all[name];
    measured.iter().map(of).sum::<f64>() / measured.len() as f64
}
