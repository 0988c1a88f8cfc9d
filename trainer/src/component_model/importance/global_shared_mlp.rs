//! `global_shared_mlp`: one network for all sites, from their inputs side by side to the logits of
//! all their components. Sites are in the order of their names; an embedding shows its activations
//! `V[x]`. Exact GELU between layers.

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::Widths;
use spd_engine::ops::GeluKind;
use spd_engine::{Builder, Result, Value};

use super::{ImportanceFunction, ImportanceTensor, MlpLayer, SeenSite, mlp_layers, mlp_tensors};
use crate::networks::LayerKind;
use crate::sites::Site;

/// One MLP from the inputs of all sites, side by side, to the components of all sites.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GlobalSharedMlp {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
}

impl GlobalSharedMlp {
    fn layers<'s>(&self, sites: impl Iterator<Item = &'s Site>) -> Vec<MlpLayer> {
        let width = |site: &Site| match site.layer.kind {
            LayerKind::Embedding => site.components,
            _ => site.layer.d_in,
        };
        let (d_in, c) = sites.fold((0, 0), |(d_in, c), site| {
            (d_in + width(site), c + site.components)
        });
        mlp_layers("_global_ci_fn", d_in, &self.hidden, c)
    }
}

impl ImportanceFunction for GlobalSharedMlp {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let hidden = table.need("hidden", Widths)?;
        Some(Self { hidden })
    }

    fn details(&self) -> String {
        format!("{:?}", self.hidden)
    }

    fn is_over_all_sites() -> bool {
        true
    }

    fn to_reference(&self) -> Json {
        json!({
            "ci_config": { "mode": "global", "fn_type": "global_shared_mlp", "hidden_dims": self.hidden },
        })
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        mlp_tensors(self.layers(sites.iter()), None, sites.len())
    }

    fn logits(
        &self,
        b: &mut Builder,
        weight: &dyn Fn(&mut Builder, &str) -> Value,
        seen: &[SeenSite<'_>],
    ) -> Result<Vec<Value>> {
        let mut order: Vec<usize> = (0..seen.len()).collect();
        order.sort_by_key(|&index| seen[index].site.path());
        let mut inputs = Vec::with_capacity(seen.len());
        for &index in &order {
            let seen = &seen[index];
            inputs.push(match seen.site.layer.kind {
                LayerKind::Embedding => seen.activations(b)?,
                _ => seen.input,
            });
        }
        let mut x = b.concatenate(&inputs)?;
        let sites = seen.iter().map(|seen| seen.site);
        for (depth, layer) in self.layers(sites).iter().enumerate() {
            if depth > 0 {
                x = b.gelu(x, GeluKind::Exact)?;
            }
            let (weight, bias) = (weight(b, &layer.weight), weight(b, &layer.bias));
            x = b.linear_io(x, weight, Some(bias))?;
        }
        let mut logits = vec![x; seen.len()];
        let mut first = 0;
        for index in order {
            let next = first + seen[index].site.components;
            logits[index] = b.slice(x, first..next)?;
            first = next;
        }
        Ok(logits)
    }
}
