//! One pass through a target: where its linear layers become sites.
//!
//! A clean pass computes the frozen layers and keeps what goes in and out of them. A masked pass
//! computes the sites it is given through their components, and every other layer as it is. Both
//! are resolved when the program is built: at run time there is no hook, no table and no branch,
//! and what a masked pass shares with the clean one is computed once, because equal ops on equal
//! values are one value.
//!
//! Each block of a masked pass is a region that gradients may compute again.
//!
//! If the run puts an identity matrix before a layer, the layer's input goes through it first, as
//! through a layer of its own: model code does not know of it.

use std::collections::BTreeMap;

use spd_engine::ops::{Heads, MaskValues, Qkv, SiteInputs};
use spd_engine::{Builder, Result, Value};

use crate::filters::{Kernels, ToKernels, masked_kernels};
use crate::networks::layer::{Layer, LayerKind, filter_names};
use crate::networks::{Tap, TapKind, pre_identity};

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

/// An attention of a pass: what its patterns are made of.
#[derive(Debug, Clone, Copy)]
pub struct Attended {
    /// Queries, keys and values.
    pub qkv: Qkv,
    /// The heads.
    pub heads: Heads,
    /// The table by which queries and keys are rotated, f32 `[t, turned]`.
    pub rotary: Option<Value>,
}

/// The layers of one pass, with the identity matrices before them.
pub struct Pass<'a> {
    layers: &'a [Layer],
    weights: &'a BTreeMap<String, Value>,
    masked: BTreeMap<String, MaskedSite>,
    /// Input of each layer that was computed, by path.
    pub inputs: BTreeMap<String, Value>,
    /// Output of each layer that was computed, by path, without the vectors of positions. Filters
    /// have none.
    pub outputs: BTreeMap<String, Value>,
    /// Attentions, in their order.
    pub attended: Vec<Attended>,
    /// Values between layers, by the names of their [taps](Tap).
    pub taps: BTreeMap<String, Value>,
    /// Terms of the network's training loss that the forward pass finds, with their weights.
    penalties: Vec<(f64, Value)>,
    /// The block of the last layer of a masked pass.
    block: Option<&'a str>,
}

impl<'a> Pass<'a> {
    /// A pass through the frozen layers.
    pub fn clean(layers: &'a [Layer], weights: &'a BTreeMap<String, Value>) -> Self {
        Self::masked(layers, weights, BTreeMap::new())
    }

    /// A pass through the components of some layers, by path.
    pub fn masked(
        layers: &'a [Layer],
        weights: &'a BTreeMap<String, Value>,
        masked: BTreeMap<String, MaskedSite>,
    ) -> Self {
        Self {
            layers,
            weights,
            masked,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            attended: Vec::new(),
            taps: BTreeMap::new(),
            penalties: Vec::new(),
            block: None,
        }
    }

    /// Records a value of a block, which importance functions may read: f32 `[b, t, ..]`, as wide
    /// as the [block](crate::networks::Block) of its layers says.
    pub fn tap(&mut self, kind: TapKind, block: usize, value: Value) {
        self.taps.insert(Tap { kind, block }.name(), value);
    }

    /// Values that losses may compare, by name: taps, and `out.` with the path of a layer.
    pub fn captures(&self) -> BTreeMap<String, Value> {
        let outputs = self.outputs.iter();
        let outputs = outputs.map(|(path, &value)| (format!("out.{path}"), value));
        outputs.chain(self.taps.clone()).collect()
    }

    /// Adds a term, a scalar, to the training loss of the network.
    pub fn penalty(&mut self, weight: f64, term: Value) {
        self.penalties.push((weight, term));
    }

    /// The training loss with the terms that the forward pass found.
    ///
    /// # Errors
    ///
    /// When a term is no scalar.
    pub fn with_penalties(&self, b: &mut Builder, loss: Value) -> Result<Value> {
        if self.penalties.is_empty() {
            return Ok(loss);
        }
        let terms: Vec<_> = [(1.0, loss)]
            .into_iter()
            .chain(self.penalties.iter().copied())
            .collect();
        b.weighted_sum(&terms)
    }

    /// A tensor of the target.
    ///
    /// # Panics
    ///
    /// When the target has no such tensor: its code and its list of tensors are one file.
    pub fn weight(&self, name: &str) -> Value {
        let weight = self.weights.get(name);
        *weight.unwrap_or_else(|| panic!("`{name}` is in the target's list of tensors"))
    }

    /// The linear layer at `path`: f32 `[.., d_in]` to `[.., d_out]`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    ///
    /// # Panics
    ///
    /// When the target has no such layer: its code and its list of layers are one file.
    pub fn linear(&mut self, b: &mut Builder, path: &str, x: Value) -> Result<Value> {
        let x = match self.layer(&pre_identity(path)) {
            Some(identity) => self.through(b, identity, x)?,
            None => x,
        };
        self.through(b, self.known(path), x)
    }

