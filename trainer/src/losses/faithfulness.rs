//! `faithfulness`: do the components of each matrix still add up to the matrix?
//!
//! `1/N sum over sites of |W - (V U)^T|^2`, "Optimizing for faithfulness" in the SPD paper. The
//! paper's `N` counts every weight of the target; ours counts the decomposed ones, as the reference
//! does, so the loss reads as the mean squared error of a weight. The only place where the weight
//! delta is formed.

use serde::Serialize;
use spd_configs::reader::Table;
use spd_engine::ops::MatMul;
use spd_engine::{Builder, Result, Store, Value};

use super::{LossInputs, LossTerm};
use crate::component_model::{ComponentModel, SiteValues, Sites};
use crate::networks::LayerKind;

/// Mean squared error of the summed components.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Faithfulness;

impl LossTerm for Faithfulness {
    fn read(_: &mut Table<'_>, _: Sites) -> Option<Self> {
        Some(Self)
    }

    /// Every evaluation has it as it is.
    fn is_measurable() -> bool {
        false
    }

    fn value(&self, b: &mut Builder, from: &LossInputs<'_>) -> Result<Value> {
        from.model.faithfulness(b, from.store)
    }
}

impl ComponentModel {
    /// Mean squared weight delta over all decomposed weights, a scalar; the gradient flows to `V`
    /// and `U`.
    pub(crate) fn faithfulness(&self, b: &mut Builder, store: &Store) -> Result<Value> {
        let mut squares = Vec::with_capacity(self.sites.len());
        let mut weights = 0;
        for (index, site) in self.sites.iter().enumerate() {
            let SiteValues { v_ic, u_co } = self.site_values(b, store, index)?;
            let weight = self.site_weight(b, store, site)?;
            let delta = match site.layer.kind {
                LayerKind::OutIn => {
                    let op = MatMul {
                        a_transposed: true,
                        b_transposed: true,
                        alpha: -1.0,
                    };
                    b.matmul_into(op, u_co, v_ic, weight)?
                }
                LayerKind::InOut
                | LayerKind::Embedding
                | LayerKind::Identity
                | LayerKind::Filters => {
                    let op = MatMul {
                        a_transposed: false,
                        b_transposed: false,
                        alpha: -1.0,
                    };
                    b.matmul_into(op, v_ic, u_co, weight)?
                }
            };
            weights += b.ty(delta).len();
            squares.push((1.0, b.sum_squares(delta)?));
        }
        let terms: Vec<(f64, Value)> = squares
            .into_iter()
            .map(|(weight, value)| (weight / weights as f64, value))
            .collect();
        b.weighted_sum(&terms)
    }
}
