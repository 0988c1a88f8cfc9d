//! Numbers that follow the step: learning rates, coefficients.

use std::f64::consts::PI;

use spd_engine::ops::Weight;
use spd_engine::{Builder, Result, Value};

use crate::rounded::whole;
use crate::run_file::{Decay, Knot, Schedule, Shape};

/// A step scalar as a value.
///
/// # Errors
///
/// Never: it has no shape.
pub(crate) fn scalar(b: &mut Builder, name: &str) -> Result<Value> {
    let one = b.constant(1.0, &[])?;
    let weight = b.step_scalar(name);
    b.weighted_sum(&[(Weight::Step(weight), one)])
}

impl Schedule {
    /// Its value at `step` of `steps`, the last of which is `steps - 1`.
    pub fn at(&self, step: u64, steps: u64) -> f64 {
        match self {
            Self::Constant(value) => *value,
            Self::Decay(decay) => decay.at(step, steps),
            Self::Knots(knots) => {
                let last = steps.saturating_sub(1).max(1);
                along(knots, step as f64 / last as f64)
            }
        }
    }
}

impl Decay {
    /// `steps * warmup` steps (rounded down) rise from 0; the rest follow the shape, which reaches
    /// its last value at `steps - 1`. Source: the reference's schedule.
    fn at(&self, step: u64, steps: u64) -> f64 {
        let warmup = whole(steps as f64 * self.warmup) as u64;
        if step < warmup {
            return self.start * step as f64 / warmup as f64;
        }
        let decay = steps - warmup;
        if decay <= 1 {
            return self.start;
        }
        let progress = (step - warmup) as f64 / (decay - 1) as f64;
        self.start * self.shape.between(1.0, self.final_fraction, progress)
    }
}

/// The value at a fraction of the run; it stays before the first knot and from the last one on.
fn along(knots: &[Knot], fraction: f64) -> f64 {
    let behind = knots.partition_point(|knot| knot.at <= fraction);
    match (knots[..behind].last(), knots.get(behind)) {
        (Some(from), Some(to)) => {
            let progress = (fraction - from.at) / (to.at - from.at);
            to.shape.between(from.value, to.value, progress)
        }
        (Some(end), None) | (None, Some(end)) => end.value,
        (None, None) => unreachable!("a schedule has a knot"),
    }
}

impl Shape {
    /// The value on the way from one to another, of which this part is done; at all of it, a
    /// constant is still the first.
    fn between(self, from: f64, to: f64, progress: f64) -> f64 {
        match self {
            Self::Constant => from,
            Self::Linear => to + (from - to) * (1.0 - progress),
            Self::Cosine => to + (from - to) * 0.5 * (1.0 + (PI * progress).cos()),
        }
    }
}
