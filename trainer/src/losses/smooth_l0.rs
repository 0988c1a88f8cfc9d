//! `smooth_l0`: how many components are important? The sum over sites and components of the mean
//! over the site's rows of
//!
//! ```text
//! psi(g) = g^2 / (g^2 + gamma^2)
//! ```
//!
//! which is 0 at 0, one half at `gamma`, and nears 1: as `gamma` falls, it becomes the number of
//! importances that are not 0. With `normalize_at_one` it is multiplied by `1 + gamma^2`, which
//! makes `psi(1) = 1`. Its slope `2 g gamma^2 / (g^2 + gamma^2)^2` is at most `0.65 / gamma`, so no
//! gradient grows without bound as an importance nears 0, as that of a power below 1 does.
//!
//! `g` is the penalised importance; see [`ops::ImportanceGates`]. How often a component is
//! important is weighed by the loss `frequency`.
//!
//! # Keys of `[[loss]]`
//!
//! - smooth_l0: `gamma` | | | importance that counts half, from 1e-6 to 1e6; a schedule
//! - smooth_l0: `normalize_at_one` | false | | whether importance 1 counts 1, and not a little less

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number};
use spd_engine::ops::Penalty;
use spd_engine::{Builder, Result, Value, ops};

use super::{LossInputs, LossTerm, penalty};
use crate::component_model::Sites;
use crate::run_file::schedule::{self, Schedule};

/// A smooth count of important components.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SmoothL0 {
    /// The importance that counts half.
    pub gamma: Schedule,
    /// Whether importance 1 counts 1.
    pub normalize_at_one: bool,
}

/// Squares of these, and their reciprocals, are far from the ends of f32.
const GAMMA: Number = Number::new("a number from 1e-6 to 1e6", |gamma| {
    (1e-6..=1e6).contains(&gamma)
});

impl LossTerm for SmoothL0 {
    fn read(table: &mut Table<'_>, _: Sites) -> Option<Self> {
        let gamma = schedule::read(table, "gamma", GAMMA);
        let normalize_at_one = table.or("normalize_at_one", Flag, false);
        all_read! { Self: gamma, normalize_at_one }
    }

    fn penalty(&self) -> Option<(Penalty, &'static str)> {
        let normalized = self.normalize_at_one;
        Some((Penalty::Smooth { normalized }, "gamma"))
    }

    fn details(&self) -> Vec<String> {
        let mut details = vec![format!("gamma {}", self.gamma)];
        if self.normalize_at_one {
            details.push("1 at 1".to_owned());
        }
        details
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let sums = penalty::sums(b, from)?;
        penalty::value(b, from, &sums, ops::ImportanceMinimality::mean)
    }

    fn step_scalars(&self, _: &str, step: u64, steps: u64) -> Vec<(String, f64)> {
        vec![("gamma".to_owned(), self.gamma.at(step, steps))]
    }
}
