//! `vector_mlp`: a network for each component, from the site's input `x` to its logit. Exact GELU
//! between layers.

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::Widths;
use spd_engine::{Builder, Result, Value};

use super::mlp::per_component;
use super::{ImportanceFunction, ImportanceTensor, MlpLayer, SeenSite, mlp_layers, mlp_tensors};
use crate::sites::Site;

/// Per component an MLP of the site's input `x`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VectorMlp {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
}

impl VectorMlp {
    fn layers(&self, site: &Site) -> Vec<MlpLayer> {
        mlp_layers(&site.dashed(), site.layer.d_in, &self.hidden, 1)
    }
}

impl ImportanceFunction for VectorMlp {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let hidden = table.need("hidden", Widths)?;
        Some(Self { hidden })
    }

    fn details(&self) -> String {
        format!("{:?}", self.hidden)
    }

    fn to_reference(&self) -> Json {
        json!({ "ci_fn_type": "vector_mlp", "ci_fn_hidden_dims": self.hidden })
    }

    fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let sites = sites.iter().enumerate();
        sites
            .flat_map(|(index, site)| mlp_tensors(self.layers(site), Some(site.components), index))
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
            let layers = self.layers(seen.site);
            let layers: Vec<[Value; 2]> = layers
                .iter()
                .map(|layer| [weight(b, &layer.weight), weight(b, &layer.bias)])
                .collect();
            // All components see the same input, so their first layers are one matrix: [c, i, h] as
            // [i, c h].
            let [w_cih, bias] = layers[0];
            let w_ich = b.second_first(w_cih)?;
            let hidden = b.linear_io(seen.input, w_ich, Some(bias))?;
            all.push(per_component(b, hidden, &layers[1..])?);
        }
        Ok(all)
    }
}
