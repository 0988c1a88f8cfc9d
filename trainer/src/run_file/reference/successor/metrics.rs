//! `eval`: when there are evaluations, and `eval.metrics`, a row by its `type`.

use spd_configs::{
    reader::Table,
    values::{Flag, NUMBERED, Number, OneOf, Size, Text},
    yaml::{Node, Value},
};

use super::super::found::Found;
use super::super::made::Made;
use super::super::metrics::{ALWAYS, Rows};
use super::schedule::number;

/// Metrics that are not here, and what could be done.
const ABSENT: &[(&str, &str)] = &[
    (
        "ArithmeticCIGrid",
        "importances are not shown over numbers in a text here; leave it out",
    ),
    (
        "RouterDivergence",
        "networks of experts are not here; leave it out",
    ),
];

/// Makes `[eval]`.
pub(super) fn read(eval: &mut Table<'_>, found: &mut Found) -> Made {
    let mut made = Made::default();
    made.need(eval, ("every", "a whole number"), "every");
    made.need(eval, ("slow_every", "a whole number"), "slow_every");
    made.need(eval, ("n_steps", "a whole number"), "batches");
    made.need(eval, ("batch_size", "a whole number"), "batch_size");
    if eval.or("slow_on_first_step", Flag, true) == Some(false) {
        found.unused(eval, &["slow_on_first_step"]);
    }
    let place = eval.place("metrics");
    let mut of = Eval::default();
    eval.rows_or_none("metrics", |row| {
        of.read(row, &mut made);
        Some(())
    });
    of.ladder(place, &mut made);
    if let Some(place) = of.patterns {
        made.text("attention_patterns", place, "target");
    }
    of.rows.put(&mut made, place);
    made
}

/// The settings of an evaluation, made of rows of metrics.
#[derive(Default)]
struct Eval {
    rows: Rows,
    /// Steps of patient adversaries, and how far each goes.
    rungs: Vec<(usize, f64)>,
    /// The place of a row that asks for patterns of attention.
    patterns: Option<usize>,
}

impl Eval {
    fn read(&mut self, row: &mut Table<'_>, out: &mut Made) {
        let Some(class) = row.need_kind("type", Text::ANY) else {
            return;
        };
        if ALWAYS.contains(&class.as_str()) {
            return row.pass_over();
        }
        match class.as_str() {
            // Slow evaluations count what is active above 0.01 and 0.1 too.
            "CIActiveCountsPerPosition" => {}
            "CEandKLLosses" => out.carry(row, "rounding_threshold", "rounding_threshold"),
            "CI_L0" => {
                out.carry(row, "ci_alive_threshold", "alive_threshold");
                self.rows.read_groups(row, "groups", "sites");
            }
            "IdentityCIError" => self.rows.read_known(row),
            "PGDReconLoss" => self.attack(row),
            "SlowPGDReconLoss" => self.rung(row),
            "CIMaskedAttnPatternsReconLoss" | "StochasticAttnPatternsReconLoss" => {
                self.patterns = Some(row.place("type"));
            }
            "WellTemperedness" => {
                let mut made = Made::default();
                made.need(row, ("n_locations", "a whole number"), "positions");
                let each = ("n_components_per_region", "a whole number");
                made.need(row, each, "components");
                // How many at a time, and sums over groups.
                row.raw("ablations_per_forward");
                row.raw("groups");
                out.table("well_tempered", row.place("type"), made);
            }
            other => {
                row.pass_over();
                let absent = ABSENT.iter().find(|(known, _)| *known == other);
                let message = match absent {
                    Some((_, why)) => format!("`{other}`: {why}"),
                    None => {
                        format!("expected a metric of the reference's successor, found {other:?}")
                    }
                };
                row.refuse::<()>("type", message);
            }
        }
    }

    /// An adversary whose sources are those of the whole batch.
    fn attack(&mut self, row: &mut Table<'_>) {
        let mut made = Made::default();
        let place = row.place("type");
        made.text("kind", place, "pgd_recon");
        made.carry(row, "name", "name");
        made.need(row, ("n_steps", "a whole number"), "steps");
        made.need(row, ("step_size", "a number"), "step_size");
        made.text("scope", place, "shared_across_batch");
        shared(row);
        self.rows.losses.push(made);
    }

    /// The same with many steps: a rung of the ladder, or several.
    fn rung(&mut self, row: &mut Table<'_>) {
        row.raw("name");
        let steps = match row.maybe("read_out_steps", NUMBERED) {
            Some(None) => row
                .need("n_steps", Size::at_least(1))
                .map(|steps| vec![steps]),
            Some(Some(none)) if none.is_empty() => {
                row.refuse("read_out_steps", "expected at least one step, found []")
            }
            steps => steps.flatten(),
        };
        let step_size = row.need("step_size", Number::PROBABILITY);
        shared(row);
        let (Some(steps), Some(step_size)) = (steps, step_size) else {
            return;
        };
        match self.rungs.first() {
            Some((_, first)) if first.to_bits() != step_size.to_bits() => {
                row.refuse::<()>(
                    "step_size",
                    format!(
                        "adversaries of many steps are one ladder here; expected {first}, found {step_size}"
                    ),
                );
            }
            _ => self
                .rungs
                .extend(steps.into_iter().map(|steps| (steps, step_size))),
        }
    }

    /// Puts the ladder, on so many batches.
    fn ladder(&mut self, place: usize, out: &mut Made) {
        self.rungs.sort_by_key(|(steps, _)| *steps);
        self.rungs.dedup();
        let Some(&(_, step_size)) = self.rungs.first() else {
            return;
        };
        let mut made = Made::default();
        let steps = self.rungs.iter().map(|(steps, _)| Node {
            offset: place,
            value: Value::Number(steps.to_string()),
        });
        made.put("steps", place, Value::List(steps.collect()));
        made.put("step_size", place, number(step_size));
        out.table("ladder", place, made);
    }
}

/// Reads what all adversaries of an evaluation have alike.
fn shared(row: &mut Table<'_>) {
    row.or("init", OneOf(&[("random", ())]), ());
    row.or("source_shape", OneOf(&[("c", ())]), ());
    // Compared beside it and of no weight.
    for key in ["auxiliaries", "hidden_acts_reconstruction", "coeff"] {
        row.raw(key);
    }
}
