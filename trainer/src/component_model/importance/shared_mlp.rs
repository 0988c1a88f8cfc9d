//! `shared_mlp`: one network for each site, from its input `x` to the logits of all its components.
//! Exact GELU between layers.

use spd_engine::ops::GeluKind;
use spd_engine::{Builder, Result, Value};

use super::site_mlp::{MlpShape, SiteFunction};
use super::{MlpLayer, SeenSite};
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
        weight: &dyn Fn(&mut Builder, &str) -> Value,
        layers: &[MlpLayer],
        seen: &SeenSite<'_>,
    ) -> Result<Value> {
        let mut x = seen.input;
        for (depth, layer) in layers.iter().enumerate() {
            if depth > 0 {
                x = b.gelu(x, GeluKind::Exact)?;
            }
            let (weight, bias) = (weight(b, &layer.weight), weight(b, &layer.bias));
            x = b.linear_io(x, weight, Some(bias))?;
        }
        Ok(x)
    }
}
