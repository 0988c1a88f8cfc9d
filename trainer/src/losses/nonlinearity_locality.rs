//! `nonlinearity_locality`: through how many units of its nonlinearity does each component act?
//!
//! A layer before a nonlinearity writes to its units, neurons or heads of an attention, and one
//! behind it reads them: see [`Alignment`](crate::networks::Alignment). The vector of a component
//! at that end is its row of `U` or its column of `V`. With `f_u` the part of the vector's squares
//! that lies in unit `u` of `N`, the component counts
//!
//! ```text
//! n m sum_u f_u / (f_u + T / N)      T = relative_threshold
//! ```
//!
//! units: one for each that has well more than `T` times an equal share. `m` is the number of query
//! heads that use a unit, a head of keys or values; `n` is 1, or `1 + T / N` with
//! `normalize_at_one`, which makes a vector in a single unit count `m`. A vector of zeros counts 0.
//! The loss is the mean of the counts over all components of all sites whose units are of one kind,
//! and the sum of that over kinds, each times its coefficient. A site without a nonlinearity at
//! either end is not counted.
//!
//! With `y` the vector brought to a mean square of 1, `N f_u` is the mean of `y^2` in the unit, so
//! a term of the sum is `s / (s + T)` of it. The vector is multiplied by a power of two before, so
//! that its mean square is above what the norm adds to it if its elements are 1e-28 or more. The
//! gradient is as large as the vector is small: where their squares add up beyond f32, from a
//! vector of about 1e-19 times the coefficient on, the step is refused as not finite.
//!
//! # Keys of `[[loss]]`
//!
//! - nonlinearity_locality: `relative_threshold` | | | times an equal share of a vector's squares
//!   that a unit has where it counts half, from 1e-6 to 1e6; a schedule
//! - nonlinearity_locality: `normalize_at_one` | false | | whether a vector in one unit counts 1,
//!   and not a little less
//! - nonlinearity_locality: `unit_kind_coefficients` | | | `{ neuron, attention_head }`: weights of
//!   the kinds of units that the sites have, each of them; 0 leaves one out

use std::collections::BTreeMap;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, brief};
use spd_engine::{Builder, Result, Value};

use super::{LossInputs, LossTerm};
use crate::component_model::{SiteValues, Sites};
use crate::networks::{Alignment, Side, UnitKind, Units};
use crate::rounded::rounded;
use crate::run_file::schedule::{self, Schedule};
use crate::schedule::scalar;
use crate::sites::Site;

/// A count of the units that components act through.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NonlinearityLocality {
    /// Times an equal share at which a unit counts half.
    pub relative_threshold: Schedule,
    /// Whether a vector in one unit counts 1.
    pub normalize_at_one: bool,
    /// Weights of kinds of units, by their words.
    pub unit_kind_coefficients: BTreeMap<&'static str, f64>,
}

/// As of `gamma`, whose place it has here.
const THRESHOLD: Number = Number::new("a number from 1e-6 to 1e6", |threshold| {
    (1e-6..=1e6).contains(&threshold)
});

/// The step scalar of the threshold.
const SCALAR: &str = "relative_threshold";

impl LossTerm for NonlinearityLocality {
    fn read(table: &mut Table<'_>, _: Sites) -> Option<Self> {
        let relative_threshold = schedule::read(table, "relative_threshold", THRESHOLD);
        let normalize_at_one = table.or("normalize_at_one", Flag, false);
        let unit_kind_coefficients = table.table("unit_kind_coefficients", read_coefficients);
        all_read! { Self: relative_threshold, normalize_at_one, unit_kind_coefficients }
    }

    fn refuses(&self, sites: &[Site]) -> Option<String> {
        let said = &self.unit_kind_coefficients;
        let mismatch = |(word, kind): &(&'static str, UnitKind)| {
            let has = |site: &&Site| kind_of(site) == Some(*kind);
            match (sites.iter().find(has), said.contains_key(word)) {
                (Some(site), false) => Some(format!(
                    "expected {word}, which the units of `{}` are, found {}; 0 leaves a kind out",
                    site.path(),
                    said.keys().copied().collect::<Vec<_>>().join(" and ")
                )),
                (None, true) => Some(format!(
                    "expected the kinds of units that the sites have, found {word}, which none has"
                )),
                _ => None,
            }
        };
        let fault = UnitKind::WORDS.0.iter().find_map(mismatch)?;
        Some(format!("unit_kind_coefficients: {fault}"))
    }

    fn details(&self) -> Vec<String> {
        let mut details = vec![format!("threshold {}", self.relative_threshold)];
        if self.normalize_at_one {
            details.push("1 at 1".to_owned());
        }
        let kinds = self.unit_kind_coefficients.iter();
        details.extend(kinds.map(|(word, coeff)| format!("{word} {}", brief(*coeff))));
        details
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let threshold = scalar(b, SCALAR)?;
        let mut terms = Vec::new();
        for (index, site) in from.model.sites.iter().enumerate() {
            let coefficients = &self.unit_kind_coefficients;
            let coefficient = kind_of(site).and_then(|kind| coefficients.get(kind.word()));
            let coefficient = coefficient.copied().unwrap_or(0.0);
            let Some(Alignment { side, units }) = site.layer.aligned.filter(|_| coefficient > 0.0)
            else {
                continue;
            };
            let pooled = from.model.sites.iter();
            let pooled = pooled.filter(|other| kind_of(other) == Some(units.kind));
            let components: usize = pooled.map(|site| site.components).sum();
            let values = from.model.site_values(b, from.store, index)?;
            let vectors = vectors(b, values, side)?;
            let count = self.count(b, vectors, units, threshold)?;
            terms.push((coefficient / components as f64, count));
        }
        if terms.is_empty() {
            return b.constant(0.0, &[]);
        }
        b.weighted_sum(&terms)
    }

