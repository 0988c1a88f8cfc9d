//! The summary of a finished run, or of a later evaluation of it: `summary.json`, which the
//! launcher prints as it is.
//!
//! `{"title", "tables": [{"title", "columns", "rows"}], "lines": [[label, value]],
//! "values": {name: number}, "solved": {"found", "means"}}`:
//! tables and lines are ready to print, `values` are for programs; `solved` is there where a
//! solution is known.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use spd_configs::values::brief;
use spd_engine::Store;
use spd_tracker::{Cursor, Kind, Read, Reader};

use super::bigram::bigram_cross_entropy;
use super::known_importance::KnownSolution;
use super::toy::{KnownSite, known_sites, values as known_values};
use super::{Measure, Rungs, Subset};
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Interrupt;
use crate::figures;
use crate::memory::Peak;
use crate::networks::{Input, LEAKY, SolvedWhen, Target};
use crate::run_file::Run;
use crate::target;
use crate::task::{CheckStop, Measured};

/// The kinds of masks, as the evaluation names them and as people read them.
const MASKS: [(&str, &str); 7] = [
    ("target", "target"),
    ("unmasked", "unmasked"),
    ("ci_masked", "CI-masked"),
    ("rounded", "rounded"),
    ("stochastic", "stochastic"),
    ("random", "random"),
    ("zero", "all ablated"),
];

/// The figures of a toy as a whole.
const TOTALS: [(&str, &str); 4] = [
    ("ci_error", "causal-importance errors, tolerance 0.1"),
    ("ci_error_0p2", "causal-importance errors, tolerance 0.2"),
    ("mmcs", "mean max cosine similarity (MMCS)"),
    ("ml2r", "mean L2 ratio (ML2R)"),
];

/// The cost of a start of a run.
pub(crate) struct Spent<'a> {
    /// Time.
    pub(crate) time: Duration,
    /// Bytes that were planned for, at its fullest.
    pub(crate) planned: usize,
    /// Bytes that were held, at its fullest.
    pub(crate) peak: &'a Peak,
}

/// Inputs of a summary beside the decomposition.
pub(crate) struct Summary<'a> {
    pub(crate) run_dir: &'a Path,
    pub(crate) of: Of<'a>,
    /// The evaluation of the state.
    pub(crate) last: Measured,
}

/// When a state is summarised.
pub(crate) enum Of<'a> {
    /// At the end of its run, beside the evaluation at its start.
    End(&'a Spent<'a>),
    /// Later, when it is looked at again.
    Later {
        /// Of the state.
        step: u64,
        /// The directory of the evaluation.
        place: &'a Path,
        /// Settings that are not those of the run, a line each.
        settings: &'a [String],
    },
}

/// Evaluations that stand beside each other in tables.
struct Shown {
    first: Option<BTreeMap<String, f64>>,
    last: BTreeMap<String, f64>,
}

impl Shown {
    /// Titles of the columns of a number.
    fn titles(&self, number: &str) -> Vec<String> {
        match &self.first {
            Some(_) => ["start", "end"]
                .map(|when| format!("{number} at {when}").trim_start().to_owned())
                .to_vec(),
            None if number.is_empty() => vec!["mean".to_owned()],
            None => vec![number.to_owned()],
        }
    }

    /// Their cells, of the value `name`.
    fn cells(&self, name: &str, written: fn(f64) -> String) -> Vec<String> {
        let all = self.first.iter().chain([&self.last]);
        let values = all.map(|values| values.get(name).copied());
        values
            .map(|value| value.map_or("-".to_owned(), written))
            .collect()
    }
}

