//! `shared_mlp`: one network for each site, from its input `x` to the logits of all its components.
//! Exact GELU between layers.

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::Widths;
use spd_engine::ops::GeluKind;
use spd_engine::{Builder, Result, Value};

use super::{ImportanceFunction, ImportanceTensor, MlpLayer, SeenSite, mlp_layers, mlp_tensors};
use crate::sites::Site;

/// One MLP from `x` to all components.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SharedMlp {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
}

impl SharedMlp {
    fn layers(&self, site: &Site) -> Vec<MlpLayer> {
        mlp_layers(
            &site.dashed(),
            site.layer.d_in,
            &self.hidden,
            site.components,
        )
    }
}

impl ImportanceFunction for SharedMlp {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let hidden = table.need("hidden", Widths)?;
        Some(Self { hidden })
    }

    fn details(&self) -> String {
        format!("{:?}", self.hidden)
    }

    fn to_reference(&self) -> Json {
        json!({ "ci_fn_type": "shared_mlp", "ci_fn_hidden_dims": self.hidden })
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let sites = sites.iter().enumerate();
        sites
            .flat_map(|(index, site)| mlp_tensors(self.layers(site), None, index))
            .collect()
    }

    fn logits(
        &self,
        b: &mut Builder,
        weight: &dyn Fn(&mut Builder, &str) -> Value,
        seen: &[SeenSite<'_>],
    ) -> Result<Vec<Value>> {
        let mut all = Vec::with_capacity(seen.len());
        for seen in seen {
            let mut x = seen.input;
            for (depth, layer) in self.layers(seen.site).iter().enumerate() {
                if depth > 0 {
                    x = b.gelu(x, GeluKind::Exact)?;
                }
                let (weight, bias) = (weight(b, &layer.weight), weight(b, &layer.bias));
                x = b.linear_io(x, weight, Some(bias))?;
            }
            all.push(x);
        }
        Ok(all)
    }
}
