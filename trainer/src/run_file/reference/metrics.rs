//! `loss_metric_configs` and `eval_metric_configs`: a class each, with its keys.

use std::collections::BTreeMap;

use toml::de::DeValue;

use spd_configs::{
    reader::Table,
    values::{Kind, OneOf, PATTERNS, Text},
    yaml::Value,
};

use super::found::Found;
use super::made::{Anything, ByName, Made};
use crate::component_model::Sites;
use crate::losses::{self, CLASSES};

/// Figures that every slow evaluation draws here, and metrics that every evaluation has.
pub(super) const ALWAYS: &[&str] = &[
    "CIHistograms",
    "CIMeanPerComponent",
    "ComponentActivationDensity",
    "PermutedCIPlots",
    "UVPlots",
];

/// Makes the rows of `[[loss]]`.
pub(super) fn losses(table: &mut Table<'_>) -> Vec<Made> {
    let rows = table.rows("loss_metric_configs", |row| {
        Some(is_read(row).then(|| loss(row)).flatten())
    });
    rows.into_iter().flatten().flatten().collect()
}

/// Makes the metrics of `[eval]`.
pub(super) fn evals(table: &mut Table<'_>, out: &mut Made, found: &mut Found) {
    let place = table.place("eval_metric_configs");
    let mut eval = Eval::default();
    table.rows_or_none("eval_metric_configs", |row| {
        if is_read(row) {
            eval.read(row, out, found);
        }
        Some(())
    });
    eval.rows.put(out, place);
}

/// Whether the reference reads the row: those of a form that it gave up are left out.
fn is_read(row: &mut Table<'_>) -> bool {
    let is_read = !row.has("extra_init_kwargs");
    if !is_read {
        row.pass_over();
    }
    is_read
}

fn loss(row: &mut Table<'_>) -> Option<Made> {
    let class = row.need_kind("classname", Text::ANY)?;
    let Some((word, kind)) = named(&class) else {
        return refuse(row, &class, "loss");
    };
    let mut made = Made::default();
    made.text("kind", row.place("classname"), word);
    made.need(row, ("coeff", "a number"), "coeff");
    settings(row, kind, &mut made);
    Some(made)
}

/// Refuses a class that is not here.
fn refuse<T>(row: &mut Table<'_>, class: &str, what: &str) -> Option<T> {
    row.pass_over();
    let message = format!("expected a {what} of the reference, found {class:?}");
    row.refuse("classname", message)
}

/// The loss of a class: its word, and what it is.
fn named(class: &str) -> Option<(&'static str, losses::Kind)> {
    let word = CLASSES.of(class)?;
    Some((word, losses::KINDS.of(word)?))
}

/// The keys of a loss.
fn settings(row: &mut Table<'_>, kind: losses::Kind, made: &mut Made) {
    if kind.sites() == Sites::Subset {
        routing(row, made);
    }
    kind.read_reference(row, made);
}

const ROUTINGS: OneOf<bool> = OneOf(&[("uniform_k_subset", false), ("static_probability", true)]);

fn routing(row: &mut Table<'_>, made: &mut Made) {
    row.maybe_table("routing", |of| {
        if of.need_kind("type", ROUTINGS)? {
            made.need(of, ("p", "a number in [0, 1]"), "probability");
        }
        Some(())
    });
}

/// The rows of `[eval]`.
#[derive(Default)]
pub(super) struct Rows {
    known: Vec<Made>,
    pub(super) losses: Vec<Made>,
    subsets: Vec<Made>,
}

impl Rows {
    /// Puts them into `[eval]`.
    pub(super) fn put(self, out: &mut Made, place: usize) {
        for (key, rows) in [
            ("known", self.known),
            ("loss", self.losses),
            ("subset", self.subsets),
        ] {
            if !rows.is_empty() {
                out.rows(key, place, rows);
            }
        }
    }

    /// Reads solutions that are known.
    pub(super) fn read_known(&mut self, row: &mut Table<'_>) {
        for (list, theirs, ours) in [
            ("identity_ci", "n_features", "identity"),
            ("dense_ci", "k", "dense"),
        ] {
            let rows = row.rows_or_none(list, |of| {
                let mut made = Made::default();
                made.need(of, ("layer_pattern", "a pattern of sites"), "pattern");
                made.need(of, (theirs, "a whole number"), ours);
                Some(made)
            });
            self.known.extend(rows.unwrap_or_default());
        }
    }