/// The text of `summary.json`.
pub(crate) fn text(
    of: &Summary<'_>,
    task: &mut DecompositionTask,
    store: &mut Store,
    check_stop: &mut CheckStop<'_>,
) -> Result<String, Interrupt> {
    let (run_dir, when) = (of.run_dir, &of.of);
    let run = task.decomposition.run.clone();
    let shown = Shown {
        first: match when {
            Of::End(_) => Some(first_evaluation(run_dir)),
            Of::Later { .. } => None,
        },
        last: of.last.iter().cloned().collect(),
    };
    let mut values = shown.last.clone();
    let metrics = &run.eval.metrics;
    let mut tables = vec![masks_table(&task.decomposition, &shown)];
    if !metrics.terms.rows.is_empty() {
        tables.push(terms_table(&metrics.terms.rows, &shown));
    }
    if let Some(rungs) = &metrics.ladder.ladder {
        tables.push(ladder_table(rungs, &shown));
    }
    let mut lines: Vec<(&str, String)> = Vec::new();
    if let Input::Tokens { vocab, .. } = run.target.model.input()
        && let Some(bigram) = bigram_cross_entropy(&task.sources, vocab, check_stop)?
    {
        values.insert("bigram_ce".into(), bigram);
        lines.push(("CE of a bigram model", number(bigram)));
    }
    check_stop()?;
    tables.push(sites_table(task, &shown));
    store.fetch()?;
    let known = known_sites(task, store)?;
    if known.iter().any(KnownSite::says_something) {
        tables.push(known_table(&known));
    }
    for (name, value) in known_values(&known) {
        let total = TOTALS.iter().find(|(total, _)| *total == name);
        lines.extend(total.map(|(_, label)| (*label, number(value))));
        values.insert(name, value);
    }
    if let Some(faithfulness) = shown.last.get("eval/faithfulness") {
        lines.push((
            "faithfulness (mean squared weight delta)",
            number(*faithfulness),
        ));
    }
    if let Of::End(spent) = when {
        let seconds = spent.time.as_secs_f64();
        values.insert("seconds".into(), seconds);
        lines.push(("time of this start", format!("{seconds:.1} s")));
        values.insert("memory/planned_bytes".into(), spent.planned as f64);
        if let Some(most) = spent.peak.most() {
            values.insert("memory/most_bytes".into(), most as f64);
            let (most, planned) = (mebibytes(most), mebibytes(spent.planned));
            lines.push((
                "memory",
                format!("{most} MiB at most, {planned} MiB planned"),
            ));
        }
    }
    lines.push(("target", target_place(&run, &*task.decomposition.target)));
    let mut line = |label, place: &Path| lines.push((label, place.display().to_string()));
    let name = match task.decomposition.target.leaks() {
        true => format!("{} {LEAKY}", run.name),
        false => run.name.clone(),
    };
    let title = match *when {
        Of::End(_) => {
            line("figures", &figures::directory(run_dir, run.train.steps));
            format!("{name}: {} steps, seed {}", run.train.steps, run.seed)
        }
        Of::Later {
            step,
            place,
            settings,
        } => {
            line("figures", &figures::directory(place, step));
            line("evaluation", place);
            for (number, setting) in settings.iter().enumerate() {
                let label = if number == 0 { "settings" } else { "" };
                line(label, Path::new(setting));
            }
            format!("{name}: step {step}, seed {}", run.seed)
        }
    };
    line("run directory", run_dir);
    let mut summary = json!({"title": title, "tables": tables, "lines": lines, "values": values});
    if let Some((found, means)) = solved(&values, &*task.decomposition.target) {
        summary["solved"] = json!({"found": found, "means": means});
    }
    let text = serde_json::to_string_pretty(&summary).context("the summary")?;
    Ok(text + "\n")
}

/// Whether the known solution was found, where one is known, and what that means; numbers that a
/// run does not have count as right.
fn solved(values: &BTreeMap<String, f64>, target: &dyn Target) -> Option<(bool, &'static str)> {
    let right =
        |name: &str, is: &dyn Fn(f64) -> bool| values.get(name).is_none_or(|&value| is(value));
    values
        .contains_key("ci_error")
        .then(|| match (target.solved_when(), target.input()) {
            (SolvedWhen::MostFeatures, Input::Features(features)) => (
                right("matched", &|matched| matched >= 0.98 * features as f64),
                "at least 98 % of the features matched in each layer",
            ),
            _ => (
                right("ci_error", &|errors| errors < 0.5)
                    && right("mmcs", &|mmcs| mmcs >= 0.999)
                    && right("ml2r", &|ml2r| (ml2r - 1.0).abs() <= 0.03),
                "CI error 0, MMCS at least 0.999, ML2R within 0.03 of 1",
            ),
        })
}

