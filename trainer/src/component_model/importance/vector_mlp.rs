//! `vector_mlp`: a network for each component, from the site's input `x` to its logit. Exact GELU
//! between layers.

use spd_engine::{Builder, Result, Value};

use super::SeenSite;
use super::layers::{Linear, Weights};
use super::mlp::per_component;
use super::site_mlp::{MlpShape, SiteFunction, values};
use crate::sites::Site;

/// Per component an MLP of the site's input `x`.
#[derive(Debug, Clone, PartialEq)]
pub struct VectorMlp;

impl SiteFunction for VectorMlp {
    const NAME: &'static str = "vector_mlp";

    fn shape(site: &Site) -> MlpShape {
        MlpShape {
            d_in: site.layer.d_in,
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
        let layers = values(b, weights, layers);
        // All components see the same input, so their first layers are one matrix: [c, i, h] as
        // [i, c h].
        let [w_cih, bias] = layers[0];
        let w_ich = b.second_first(w_cih)?;
        let hidden = b.linear_io(seen.input, w_ich, Some(bias))?;
        per_component(b, hidden, &layers[1..])
    }
}
