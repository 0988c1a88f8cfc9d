//! `[[loss]]`: a loss, and its weight in the total.

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::{Table, alike};
use spd_configs::values::Number;
use spd_engine::Builder;
use spd_engine::ops::Weight;

use super::{Auxiliaries, KINDS, Term};
use crate::component_model::{CleanPass, DataStream};
use crate::fault::Fault;
use crate::run_file::schedule::{self, Schedule};
use crate::run_file::target::Facts;
use crate::sites::Site;

/// One term of the total loss.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loss {
    /// The loss.
    #[serde(flatten)]
    pub term: Term,
    /// Weight in the total.
    pub coeff: Schedule,
    /// Values that it compares beside outputs.
    #[serde(flatten)]
    pub auxiliaries: Auxiliaries,
}

/// Reads the losses in turn; `seen` holds the names of those before.
pub(crate) fn read(table: &mut Table<'_>, seen: &mut Vec<String>) -> Option<Loss> {
    let kind = table.need_kind("kind", KINDS);
    let coeff = schedule::read(table, "coeff", Number::FINITE);
    let term = kind?.read(table);
    let auxiliaries = kind?.auxiliaries(table);
    let name = KINDS.word(kind?);
    table.once("kind", name, seen, "; add up the coefficients");
    all_read! { Loss: term, coeff, auxiliaries }
}

/// Refuses losses that do not go together, or not with the target.
pub(crate) fn check(file: &mut Table<'_>, losses: &[Loss], target: &Facts) {
    for loss in losses {
        let adversary = loss.term.term().adversary();
        if let (Some(adversary), Some(toy)) = (adversary, target.of_features())
            && let Some(message) = adversary.scope.refuses_features(toy)
        {
            file.refuse::<()>("loss", format!("{}: {message}", loss.term.name()));
        }
    }
    let terms = || losses.iter().map(|loss| &loss.term);
    let mut penalties = terms().filter(|term| term.term().penalty().is_some());
    let reader = terms().find(|term| term.term().reads_penalty());
    match (penalties.next(), penalties.next(), reader) {
        (Some(one), Some(other), _) => {
            let (one, other) = (one.name(), other.name());
            file.refuse::<()>(
                "loss",
                format!("expected one penalty of importances, found {one} and {other}"),
            );
        }
        (None, _, Some(reader)) => {
            let name = reader.name();
            file.refuse::<()>(
                "loss",
                format!(
                    "{name} is of the importances that another loss penalises; expected \
                     importance_minimality or smooth_l0 beside it, found neither"
                ),
            );
        }
        _ => {}
    }
}

/// Refuses losses that do not fit the sites.
///
/// # Errors
///
/// One line, of the first.
pub(crate) fn check_sites(losses: &[Loss], sites: &[Site]) -> Result<(), Fault> {
    let refused = losses.iter().find_map(|loss| {
        let reason = loss.term.term().refuses(sites)?;
        Some(format!("[[loss]] {}: {reason}", loss.term.name()))
    });
    match refused {
        None => Ok(()),
        Some(line) => Err(Fault::BadInput(line)),
    }
}

/// Refuses losses that compare what the target does not have.
///
/// # Errors
///
/// One line, of the first.
pub(crate) fn check_captures(losses: &[Loss], clean_pass: &CleanPass) -> Result<(), Fault> {
    for loss in losses {
        let mut captures = loss.auxiliaries.captures();
        if let Some(name) = captures.find(|name| !clean_pass.captures.contains_key(*name)) {
            let known = clean_pass.captures.keys();
            let known: Vec<&str> = known.map(String::as_str).collect();
            let advice = match (alike(name, &known).first(), known.first()) {
                (Some(near), _) => format!("did you mean `{near}`?"),
                (None, Some(other)) => format!("it has others, such as `{other}`"),
                (None, None) => "it has none".to_owned(),
            };
            return Err(Fault::BadInput(format!(
                "[[loss]] {} auxiliaries: the target has no value `{}`; {advice}",
                loss.term.name(),
                name.escape_debug(),
            )));
        }
    }
    Ok(())
}

/// Refuses adversaries whose sources do not go round in the rows of a block of a batch.
pub(crate) fn check_rows(losses: &[Loss], rows: usize) -> Result<(), Fault> {
    for loss in losses {
        let adversary = loss.term.term().adversary();
        if let Some(message) = adversary.and_then(|adversary| adversary.scope.refuses_rows(rows)) {
            let name = loss.term.name();
            return Err(Fault::BadInput(format!("[[loss]] {name}: {message}")));
        }
    }
    Ok(())
}

impl Loss {
    /// A loss that compares nothing beside outputs.
    pub fn new(coeff: Schedule, term: Term) -> Self {
        let auxiliaries = Auxiliaries::default();
        Self {
            term,
            coeff,
            auxiliaries,
        }
    }

    /// Its weight in the total of a program.
    pub(crate) fn weight(&self, b: &mut Builder, stream: DataStream) -> Weight {
        match self.coeff {
            Schedule::Constant(coeff) => Weight::Known(coeff),
            _ => Weight::Step(b.step_scalar(&self.coeff_name(stream))),
        }
    }

    /// The step scalars of its value and of its weight, at `step` of `steps`.
    pub(crate) fn step_scalars(
        &self,
        (step, steps): (u64, u64),
        stream: DataStream,
    ) -> Vec<(String, f64)> {
        let term = self.term.term();
        let of_value = term.step_scalars(self.term.name(), step, steps);
        let coeff = match &self.coeff {
            Schedule::Constant(_) => None,
            moving => Some((self.coeff_name(stream), moving.at(step, steps))),
        };
        let auxiliaries = &self.auxiliaries;
        let of_auxiliaries = auxiliaries.step_scalars(self.term.name(), step, steps);
        let all = of_value.into_iter().chain(coeff);
        all.chain(of_auxiliaries).collect()
    }

    fn coeff_name(&self, stream: DataStream) -> String {
        stream.name(&format!("coeff/{}", self.term.name()))
    }
}