fn mebibytes(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

/// A table, ready to print.
fn table(title: &str, columns: &[String], rows: impl Iterator<Item = Vec<String>>) -> Value {
    json!({"title": title, "columns": columns, "rows": rows.collect::<Vec<_>>()})
}

/// A warning of cross-entropies under importances that are not causal.
const GIVEN_AWAY: &str = "importances see later tokens and may give them away: compare KL, not CE";

/// Every kind of mask against the target.
fn masks_table(decomposition: &Decomposition, shown: &Shown) -> Value {
    let measures: Vec<&str> = ["ce", "kl", "mse"]
        .into_iter()
        .filter(|kind| shown.last.contains_key(&format!("eval/{kind}/ci_masked")))
        .collect();
    let mut columns = vec!["masks".to_owned()];
    for kind in &measures {
        columns.extend(shown.titles(&kind.to_uppercase()));
    }
    let row = |label: String, name: &dyn Fn(&str) -> String| {
        let cells = measures.iter();
        let cells = cells.flat_map(|kind| shown.cells(&name(kind), number));
        [label].into_iter().chain(cells).collect()
    };
    let is_there = |key: &str| {
        let mut names = shown.last.keys();
        names.any(|name| name.ends_with(&format!("/{key}")))
    };
    let masks = MASKS.iter().filter(|(key, _)| is_there(key));
    let masks =
        masks.map(|(key, label)| row((*label).to_owned(), &|kind| format!("eval/{kind}/{key}")));
    let run = &decomposition.run;
    let subsets = run.eval.metrics.subsets.rows.iter();
    let subsets = subsets.filter(|subset| subset.masked);
    let subsets = subsets.map(|Subset { name, .. }| {
        let label = format!("stochastic, {name} alone");
        row(label, &|kind| format!("eval/subset/{name}/{kind}"))
    });
    let title = match decomposition.sees_later_tokens() {
        true => format!("held-out rows, means; {GIVEN_AWAY}"),
        false => "held-out rows, means".to_owned(),
    };
    table(&title, &columns, masks.chain(subsets))
}

/// The terms that are only measured.
fn terms_table(measures: &[Measure], shown: &Shown) -> Value {
    let mut columns = vec!["term".to_owned()];
    columns.extend(shown.titles(""));
    let rows = measures.iter().map(|Measure { name, term, .. }| {
        let label = if name == term.name() {
            term.to_string()
        } else {
            format!("{name}: {term}")
        };
        let cells = shown.cells(&format!("eval/loss/{name}"), number);
        [label].into_iter().chain(cells).collect()
    });
    table("held-out rows, reconstruction", &columns, rows)
}

/// The loss of the output under adversaries of more and more steps.
fn ladder_table(rungs: &Rungs, shown: &Shown) -> Value {
    let columns = ["adversary", "loss of the output"].map(str::to_owned);
    let rows = rungs.steps.iter().map(|steps| {
        let loss = shown.last.get(&format!("eval/ladder/{steps}"));
        let loss = loss.map_or("-".to_owned(), |&loss| number(loss));
        vec![format!("{steps} steps of {}", brief(rungs.step_size)), loss]
    });
    table("held-out rows, patient adversaries", &columns, rows)
}

fn sites_table(task: &DecompositionTask, shown: &Shown) -> Value {
    let mut columns = ["site", "C"].map(str::to_owned).to_vec();
    columns.extend(shown.titles("L0"));
    let row = |name: &str, components: usize| {
        let l0 = shown.cells(&format!("eval/l0/{name}"), |l0| format!("{l0:.2}"));
        let cells = [name.to_owned(), components.to_string()].into_iter();
        cells.chain(l0).collect()
    };
    let sites = &task.decomposition.sites;
    let of_subset = |subset: &Subset| {
        let sites = sites.iter().filter(|site| subset.has(site.path()));
        row(&subset.name, sites.map(|site| site.components).sum())
    };
    let of_sites = sites.iter().map(|site| row(site.path(), site.components));
    let subsets = &task.decomposition.run.eval.metrics.subsets;
    let of_subsets = subsets.rows.iter().map(of_subset);
    let rows = of_sites.chain(of_subsets);
    table("active components (L0)", &columns, rows)
}

/// Each site of a toy against the solution that is known.
fn known_table(sites: &[KnownSite]) -> Value {
    let columns = [
        "site", "solution", "errors", "at 0.2", "matched", "at 0.2", "MMCS", "ML2R",
    ];
    let rows = sites
        .iter()
        .filter(|site| site.says_something())
        .map(|site| {
            let mut row = vec![site.path.clone()];
            match &site.importance {
                Some(known) => {
                    let (solution, of) = match known.solution {
                        KnownSolution::Identity(n) => (format!("one of {n} each"), n),
                        KnownSolution::Dense(k) => (format!("{k} in use"), k),
                    };
                    row.push(solution);
                    row.extend(known.errors.map(|errors| errors.to_string()));
                    row.extend(known.matched.map(|matched| format!("{matched} of {of}")));
                }
                None => row.extend(["-"; 5].map(str::to_owned)),
            }
            match site.directions {
                Some(both) => row.extend(both.map(number)),
                None => row.extend(["-"; 2].map(str::to_owned)),
            }
            row
        });
    let title = "known solutions, on rows with one feature of 0.75 (tolerance 0.1, then 0.2)";
    table(title, &columns.map(str::to_owned), rows)
}

/// The evaluation of the starting values, before any training, from the spool; empty where it
/// cannot be read.
fn first_evaluation(run_dir: &Path) -> BTreeMap<String, f64> {
    let Ok(mut reader) = Reader::of_metrics(run_dir, &Cursor::default()) else {
        return BTreeMap::new();
    };
    while let Ok(Some(read)) = reader.next() {
        if let Read::Row { row, .. } = read
            && row.kind == Kind::Eval
        {
            let name = |name: String| name.replace("start/", "eval/");
            let numbers = row.numbers();
            return numbers
                .map(|(key, value)| (name(key.to_owned()), value))
                .collect();
        }
    }
    BTreeMap::new()
}

fn target_place(run: &Run, network: &dyn Target) -> String {
    match &run.target.weights {
        Some(path) => path.display().to_string(),
        None => target::cached_dir(run, network).map_or_else(
            |_| "in the cache".into(),
            |dir| dir.join("target.safetensors").display().to_string(),
        ),
    }
}

/// A number as people read it: a count as it is, others with four decimals, or an exponent where
/// those would hide it.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if value.fract() == 0.0 && size < 1e9 => format!("{value:.0}"),
        size if size < 1e-3 => format!("{value:.3e}"),
        size if size < 100.0 => format!("{value:.4}"),
        _ => format!("{value:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use crate::networks::{Nonlinearity, ResidMlp, Tms};

    use super::*;

    #[test]
    fn a_solution_is_found_when_all_that_is_known_is_right() {
        let of = |target: &dyn Target, values: &[(&str, f64)]| {
            let owned = values
                .iter()
                .map(|(name, value)| ((*name).to_owned(), *value));
            solved(&owned.collect(), target).map(|(found, _)| found)
        };
        let resid = ResidMlp {
            n_features: 100,
            d_embed: 1000,
            d_mlp: 50,
            n_layer: 1,
            activation: Nonlinearity::Relu,
            in_bias: false,
            out_bias: false,
        };
        let features = |matched| {
            of(
                &resid,
                &[("ci_error", 9.0), ("matched", matched), ("mmcs", 0.9)],
            )
        };
        assert_eq!((features(98.0), features(97.0)), (Some(true), Some(false)));
        assert_eq!(of(&resid, &[("matched", 100.0)]), None);
        let tms = Tms {
            n_features: 5,
            n_hidden: 2,
            n_hidden_layers: 0,
            zero_bias: true,
        };
        let solved = |values: &[(&str, f64)]| of(&tms, values);
        assert_eq!(solved(&[("mmcs", 1.0)]), None);
        assert_eq!(solved(&[("ci_error", 0.0)]), Some(true));
        let all = [("ci_error", 0.0), ("mmcs", 0.999), ("ml2r", 0.971)];
        assert_eq!(solved(&all), Some(true));
        for (index, wrong) in [(0, 1.0), (1, 0.9989), (2, 1.031), (2, f64::NAN)] {
            let mut values = all;
            values[index].1 = wrong;
            assert_eq!(solved(&values), Some(false), "{values:?}");
        }
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.0, 8.0, 1.234_56e-4, -0.123_456, 12.345_67, 1234.56].map(number);
        assert_eq!(
            numbers,
            ["0", "8", "1.235e-4", "-0.1235", "12.3457", "1234.6"]
        );
    }
}