    fn step_scalars(&self, _: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        vec![(SCALAR.to_owned(), self.relative_threshold.at(step, steps))]
    }
}

impl NonlinearityLocality {
    /// The sum of the counts of all components of a site, a scalar.
    fn count(&self, b: &mut Builder, vectors: Value, units: Units, t: Value) -> Result<Value> {
        let count = count(b, vectors, units, t)?;
        if !self.normalize_at_one {
            return Ok(count);
        }
        let share = rounded(1.0 / units.count as f64);
        let names = ["at_one", "at_one_grad"];
        b.elementwise(names, [count, t], |[count, t]| count * (t * share + 1.0))
    }
}

fn read_coefficients(table: &mut Table<'_>) -> Option<BTreeMap<&'static str, f64>> {
    let kinds = UnitKind::WORDS.0.iter();
    let said: Vec<_> = kinds
        .map(|(word, _)| Some((*word, table.maybe(word, Number::NOT_NEGATIVE)?)))
        .collect();
    let said: Vec<_> = said.into_iter().collect::<Option<_>>()?;
    let said = said.into_iter();
    let said: BTreeMap<_, _> = said.filter_map(|(word, c)| Some((word, c?))).collect();
    match said.is_empty() {
        false => Some(said),
        true => table.refuse_table("expected weights of kinds of units, found none"),
    }
}

/// The kind of the units of a site, if it has any.
fn kind_of(site: &Site) -> Option<UnitKind> {
    site.layer.aligned.map(|aligned| aligned.units.kind)
}

/// The vector of each component at one end of a site, f32 `[c, d]`.
pub(crate) fn vectors(b: &mut Builder, values: SiteValues, side: Side) -> Result<Value> {
    match side {
        Side::Output => Ok(values.u_co),
        Side::Input => b.transpose(values.v_ic),
    }
}

/// The units that each of the vectors f32 `[c, d]` counts, summed over all of them: a scalar.
///
/// - `t`: the threshold, a scalar
pub(crate) fn count(b: &mut Builder, vectors: Value, units: Units, t: Value) -> Result<Value> {
    let shares = shares(b, vectors, units.count)?;
    let names = ["unit_count", "unit_count_grad"];
    // Not `s / (s + t)`, whose derivative is a difference of two numbers that are nearly equal.
    b.elementwise_sum(names, units.uses as f64, [shares, t], |[s, t]| {
        1.0 - &t / (s + &t)
    })
}

/// A power of two, which changes no digit.
const LARGE: f32 = (1u64 << 40) as f32;

/// Added to the mean square of a vector that is so much larger.
const EPS: f32 = 1e-36;

/// For vectors f32 `[c, d]` the part of the squares that is in each unit, times the number of
/// units: f32 `[c, units]`.
pub(crate) fn shares(b: &mut Builder, vectors: Value, units: usize) -> Result<Value> {
    let (c, d) = (b.ty(vectors).rows(), b.ty(vectors).columns());
    let names = ["enlarged", "enlarged_grad"];
    let large = b.elementwise(names, [vectors], |[x]| x * LARGE)?;
    let ones = b.constant(1.0, &[d])?;
    let normed = b.rms_norm(large, ones, EPS)?;
    let squares = b.elementwise(["squares", "squares_grad"], [normed], |[y]| y.square())?;
    if units == d {
        return Ok(squares);
    }
    let columns = d / units;
    let runs = b.reshape(squares, &[c * units, columns])?;
    let mean = b.constant(rounded(1.0 / columns as f64), &[columns, 1])?;
    let means = b.matmul(runs, mean)?;
    b.reshape(means, &[c, units])
}

#[cfg(test)]
mod tests {
    use spd_engine::Store;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;
    use crate::losses::{Loss, Term};

    /// The refusal of weights of these kinds, for the sites of a residual MLP.
    fn refusal(kinds: &[&'static str]) -> String {
        let mut run = preset("tiny-resid", &Overrides::default()).unwrap().run;
        let term = Term::NonlinearityLocality(NonlinearityLocality {
            relative_threshold: Schedule::Constant(4.0),
            normalize_at_one: false,
            unit_kind_coefficients: kinds.iter().map(|kind| (*kind, 1.0)).collect(),
        });
        let coeff = Schedule::Constant(1.0);
        run.losses = vec![Loss::new(coeff, term)];
        let made = Decomposition::new(&run, &mut Store::new());
        made.err()
            .map_or_else(String::new, |fault| fault.to_string())
    }

    #[test]
    fn the_kinds_are_those_of_the_sites() {
        assert_eq!(refusal(&["neuron"]), "");
        let start = "[[loss]] nonlinearity_locality: unit_kind_coefficients: expected";
        assert_eq!(
            refusal(&["attention_head"]),
            format!(
                "{start} neuron, which the units of `layers.0.mlp_in` are, found attention_head; 0 leaves a kind out"
            )
        );
        assert_eq!(
            refusal(&["neuron", "deltanet_head"]),
            format!(
                "{start} the kinds of units that the sites have, found deltanet_head, which none has"
            )
        );
    }
}
