//! `faithfulness`: do the components of each matrix still add up to the matrix?
//!
//! `1/N sum over sites of |W - (V U)^T|^2`, "Optimizing for faithfulness" in the SPD paper. The
//! paper's `N` counts every weight of the target; ours counts the decomposed ones, as the reference
//! does, so the loss reads as the mean squared error of a weight. The only place where the weight
//! delta is formed.
//!
//! Relative, it is the mean over sites of `|W - (V U)^T|^2 / |W|^2`: the part of each matrix that
//! is left over, 1 where the components are zero. A small matrix of small weights then counts as
//! much as a large one, and a coefficient means the same for any target.
//!
//! # Keys of `[[loss]]`
//!
//! - faithfulness: `relative` | false | | whether each site's squared error is divided by the
//!   squares of its own weights, and sites count alike; the warm-up follows it

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::values::Flag;
use spd_engine::ops::MatMul;
use spd_engine::{Builder, Result, Store, Value};

use super::{Loss, LossInputs, LossTerm, Term};
use crate::component_model::{ComponentModel, SiteValues, Sites};
use crate::networks::LayerKind;
use crate::sites::Site;

/// Squared error of the summed components.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Faithfulness {
    /// Whether it is relative to the weights of each site. Left out of the file where it says what
    /// every older file means.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub relative: bool,
}

impl LossTerm for Faithfulness {
    fn read(table: &mut Table<'_>, _: Sites) -> Option<Self> {
        let relative = table.or("relative", Flag, false)?;
        Some(Self { relative })
    }

    fn left_out(&self) -> Option<&'static str> {
        self.relative.then_some("relative")
    }

    fn details(&self) -> Vec<String> {
        let relative = self.relative.then(|| "relative".to_owned());
        relative.into_iter().collect()
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        self.of(b, from.model, from.store)
    }
}

impl Faithfulness {
    /// As the losses of a run have it.
    pub(crate) fn of_run(losses: &[Loss]) -> Self {
        let found = losses.iter().find_map(|loss| match loss.term {
            Term::Faithfulness(found) => Some(found),
            _ => None,
        });
        found.unwrap_or_default()
    }

    /// The error of a model's components, a scalar; the gradient flows to `V` and `U`.
    pub(crate) fn of(
        self,
        b: &mut Builder,
        model: &ComponentModel,
        store: &Store,
    ) -> Result<Value> {
        let mut squares = Vec::with_capacity(model.sites.len());
        let mut weights = 0;
        for (index, site) in model.sites.iter().enumerate() {
            let values = model.site_values(b, store, index)?;
            let weight = model.site_weight(b, store, site)?;
            let delta = delta(b, values, (site, weight))?;
            weights += b.ty(delta).len();
            let left = b.sum_squares(delta)?;
            squares.push(if self.relative {
                let all = b.sum_squares(weight)?;
                let names = ["relative_to", "relative_to_grad"];
                b.elementwise(names, [left, all], |[left, all]| left / all)?
            } else {
                left
            });
        }
        let count = if self.relative {
            squares.len()
        } else {
            weights
        };
        let share = 1.0 / count as f64;
        let terms: Vec<(f64, Value)> = squares.into_iter().map(|value| (share, value)).collect();
        b.weighted_sum(&terms)
    }
}

/// The part of a site's matrix that its components leave over, oriented as the matrix is.
fn delta(b: &mut Builder, values: SiteValues, (site, weight): (&Site, Value)) -> Result<Value> {
    let SiteValues { v_ic, u_co } = values;
    let is_turned = site.layer.kind == LayerKind::OutIn;
    let op = MatMul {
        a_transposed: is_turned,
        b_transposed: is_turned,
        alpha: -1.0,
    };
    let (left, right) = if is_turned {
        (u_co, v_ic)
    } else {
        (v_ic, u_co)
    };
    b.matmul_into(op, left, right, weight)
}
