//! `mlp`: a network for each component, from its own activation `x V` to its logit. Exact GELU
//! between layers.

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::Widths;
use spd_engine::ops::{ComponentMlpWeights, GeluKind};
use spd_engine::{Builder, Result, Value};

use super::{ImportanceFunction, ImportanceTensor, MlpLayer, SeenSite, mlp_layers, mlp_tensors};
use crate::sites::Site;

/// Per component a scalar MLP of its own activation `x V`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Mlp {
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
}

impl Mlp {
    fn layers(&self, site: &Site) -> Vec<MlpLayer> {
        mlp_layers(&site.dashed(), 1, &self.hidden, 1)
    }
}

impl ImportanceFunction for Mlp {
    fn read(table: &mut Table<'_>) -> Option<Self> {
        let hidden = table.need("hidden", Widths)?;
        Some(Self { hidden })
    }

    fn details(&self) -> String {
        format!("{:?}", self.hidden)
    }

    fn to_reference(&self) -> Json {
        json!({ "ci_fn_type": "mlp", "ci_fn_hidden_dims": self.hidden })
    }

    fn refuses(&self, _site: &Site) -> Option<String> {
        None
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
            let acts = seen.activations(b)?;
            let layers = self.layers(seen.site);
            let layers: Vec<[Value; 2]> = layers
                .iter()
                .map(|layer| [weight(b, &layer.weight), weight(b, &layer.bias)])
                .collect();
            all.push(match layers[..] {
                [[w1, b1], [w2, b2]] => {
                    b.component_mlp(acts, &ComponentMlpWeights { w1, b1, w2, b2 })?
                }
                _ => {
                    let hidden = b.parallel_linear(acts, layers[0][0], layers[0][1])?;
                    per_component(b, hidden, &layers[1..])?
                }
            });
        }
        Ok(all)
    }
}

/// The layers behind the first, a network a component: f32 `[.., c, h]` to logits `[.., c]`.
pub(super) fn per_component(
    b: &mut Builder,
    hidden: Value,
    layers: &[[Value; 2]],
) -> Result<Value> {
    let mut x = hidden;
    for &[weight, bias] in layers {
        x = b.gelu(x, GeluKind::Exact)?;
        x = b.parallel_linear(x, weight, bias)?;
    }
    Ok(x)
}
