//! `frequency`: how often is each component important? It lets a component that is rarely important
//! be so at less cost, and weighs on those that are important often.
//!
//! With `f_c` the mean over rows of a component's penalised importances, those of `smooth_l0` or
//! `importance_minimality`, whichever the run has, it is the sum over sites and components of
//!
//! ```text
//! Phi(f) = f log2(1 + r f)      Phi'(f) = log2(1 + r f) + r f / ((1 + r f) ln 2)
//! ```
//!
//! with `r = reference_count`, whatever the size of a batch. Its coefficient is its own. The mean
//! is that of the whole batch before `Phi` is taken: a mean of `Phi` over parts would be another
//! number.
//!
//! With a half-life `h`, `f` is an estimate over steps, an exponential average that starts
//! unbiased:
//!
//! ```text
//! e <- e + a (f - e)            a = 1 - 2^(-1/h)      e = 0 at the start
//! f^ = e / (1 - 2^(-(t+1)/h))   after step t, from 0
//! ```
//!
//! The value is `Phi(f^)` and the gradient `Phi'(f^) df`: the newest batch moves `f^` by as much as
//! if it were all of it. The first step is as without an estimate. The estimates are the state of
//! the loss, the same on all ranks; they are of sums over the rows of a batch, `n e`.
//!
//! # Keys of `[[loss]]`
//!
//! - frequency: `reference_count` | | | rows that a frequency is a part of under the logarithm,
//!   whatever the size of a batch
//! - frequency: `halflife` | each batch's own | | steps after which a batch counts half in the
//!   frequencies, which then are exponential averages over steps; at most 1e6

use std::f64::consts::LN_2;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Number, Whole, brief};
use spd_engine::{Builder, Result, Value, ops};

use super::{Extent, LossInputs, LossTerm, Sharing, StateTensor, penalty};
use crate::component_model::Sites;
use crate::networks::Start;
use crate::rounded::rounded;
use crate::sites::Site;

/// Weight on components that are often important.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Frequency {
    /// Rows that a frequency is a part of under the logarithm.
    pub reference_count: u64,
    /// Steps after which an observation counts half in the estimate of frequencies; `None` reads
    /// those of the batch alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub halflife: Option<f64>,
}

/// Beyond, f32 would not notice an observation.
const HALFLIFE: Number = Number::new("a number of steps above 0 and at most 1e6", |steps| {
    steps > 0.0 && steps <= 1e6
});

/// The step scalar that takes the start from zero out of estimates.
const CORRECTION: &str = "frequency_correction";

impl LossTerm for Frequency {
    fn read(table: &mut Table<'_>, _: Sites) -> Option<Self> {
        let reference_count = table.need("reference_count", Whole::at_least(1));
        let halflife = table.maybe("halflife", HALFLIFE);
        all_read! { Self: reference_count, halflife }
    }

    fn reads_penalty(&self) -> bool {
        true
    }

    fn details(&self) -> Vec<String> {
        let mut details = vec![format!("of {} rows", self.reference_count)];
        if let Some(halflife) = self.halflife {
            details.push(format!("half-life {}", brief(halflife)));
        }
        details
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        let mut sums = penalty::sums(b, from)?;
        if let Some(weight) = self.weight() {
            let correction = b.step_scalar(CORRECTION);
            for (sums, site) in sums.iter_mut().zip(&from.model.sites) {
                let estimate = from.state(b, &site.dashed());
                *sums = b.average(estimate, *sums, weight, correction)?;
            }
        }
        penalty::value(b, from, &sums, |rows| ops::ImportanceMinimality {
            activity: 0.0,
            beta: 1.0,
            counted: self.reference_count,
            ..ops::ImportanceMinimality::mean(rows)
        })
    }

    fn step_scalars(&self, _: &str, step: u64, _: u64) -> Vec<(String, f64)> {
        let correction = |halflife: f64| {
            let halves = (step + 1) as f64 / halflife;
            (CORRECTION.to_owned(), -(-LN_2 * halves).exp_m1())
        };
        self.halflife.map(correction).into_iter().collect()
    }

    /// An estimate of the penalty sums of each site.
    fn state(&self, sites: &[Site], _: &Extent) -> Vec<StateTensor> {
        let sites = sites.iter().filter(|_| self.halflife.is_some());
        let tensor = |site: &Site| StateTensor {
            name: site.dashed(),
            sharing: Sharing::Replicated,
            dims: vec![site.components],
            start: Start::Zeros,
        };
        sites.map(tensor).collect()
    }

    fn update(&self, b: &mut Builder, from: &LossInputs<'_>, guards: &[Value]) -> Result<()> {
        let Some(weight) = self.weight() else {
            return Ok(());
        };
        let sums = penalty::sums(b, from)?;
        for (site, sums) in from.model.sites.iter().zip(sums) {
            let estimate = from.state(b, &site.dashed());
            b.keep_average(estimate, sums, weight, guards)?;
        }
        Ok(())
    }
}

impl Frequency {
    /// The weight of the newest observation in the estimate, where there is one.
    fn weight(&self) -> Option<f32> {
        let weight = |halflife: f64| -(-LN_2 / halflife).exp_m1();
        self.halflife.map(weight).map(rounded)
    }
}
