//! One pass through a target: where its linear layers become sites.
//!
//! A clean pass computes the frozen layers and keeps what goes in and out of them. A masked pass computes the sites it is
//! given through their components, and every other layer as it is. Both are resolved when the program is built: at
//! run time there is no hook, no table and no branch, and what a masked pass shares with the clean one is computed
//! once, because equal ops on equal values are one value.
//!
//! Where the run puts an identity matrix before a layer, the layer's input goes through it first, as through a layer of
//! its own: model code does not know of it.

use std::collections::BTreeMap;

use spd_configs::pre_identity;
use spd_engine::ops::{MaskValues, SiteInputs};
use spd_engine::{Builder, Result, Value};

use crate::target_models::linear::{Linear, Orientation};

/// A site in a masked pass.
#[derive(Debug, Clone, Copy)]
pub struct MaskedSite {
    /// `V`, f32 `[d_in, c]`.
    pub v_ic: Value,
    /// `U`, f32 `[c, d_out]`.
    pub u_co: Value,
    /// Masks of its components.
    pub masks: MaskValues,
}

/// The layers of one pass, with the identity matrices before them.
pub struct Pass<'a> {
    layers: &'a [Linear],
    weights: &'a BTreeMap<String, Value>,
    masked: BTreeMap<String, MaskedSite>,
    /// Input of each layer that was computed, by path.
    pub inputs: BTreeMap<String, Value>,
    /// Output of each layer that was computed, by path.
    pub outputs: BTreeMap<String, Value>,
}

impl<'a> Pass<'a> {
    /// A pass through the frozen layers.
    pub fn clean(layers: &'a [Linear], weights: &'a BTreeMap<String, Value>) -> Self {
        Self::masked(layers, weights, BTreeMap::new())
    }

    /// A pass through the components of some layers, by path.
    pub fn masked(
        layers: &'a [Linear],
        weights: &'a BTreeMap<String, Value>,
        masked: BTreeMap<String, MaskedSite>,
    ) -> Self {
        Self {
            layers,
            weights,
            masked,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
        }
    }

    /// The layer at `path`: f32 `[.., d_in]` to `[.., d_out]`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    ///
    /// # Panics
    ///
    /// When the model has no such layer: model code and its list of layers are one file.
    pub fn linear(&mut self, b: &mut Builder, path: &str, x: Value) -> Result<Value> {
        let x = match self.layer(&pre_identity(path)) {
            Some(identity) => self.through(b, identity, x)?,
            None => x,
        };
        let layer = self.layer(path);
        let layer = layer.unwrap_or_else(|| panic!("`{path}` is in the model's list of layers"));
        self.through(b, layer, x)
    }

    fn layer(&self, path: &str) -> Option<&'a Linear> {
        self.layers.iter().find(|layer| layer.path == path)
    }

    fn through(&mut self, b: &mut Builder, layer: &Linear, x: Value) -> Result<Value> {
        self.inputs.insert(layer.path.clone(), x);
        let y = match self.masked.get(&layer.path) {
            Some(site) => self.site(b, layer, site, x)?,
            None => self.frozen(b, layer, x)?,
        };
        self.outputs.insert(layer.path.clone(), y);
        Ok(y)
    }

    fn frozen(&self, b: &mut Builder, layer: &Linear, x: Value) -> Result<Value> {
        let weight = || self.weights[&format!("{}.weight", layer.path)];
        match layer.orientation {
            Orientation::OutIn => b.linear_oi(x, weight(), self.bias(layer)),
            Orientation::InOut => b.linear_io(x, weight(), self.bias(layer)),
            Orientation::Identity => Ok(x),
        }
    }

    fn site(&self, b: &mut Builder, layer: &Linear, site: &MaskedSite, x: Value) -> Result<Value> {
        let MaskValues { delta, route, .. } = site.masks;
        let acts_btc = match route {
            Some(route) => b.routed_matmul(x, site.v_ic, route)?,
            None => b.matmul(x, site.v_ic)?,
        };
        let h_btc = b.masked(acts_btc, &site.masks)?;
        let mixes = delta.is_some() || route.is_some();
        let clean = if mixes {
            Some(self.frozen(b, layer, x)?)
        } else {
            None
        };
        let with = SiteInputs {
            clean,
            bias: self.bias(layer),
            delta,
            route,
        };
        b.site_output(h_btc, site.u_co, &with)
    }

    fn bias(&self, layer: &Linear) -> Option<Value> {
        layer
            .bias
            .then(|| self.weights[&format!("{}.bias", layer.path)])
    }
}
