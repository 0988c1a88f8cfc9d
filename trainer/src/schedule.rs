//! Numbers that follow the step: learning rates.

use crate::run_file::{Schedule, Shape};

/// The learning rate at `step` of `steps`.
///
/// `steps * warmup` steps (rounded down) rise from 0; the rest follow the shape, which reaches its
/// last value at `steps - 1`. Source: the reference's schedule.
pub fn learning_rate(schedule: &Schedule, step: u64, steps: u64) -> f64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a fraction of the steps"
    )]
    let warmup = (steps as f64 * schedule.warmup) as u64;
    if step < warmup {
        return schedule.start * step as f64 / warmup as f64;
    }
    let decay = steps - warmup;
    if decay <= 1 {
        return schedule.start;
    }
    let progress = (step - warmup) as f64 / (decay - 1) as f64;
    let last = schedule.final_fraction;
    let share = match schedule.shape {
        Shape::Constant => 1.0,
        Shape::Linear => last + (1.0 - last) * (1.0 - progress),
        Shape::Cosine => {
            last + (1.0 - last) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
        }
    };
    schedule.start * share
}
