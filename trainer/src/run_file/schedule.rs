//! A number over the course of a run: a constant, or knots that it passes through. A learning rate
//! may also be a table.
//!
//! # Keys of a knot
//!
//! - `at`, `value` | | | fraction of the run, from 0 to 1 and above that of the knot before; the
//!   value there, which stays before the first knot and after the last
//! - `shape` | `"linear"` | | the way from the knot before: straight, or half a `"cosine"`, or
//!   `"constant"`, which jumps at this knot
//!
//! # Keys of a learning rate
//!
//! - `start` | | `start_val` | value after the warm-up, at least 0
//! - `shape` | `"constant"` | `fn_type` | course after the warm-up; or `"linear"` or `"cosine"`
//! - `warmup` | 0 | `warmup_pct` | fraction of the steps that rise from 0, from 0 to 1
//! - `final_fraction` | constant: 1; else 0 | `final_val_frac` | last value over `start`, from 0 to
//!   1

use std::fmt;

use serde::Serialize;
use spd_configs::values::{Number, Or, brief};
use spd_configs::{all_read, reader::Table, words};

/// A number over the course of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Schedule {
    /// The same at every step.
    Constant(f64),
    /// A learning rate by its table.
    Decay(Decay),
    /// From one to the next, at least one, in the order of the run.
    Knots(Vec<Knot>),
}

/// A learning rate over time: `warmup` of the steps rise from zero, the rest follow `shape`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Decay {
    /// Value after the warm-up.
    pub start: f64,
    /// Course after the warm-up.
    pub shape: Shape,
    /// Fraction of the steps spent rising, in `[0, 1]`.
    pub warmup: f64,
    /// Last value as a fraction of `start`; must be 1 for a constant.
    pub final_fraction: f64,
}

/// A value that a schedule has at a part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Knot {
    /// Fraction of the run, in `[0, 1]`.
    pub at: f64,
    /// The value there.
    pub value: f64,
    /// The way to it from the knot before.
    pub shape: Shape,
}

words! {
    /// Course of a number to its next value.
    pub enum Shape {
        /// Stays.
        Constant = "constant",
        /// Straight.
        Linear = "linear",
        /// Half a cosine.
        Cosine = "cosine",
    }
}

impl Decay {
    /// A learning rate that stays.
    pub fn constant(start: f64) -> Self {
        Self {
            start,
            shape: Shape::Constant,
            warmup: 0.0,
            final_fraction: 1.0,
        }
    }
}

/// A constant; or each value it has, in order.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = match self {
            Self::Constant(value) => vec![*value],
            Self::Decay(decay) => vec![decay.start, decay.start * decay.final_fraction],
            Self::Knots(knots) => knots.iter().map(|knot| knot.value).collect(),
        };
        let values: Vec<String> = values.into_iter().map(brief).collect();
        f.write_str(&values.join(" to "))
    }
}

/// Reads a number or knots.
///
/// - `number`: the kind of all its values
pub(crate) fn read(table: &mut Table<'_>, key: &'static str, number: Number) -> Option<Schedule> {
    if table.has_list(key) {
        return read_knots(table, key, number);
    }
    let knots = "knots such as [{ at = 0, value = 1 }, { at = 1, value = 0.1 }]";
    table.need(key, Or(number, knots)).map(Schedule::Constant)
}

/// Reads a learning rate: a number, a table, or knots.
pub(crate) fn read_rate(table: &mut Table<'_>, key: &'static str) -> Option<Schedule> {
    if table.has_list(key) {
        return read_knots(table, key, Number::NOT_NEGATIVE);
    }
    let decay = if table.has_table(key) {
        table.table(key, read_decay)
    } else {
        let rate = "a table such as { start = 1e-3, shape = \"cosine\" }";
        let rate = table.need(key, Or(Number::NOT_NEGATIVE, rate));
        rate.map(Decay::constant)
    };
    decay.map(Schedule::Decay)
}

/// The same where it may be left out.
pub(crate) fn read_rate_or_none(
    table: &mut Table<'_>,
    key: &'static str,
) -> Option<Option<Schedule>> {
    match table.raw(key) {
        Some(_) => read_rate(table, key).map(Some),
        None => Some(None),
    }
}

fn read_knots(table: &mut Table<'_>, key: &'static str, number: Number) -> Option<Schedule> {
    let mut before = None;
    let knots = table.rows(key, |knot| {
        let at = knot.need("at", Number::FRACTION);
        let value = knot.need("value", number);
        let shape = knot.or("shape", Shape::WORDS, Shape::Linear);
        if let (Some(before), Some(at)) = (before, at)
            && at <= before
        {
            let message = format!(
                "expected a number above that of the knot before, {}, found {}",
                brief(before),
                brief(at)
            );
            knot.refuse::<()>("at", message);
        }
        before = at;
        all_read! { Knot: at, value, shape }
    });
    knots.map(Schedule::Knots)
}

fn read_decay(table: &mut Table<'_>) -> Option<Decay> {
    let start = table.need("start", Number::NOT_NEGATIVE);
    let shape = table.or("shape", Shape::WORDS, Shape::Constant);
    let warmup = table.or("warmup", Number::FRACTION, 0.0);
    let natural_end = if shape == Some(Shape::Constant) {
        1.0
    } else {
        0.0
    };
    let final_fraction = table.or("final_fraction", Number::FRACTION, natural_end);
    match (shape, final_fraction) {
        (Some(Shape::Constant), Some(fraction)) if fraction < 1.0 => table.refuse(
            "final_fraction",
            format!(
                "expected 1 for the shape \"constant\", found {fraction}; \
                 is it \"linear\" or \"cosine\"?"
            ),
        )?,
        _ => {}
    }
    all_read! { Decay: start, shape, warmup, final_fraction }
}
