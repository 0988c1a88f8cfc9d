//! `loss_metric_configs` and `eval_metric_configs`: a class each, with its keys.

use std::collections::BTreeMap;

use toml::de::DeValue;

use spd_configs::{
    reader::Table,
    values::{Kind, OneOf, Patterns, Text},
    yaml::{Node, Value},
};

use super::{Found, made::Made};
use crate::component_model::Sites;
use crate::losses::{self, CLASSES};

/// Classes of the reference that are not here, and what could be done.
const ABSENT: &[(&str, &str)] = &[
    (
        "PersistentPGDReconEval",
        "an adversary that lives on is of training alone here; leave it out",
    ),
    (
        "PersistentPGDReconSubsetEval",
        "an adversary that lives on is of training alone here; leave it out",
    ),
    (
        "PGDMultiBatchReconLoss",
        "an adversary over several batches is not here; put `PGDReconLoss` in its place",
    ),
    (
        "PGDMultiBatchReconSubsetLoss",
        "an adversary over several batches is not here; put `PGDReconSubsetLoss` in its place",
    ),
    (
        "CIHiddenActsReconLoss",
        "hidden activations are measured here under random masks; put `StochasticHiddenActsReconLoss` in its place",
    ),
    (
        "CIMaskedAttnPatternsReconLoss",
        "patterns of attention are not measured here; leave it out",
    ),
    (
        "StochasticAttnPatternsReconLoss",
        "patterns of attention are not measured here; leave it out",
    ),
];

/// Figures that every slow evaluation draws here, and metrics that every evaluation has.
const ALWAYS: &[&str] = &[
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
    for (key, rows) in [
        ("known", eval.known),
        ("loss", eval.losses),
        ("subset", eval.subsets),
    ] {
        if !rows.is_empty() {
            out.rows(key, place, rows);
        }
    }
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

/// Refuses a class that is not here, with what could be done.
fn refuse<T>(row: &mut Table<'_>, class: &str, what: &str) -> Option<T> {
    row.pass_over();
    let absent = ABSENT.iter().find(|(known, _)| *known == class);
    match absent {
        Some((_, why)) => row.refuse("classname", format!("`{class}`: {why}")),
        None => row.refuse(
            "classname",
            format!("expected a {what} of the reference, found {class:?}"),
        ),
    }
}

/// The loss of a class: its word, and what it is.
fn named(class: &str) -> Option<(&'static str, losses::Kind)> {
    let (_, word) = CLASSES.iter().find(|(known, _)| *known == class)?;
    Some((word, losses::Kind::of(word)?))
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
struct Eval {
    known: Vec<Made>,
    losses: Vec<Made>,
    subsets: Vec<Made>,
    /// How many losses there are of a kind.
    kinds: BTreeMap<&'static str, usize>,
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
            "CI_L0" => self.subsets(row, ("groups", "sites"), false),
            "StochasticReconSubsetCEAndKL" => {
                self.subsets(row, ("include_patterns", "sites"), true);
                self.subsets(row, ("exclude_patterns", "all_but"), true);
            }
            "IdentityCIError" => {
                self.solutions(row, "identity_ci", ("n_features", "identity"));
                self.solutions(row, "dense_ci", ("k", "dense"));
            }
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
        self.losses.push(made);
    }

    /// Groups of sites by name.
    fn subsets(&mut self, row: &mut Table<'_>, (theirs, ours): (&'static str, &str), masked: bool) {
        let Some(groups) = row.maybe(theirs, Groups).flatten() else {
            return;
        };
        for (name, patterns) in groups {
            let mut made = Made::default();
            let place = row.place(theirs);
            made.text("name", place, &name);
            made.put(ours, place, patterns);
            made.put("masked", place, Value::Flag(masked));
            self.subsets.push(made);
        }
    }

    /// Solutions that are known.
    fn solutions(
        &mut self,
        row: &mut Table<'_>,
        list: &'static str,
        (theirs, ours): (&'static str, &str),
    ) {
        row.rows_or_none(list, |of| {
            let mut made = Made::default();
            made.need(of, ("layer_pattern", "a pattern of sites"), "pattern");
            made.need(of, (theirs, "a whole number"), ours);
            self.known.push(made);
            Some(())
        });
    }
}

/// Lists of patterns by name.
struct Groups;

impl Kind for Groups {
    type Value = Vec<(String, Value)>;

    fn expected(&self) -> String {
        "names, each with a list of patterns of sites".to_owned()
    }

    fn read(&self, value: &DeValue<'_>) -> Result<Self::Value, String> {
        let groups = value.as_table().ok_or_else(|| self.expected())?;
        let groups = groups.iter().map(|(name, patterns)| {
            Patterns
                .read(patterns.get_ref())
                .map_err(|_| self.expected())?;
            let list = Node::of_toml(patterns.get_ref(), name.span().start);
            Ok((name.get_ref().to_string(), list.value))
        });
        groups.collect()
    }
}
