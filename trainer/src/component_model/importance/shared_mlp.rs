//! `shared_mlp`: one network for each site, from its input `x` to the logits of all its components.
//! Exact GELU between layers.

use spd_engine::{Builder, Result, Value};

use super::SeenSite;
use super::layers::{Linear, Weights, mlp};
use super::site_mlp::{MlpShape, SiteFunction};
use crate::sites::Site;

/// One MLP from `x` to all components.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedMlp;

impl SiteFunction for SharedMlp {
    const NAME: &'static str = "shared_mlp";

    fn shape(site: &Site) -> MlpShape {
        MlpShape {
            d_in: site.layer.d_in,
            d_out: site.components,
            components: None,
        }
    }

    fn logits(
        b: &mut Builder,
        weights: Weights<'_>,
        layers: &[Linear],
        seen: &SeenSite<'_>,
    ) -> Result<Value> {
        mlp(b, weights, layers, seen.input)
    }
}
