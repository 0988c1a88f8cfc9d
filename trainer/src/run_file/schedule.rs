//! A learning rate: a number, or a table that says how it moves.
//!
//! # Keys of a schedule
//!
//! - `start` | | `start_val` | value after the warm-up, at least 0
//! - `shape` | `"constant"` | `fn_type` | course after the warm-up; or `"linear"` or `"cosine"`
//! - `warmup` | 0 | `warmup_pct` | fraction of the steps that rise from 0, from 0 to 1
//! - `final_fraction` | constant: 1; else 0 | `final_val_frac` | last value over `start`, from 0 to
//!   1

use serde::Serialize;
use spd_configs::{reader::Table, values::Number, words};

/// A learning rate over time: `warmup` of the steps rise from zero, the rest follow `shape`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Schedule {
    /// Value after the warm-up.
    pub start: f64,
    /// Course after the warm-up.
    pub shape: Shape,
    /// Fraction of the steps spent rising, in `[0, 1]`.
    pub warmup: f64,
    /// Last value as a fraction of `start`; must be 1 for a constant.
    pub final_fraction: f64,
}

words! {
    /// Course of a learning rate after its warm-up.
    pub enum Shape {
        /// Stays.
        Constant = "constant",
        /// Straight to `final_fraction`.
        Linear = "linear",
        /// Half a cosine to `final_fraction`.
        Cosine = "cosine",
    }
}

pub(crate) fn read(table: &mut Table<'_>, key: &'static str) -> Option<Schedule> {
    if table.has_table(key) {
        return table.table(key, read_table);
    }
    let start = table.need(key, Number::LEARNING_RATE)?;
    Some(Schedule {
        start,
        shape: Shape::Constant,
        warmup: 0.0,
        final_fraction: 1.0,
    })
}

fn read_table(table: &mut Table<'_>) -> Option<Schedule> {
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
    Some(Schedule {
        start: start?,
        shape: shape?,
        warmup: warmup?,
        final_fraction: final_fraction?,
    })
}
