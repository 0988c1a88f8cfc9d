//! `global_shared_mlp`: one network for all sites, from their inputs side by side to the logits of
//! all their components. Sites are in the order of their names; an embedding shows its activations
//! `V[x]`. Exact GELU between layers.

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::WIDTHS;
use spd_engine::{Builder, Result, Value};

use super::all_sites::{all, by_name, share_out, side_by_side, width};
use super::layers::{AT_END, ImportanceTensor, Linear, Tensors, Weights, mlp, mlp_layers};
use super::{ImportanceFunction, Seen, hidden_dims};
use crate::run_file::reference::Made;
use crate::sites::Site;

/// One MLP from the inputs of all sites, side by side, to the components of all sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalSharedMlp {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
}

impl GlobalSharedMlp {
    fn layers<'s>(&self, sites: impl Iterator<Item = &'s Site>) -> Vec<Linear> {
        let (d_in, c) = sites.fold((0, 0), |(d_in, c), site| {
            (d_in + width(site), c + site.components)
        });
        mlp_layers("_global_ci_fn.layers", d_in, &self.hidden, c)
    }
}

impl ImportanceFunction for GlobalSharedMlp {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let hidden = table.need("hidden", WIDTHS)?;
        Some(Self { hidden })
    }

    fn details(&self) -> String {
        format!("{:?}", self.hidden)
    }

    fn from_reference(of: &mut Table<'_>, made: &mut Made) {
        hidden_dims(of, made);
    }

    fn to_reference(&self) -> Json {
        json!({
            "ci_config": { "mode": "global", "fn_type": "global_shared_mlp", "hidden_dims": self.hidden },
        })
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let mut tensors = Tensors::new(sites.len(), None);
        tensors.mlp(self.layers(sites.iter()), AT_END);
        tensors.list
    }

    fn logits(&self, b: &mut Builder, weights: Weights<'_>, seen: &Seen<'_>) -> Result<Vec<Value>> {
        let order = by_name(seen.iter().map(|seen| seen.site));
        let x = side_by_side(b, seen, &order)?;
        let layers = self.layers(seen.iter().map(|seen| seen.site));
        let x = mlp(b, weights, &layers, x)?;
        let mut logits = vec![None; seen.len()];
        share_out(b, x, seen, &order, &mut logits)?;
        Ok(all(logits))
    }
}