    /// The embedding at `path`: tokens u32 `[b, t]` to their vectors f32 `[b, t, d_out]`, plus the
    /// vectors of positions, f32 `[context, d_out]`, if there are any.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    ///
    /// # Panics
    ///
    /// As [`linear`](Self::linear).
    pub fn embedding(
        &mut self,
        b: &mut Builder,
        path: &str,
        tokens: Value,
        positions: Option<Value>,
    ) -> Result<Value> {
        let layer = self.known(path);
        match positions {
            None => self.through(b, layer, tokens),
            Some(positions) if self.masked.contains_key(path) => {
                let x = self.through(b, layer, tokens)?;
                b.add_positions(x, positions)
            }
            Some(positions) => {
                self.inputs.insert(layer.path.clone(), tokens);
                // Asked for by nobody, it is not computed.
                let vectors = self.frozen(b, layer, tokens)?;
                self.outputs.insert(layer.path.clone(), vectors);
                b.embed(
                    tokens,
                    self.weight(&format!("{path}.weight")),
                    Some(positions),
                )
            }
        }
    }

    /// Attention of `heads` to f32 `[b, t, heads size]`, as [`Builder::attention`] has it.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    pub fn attention(
        &mut self,
        b: &mut Builder,
        qkv: Qkv,
        heads: Heads,
        rotary: Option<Value>,
    ) -> Result<Value> {
        self.attended.push(Attended { qkv, heads, rotary });
        b.attention(qkv, heads, rotary)
    }

    /// Kernels of the filters at `path`, which convolve the columns of `x`, f32 `[b, t, d]`.
    ///
    /// # Errors
    ///
    /// When shapes do not fit.
    ///
    /// # Panics
    ///
    /// As [`weight`](Self::weight), for their real and imaginary parts.
    pub fn kernels(
        &mut self,
        b: &mut Builder,
        path: &str,
        x_btd: Value,
        to_kernels: ToKernels<'_>,
    ) -> Result<Kernels> {
        self.inputs.insert(path.to_owned(), x_btd);
        let parts = filter_names(path).map(|name| self.weight(&name));
        let clean_ld = to_kernels(b, parts)?;
        let Some(site) = self.masked.get(path) else {
            return Ok(Kernels::OfColumns(clean_ld));
        };
        let masks = (&site.masks, b.ty(x_btd).dims[0]);
        masked_kernels(b, [site.v_ic, site.u_co], clean_ld, masks, to_kernels)
    }

    fn known(&self, path: &str) -> &'a Layer {
        let layer = self.layer(path);
        layer.unwrap_or_else(|| panic!("`{path}` is in the target's list of layers"))
    }

    fn layer(&self, path: &str) -> Option<&'a Layer> {
        self.layers.iter().find(|layer| layer.path == path)
    }

    fn through(&mut self, b: &mut Builder, layer: &'a Layer, x: Value) -> Result<Value> {
        let block = block(&layer.path);
        if !self.masked.is_empty() && self.block.replace(block) != Some(block) {
            b.begin_region();
        }
        self.inputs.insert(layer.path.clone(), x);
        let y = match self.masked.get(&layer.path) {
            Some(site) => self.site(b, layer, site, x)?,
            None => self.frozen(b, layer, x)?,
        };
        self.outputs.insert(layer.path.clone(), y);
        Ok(y)
    }

    fn frozen(&self, b: &mut Builder, layer: &Layer, x: Value) -> Result<Value> {
        let weight = || self.weight(&layer.weight_name());
        match layer.kind {
            LayerKind::OutIn => b.linear_oi(x, weight(), self.bias(layer)),
            LayerKind::InOut | LayerKind::Filters => b.linear_io(x, weight(), self.bias(layer)),
            LayerKind::Embedding => b.embed(x, weight(), None),
            LayerKind::Identity => Ok(x),
        }
    }

    fn site(&self, b: &mut Builder, layer: &Layer, site: &MaskedSite, x: Value) -> Result<Value> {
        let MaskValues { delta, route, .. } = site.masks;
        let acts_btc = match (layer.kind, route) {
            (LayerKind::Embedding, None) => b.embed(x, site.v_ic, None)?,
            (LayerKind::Embedding, Some(route)) => {
                let acts_btc = b.embed(x, site.v_ic, None)?;
                b.compact_rows(acts_btc, route)?
            }
            (_, None) => b.matmul(x, site.v_ic)?,
            (_, Some(route)) => b.routed_matmul(x, site.v_ic, route)?,
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

    fn bias(&self, layer: &Layer) -> Option<Value> {
        layer
            .bias
            .then(|| self.weight(&format!("{}.bias", layer.path)))
    }
}

/// The block of a layer, its path up to the first number: `h.1` of `h.1.attn.q_proj`. A layer of no
/// block is one by itself.
fn block(path: &str) -> &str {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..end];
        }
        end += 1;
    }
    path
}

#[cfg(test)]
mod tests {
    use super::block;

    #[test]
    fn a_block_ends_with_the_first_number() {
        for (path, expected) in [
            ("h.1.attn.q_proj", "h.1"),
            ("model.layers.12.mlp.3", "model.layers.12"),
            ("lm_head", "lm_head"),
        ] {
            assert_eq!(block(path), expected);
        }
    }
}
