//! `mlp`: a network for each component, from its own activation `x V` to its logit. Exact GELU
//! between layers.

use spd_engine::ops::{ComponentMlpWeights, GeluKind};
use spd_engine::{Builder, Result, Value};

use super::SeenSite;
use super::layers::{Linear, Weights};
use super::site_mlp::{MlpShape, SiteFunction, values};
use crate::sites::Site;

/// Per component a scalar MLP of its own activation `x V`.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp;

impl SiteFunction for Mlp {
    const NAME: &'static str = "mlp";
    const READS_EMBEDDINGS: bool = true;

    fn shape(site: &Site) -> MlpShape {
        MlpShape {
            d_in: 1,
            d_out: 1,
            components: Some(site.components),
        }
    }

    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value> {
        let acts = seen.activations(b)?;
        let layers = values(b, weights, layers);
        if let [[w1, b1], [w2, b2]] = layers[..] {
            return b.component_mlp(acts, &ComponentMlpWeights { w1, b1, w2, b2 });
        }
        let hidden = b.parallel_linear(acts, layers[0][0], layers[0][1])?;
        per_component(b, hidden, &layers[1..])
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