    /// Reads groups of sites by name; those of `groups` are not masked.
    pub(super) fn read_groups(&mut self, row: &mut Table<'_>, theirs: &'static str, ours: &str) {
        let expected = "names, each with a list of patterns of sites".to_owned();
        let groups = ByName {
            least: 0,
            expected,
            holds: |_: &str, value: &DeValue<'_>| PATTERNS.read(value).is_ok(),
        };
        let groups = row.maybe(theirs, groups).flatten();
        for (name, patterns) in groups.into_iter().flatten() {
            let mut made = Made::default();
            let place = row.place(theirs);
            made.text("name", place, &name);
            made.put(ours, place, patterns.value);
            made.put("masked", place, Value::Flag(theirs != "groups"));
            self.subsets.push(made);
        }
    }
}

/// The settings of an evaluation, made of rows of metrics.
#[derive(Default)]
struct Eval {
    rows: Rows,
    /// How many losses there are of a kind.
    kinds: BTreeMap<&'static str, usize>,
    /// Keys that are there.
    keys: Vec<&'static str>,
}

impl Eval {
    fn read(&mut self, row: &mut Table<'_>, out: &mut Made, found: &mut Found) {
        let Some(class) = row.need_kind("classname", Text::ANY) else {
            return;
        };
        if ALWAYS.contains(&class.as_str()) {
            return row.pass_over();
        }
        match class.as_str() {
            "CEandKLLosses" => out.carry(row, "rounding_threshold", "rounding_threshold"),
            "CIHiddenActsReconLoss" => self.whether(row, out, "site_outputs"),
            // Of each adversary that lives on, whichever they name.
            "PersistentPGDReconEval" | "PersistentPGDReconSubsetEval" => {
                self.whether(row, out, "adversaries");
            }
            "CIMaskedAttnPatternsReconLoss" | "StochasticAttnPatternsReconLoss" => {
                row.pass_over();
                self.once(row, out, ("attention_patterns", components()));
            }
            "PGDMultiBatchReconLoss" => self.ladder(row, out, false),
            "PGDMultiBatchReconSubsetLoss" => self.ladder(row, out, true),
            "CI_L0" => self.rows.read_groups(row, "groups", "sites"),
            "StochasticReconSubsetCEAndKL" => {
                self.rows.read_groups(row, "include_patterns", "sites");
                self.rows.read_groups(row, "exclude_patterns", "all_but");
            }
            "IdentityCIError" => self.rows.read_known(row),
            _ => self.loss(row, &class, found),
        }
    }

    fn loss(&mut self, row: &mut Table<'_>, class: &str, found: &mut Found) {
        let Some((word, kind)) = named(class) else {
            refuse::<()>(row, class, "metric");
            return;
        };
        found.unused(row, &["coeff"]);
        // Both are in every evaluation, or of the training alone.
        if !kind.is_measurable() {
            return row.pass_over();
        }
        let mut made = Made::default();
        let place = row.place("classname");
        made.text("kind", place, word);
        let count = self.kinds.entry(word).or_default();
        *count += 1;
        if *count > 1 {
            made.text("name", place, &format!("{word}_{count}"));
        }
        settings(row, kind, &mut made);
        self.rows.losses.push(made);
    }

    /// Puts a key that several rows may ask for.
    fn once(&mut self, row: &Table<'_>, out: &mut Made, (key, value): (&'static str, Value)) {
        if !self.keys.contains(&key) {
            self.keys.push(key);
            out.put(key, row.place("classname"), value);
        }
    }

    fn whether(&mut self, row: &mut Table<'_>, out: &mut Made, key: &'static str) {
        row.pass_over();
        self.once(row, out, (key, Value::Flag(true)));
    }

    /// An adversary over several batches.
    fn ladder(&mut self, row: &mut Table<'_>, out: &mut Made, subset: bool) {
        let place = row.place("classname");
        if self.keys.contains(&"ladder") {
            row.pass_over();
            row.refuse::<()>(
                "classname",
                "one adversary over several batches is measured here, found two",
            );
            return;
        }
        self.keys.push("ladder");
        let mut made = Made::default();
        if let Some(steps) = row.need("n_steps", Anything("a whole number")) {
            made.put("steps", place, Value::List(vec![steps]));
        }
        made.need(row, ("step_size", "a number"), "step_size");
        let batches = ("gradient_accumulation_steps", "a whole number");
        made.need(row, batches, "batches");
        row.or("init", OneOf(&[("random", ())]), ());
        row.raw("coeff");
        made.put("joint", place, Value::Flag(true));
        if subset {
            made.put("subset", place, Value::Flag(true));
            routing(row, &mut made);
        }
        out.table("ladder", place, made);
    }
}

/// Patterns of attention are measured against those of all components there.
fn components() -> Value {
    Value::Text("components".to_owned())
}
