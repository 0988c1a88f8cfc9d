//! The byte-spectral models: bytes become features of their spectrum, and positions mix by filters
//! that are learned in the frequency domain.
//!
//! ```text
//! x = encoder(bytes)
//! x = x + mix(norm1(x))        x = x + mlp.3(gelu(mlp.0(norm2(x))))      each block
//! logits = output(norm(x))
//! ```
//!
//! A filter of a channel is a convolution. With weights `a_f + i b_f` of bins `f < F`:
//!
//! ```text
//! circular   y_t = sum over all s of h_(t - s mod T) x_s        k = min(F, T / 2) bins
//!            h_l = 1/T sum_(f < k) (a_f cos 2 pi f l / T - b_f sin 2 pi f l / T)
//! causal     y_t = sum_(l <= t) h_l x_(t - l)                   all bins, T0 = n_ctx
//!            h_l = 1/T0 sum_f (a_f cos pi f l / T0 - b_f sin pi f l / T0)
//! ```
//!
//! The circular form, as published, is LEAKY: every position reads those after it. The causal form
//! has twice the period, so that the last lag is no alias of the next position.
//!
//! With `decompose_filters`, the filters of a block are a layer that may be a site, as
//! [`filters`](crate::filters) derives it.
//!
//! The encoders: `embedding` looks a byte up; `causal` has magnitude, sine and cosine of the bins
//! of the last `window` bytes (silence comes before the first), and two linear layers with a GELU;
//! `loop`, as published, has those of the whole window as it lies from each position on, around its
//! end: LEAKY, since the spectrum at every position is that of all bytes.
//!
//! # Keys of `[target]`
//!
//! - byte_spectral: `encoder` | `"causal"` | | `"embedding"`, `"causal"`, or `"loop"`, which is
//!   LEAKY
//! - byte_spectral: `mixing` | `"causal"` | | `"causal"`, or `"circular"`, which is LEAKY
//! - byte_spectral: `window` | 64 | | bytes that the causal encoder sees
//! - byte_spectral: `decompose_filters` | false | | whether its filters, `layers.*.spectral_mix`,
//!   may be sites; such a site has a row for each sequence

use std::sync::Arc;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Size};
use spd_configs::words;
use spd_engine::ops::{Expr, GeluKind};
use spd_engine::{Builder, Result, Value};

use super::bytes::{self, LAST_NORM};
use super::layer::times;
use super::layer_norm::{NORM_EPS, layer_norm, layer_norm_tensors};
use super::{Found, Input, Layer, LayerKind, Listed, Most, Network, Start, Target, TargetTensor};
use crate::filters::Convolution;
use crate::pass::Pass;

/// Sizes of a byte-spectral model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ByteSpectral {
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// How bytes become vectors.
    pub encoder: Encoder,
    /// How positions mix.
    pub mixing: Mixing,
    /// Bytes that the causal encoder sees.
    pub window: usize,
    /// Whether filters may be sites.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub decompose_filters: bool,
}

words! {
    /// How bytes become vectors.
    pub enum Encoder {
        /// A vector for each byte.
        Embedding = "embedding",
        /// The spectrum of the last bytes.
        Causal = "causal",
        /// The spectrum of all bytes. LEAKY.
        Loop = "loop",
    }
}

words! {
    /// How positions mix.
    pub enum Mixing {
        /// By convolutions with earlier positions.
        Causal = "causal",
        /// By circular convolutions. LEAKY.
        Circular = "circular",
    }
}

fn read(table: &mut Table<'_>) -> Found<ByteSpectral> {
    let [n_ctx, d_model, n_layer] = bytes::read_sizes(table);
    let encoder = table.or("encoder", Encoder::WORDS, Encoder::Causal);
    let mixing = table.or("mixing", Mixing::WORDS, Mixing::Causal);
    let window = table.or("window", Size::at_least(2), 64);
    let decompose_filters = table.or("decompose_filters", Flag, false);
    let network = all_read! {
        ByteSpectral: n_ctx, d_model, n_layer, encoder, mixing, window, decompose_filters
    };
    Found::of_tokens(n_ctx, network)
}

pub(super) const BYTE_SPECTRAL: Listed<ByteSpectral> =
    Listed::new(read, |sizes| Ok(Arc::new(*sizes)));

const ENCODER: &str = "byte_encoder";

impl ByteSpectral {
    /// Bins of a filter, and of the encoder at most.
    fn bins(&self) -> usize {
        self.d_model / 2
    }

    /// Magnitude, sine and cosine of each bin at each position, cut or filled up to the width.
    fn features(&self, b: &mut Builder, pass: &Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let (rows, positions) = (b.ty(tokens_bt).rows(), b.ty(tokens_bt).columns());
        let is_loop = self.encoder == Encoder::Loop;
        let span = if is_loop { positions } else { self.window };
        let k = self.bins().min(span / 2);
        if k == 0 {
            return b.constant(0.0, &[rows, positions, self.d_model]);
        }
        // A byte as a number, once for each cosine and sine.
        let values = pass.weight(&format!("{ENCODER}.byte_values"));
        let ones = b.constant(1.0, &[1, 2 * k])?;
        let table = b.matmul(values, ones)?;
        let signal = b.embed(tokens_bt, table, None)?;
        let waves = b.fourier_table(span, k, span)?;
        let silence = b.constant(0.0, &[2 * k])?;
        let sums = match is_loop {
            true => b.circular_mixing(signal, waves, silence)?,
            false => b.causal_mixing(signal, waves, silence)?,
        };
        let re = b.slice(sums, 0..k)?;
        let im = b.slice(sums, k..2 * k)?;
        let names = ["modulus", "modulus_grad"];
        let modulus = b.elementwise(names, [re, im], |[re, im]| {
            (re.square() + im.square()).sqrt()
        })?;
        // A bin without a modulus has the angle 0.
        let cos = b.elementwise(["cosine", "cosine_grad"], [re, modulus], |[re, modulus]| {
            let one = Expr::from(1.0);
            (re / modulus.clone() - 1.0).where_positive(&modulus) + one
        })?;
        // The window runs forwards in time for `loop`, and backwards for `causal`.
        let sign = if is_loop { 1.0 } else { -1.0 };
        let sin = b.elementwise(["sine", "sine_grad"], [im, modulus], |[im, modulus]| {
            (im / modulus.clone() * sign).where_positive(&modulus)
        })?;
        let bands = pass.weight(&format!("{ENCODER}.freq_bands"));
        let bands = b.slice(bands, 0..k)?;
        let bands = b.reshape(bands, &[1, k])?;
        let nothing = b.constant(0.0, &[k])?;
        let scaled = b.causal_mixing(modulus, bands, nothing)?;
        let mut parts = vec![scaled, sin, cos];
        if let Some(rest) = self.d_model.checked_sub(3 * k).filter(|&rest| rest > 0) {
            parts.push(b.constant(0.0, &[rows, positions, rest])?);
        }
        let all = b.concatenate(&parts)?;
        b.slice(all, 0..self.d_model)
    }

    /// Vectors f32 `[b, t, d]` of bytes u32 `[b, t]`, but for an encoder that looks them up.
    pub(crate) fn encode(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        tokens_bt: Value,
    ) -> Result<Value> {
        let features_btd = self.features(b, pass, tokens_bt)?;
        let hidden = pass.linear(b, &format!("{ENCODER}.freq_proj.0"), features_btd)?;
        let hidden = layer_norm(b, pass, &format!("{ENCODER}.freq_proj.1"), hidden, NORM_EPS)?;
        let hidden = b.gelu(hidden, GeluKind::Exact)?;
        pass.linear(b, &format!("{ENCODER}.freq_proj.3"), hidden)
    }

    /// The kernels of filters on so many positions, f32 `[lags, n]` of real and imaginary parts
    /// `[n, bins]`.
    fn kernels(
        &self,
        b: &mut Builder,
        positions: usize,
        [real, imag]: [Value; 2],
    ) -> Result<Value> {
        let (lags, bins, period, scale) = match self.mixing {
            Mixing::Causal => (positions, self.bins(), 2 * self.n_ctx, self.n_ctx),
            Mixing::Circular => {
                let bins = self.bins().min(positions / 2);
                (positions, bins, positions, positions)
            }
        };
        if bins == 0 {
            // Of a single position nothing is left but the bias.
            return b.constant(0.0, &[1, b.ty(real).rows()]);
        }
        let (real, imag) = (b.slice(real, 0..bins)?, b.slice(imag, 0..bins)?);
        let scale = 1.0 / scale as f64;
        let [real, imag] = [times(b, real, scale)?, times(b, imag, -scale)?];
        let filter = b.concatenate(&[real, imag])?;
        let waves = b.fourier_table(lags, bins, period)?;
        b.linear_oi(waves, filter, None)
    }

    /// The filters of a block.
    pub(crate) fn mix(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        path: &str,
        x_btd: Value,
    ) -> Result<Value> {
        let positions = b.ty(x_btd).dims[1];
        let kernels = pass.kernels(b, path, x_btd, &|b, filters| {
            self.kernels(b, positions, filters)
        })?;
        let convolution: Convolution = match self.mixing {
            Mixing::Causal => Builder::causal_mixing,
            Mixing::Circular => Builder::circular_mixing,
        };
        let bias = pass.weight(&format!("{path}.bias"));
        kernels.convolve(b, x_btd, bias, convolution)
    }
}

impl Target for ByteSpectral {
    fn describe(&self) -> String {
        let (encoder, mixing) = (self.encoder.word(), self.mixing.word());
        let window = match self.encoder {
            Encoder::Causal => format!(" of {} bytes", self.window),
            Encoder::Embedding | Encoder::Loop => String::new(),
        };
        format!(
            "byte_spectral, {} layers of width {}, {encoder} encoder{window}, {mixing} mixing, {} positions",
            self.n_layer, self.d_model, self.n_ctx
        )
    }

    fn input(&self) -> Input {
        bytes::input(self.n_ctx)
    }

    fn leaks(&self) -> bool {
        self.encoder == Encoder::Loop || self.mixing == Mixing::Circular
    }

    fn cut_to(&self, most: Most) -> Option<Network> {
        Some(Arc::new(Self {
            n_ctx: self.n_ctx.min(most.positions),
            d_model: self.d_model.min(most.width),
            n_layer: self.n_layer.min(most.layers),
            window: self.window.min(most.positions),
            ..*self
        }))
    }

    fn layers(&self) -> Vec<Layer> {
        let d = self.d_model;
        let mut all = match self.encoder {
            Encoder::Embedding => vec![bytes::projection_layer(d)],
            Encoder::Causal | Encoder::Loop => vec![
                Layer::linear(format!("{ENCODER}.freq_proj.0"), d, 2 * d, true),
                Layer::linear(format!("{ENCODER}.freq_proj.3"), 2 * d, d, true),
            ],
        };
        for layer in 0..self.n_layer {
            if self.decompose_filters {
                let path = format!("layers.{layer}.spectral_mix");
                all.push(Layer::filters(path, d, self.bins()));
            }
            let mlp = [("mlp.0", d, 4 * d, true), ("mlp.3", 4 * d, d, true)];
            all.extend(Layer::below(&format!("layers.{layer}."), mlp));
        }
        all.push(bytes::output_layer(d));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let d = self.d_model;
        let layers = self.layers();
        let mut all = Vec::new();
        let rest = match self.encoder {
            Encoder::Embedding => {
                all.extend(bytes::projection_tensors(d));
                &layers[1..]
            }
            Encoder::Causal | Encoder::Loop => {
                let bands = format!("{ENCODER}.freq_bands");
                all.push(TargetTensor::trained(bands, &[self.bins()], Start::Ones));
                let values = format!("{ENCODER}.byte_values");
                all.push(TargetTensor::fixed(values, &[bytes::BYTES, 1], Start::Ramp));
                all.extend(layer_norm_tensors(&format!("{ENCODER}.freq_proj.1"), 2 * d));
                &layers[..]
            }
        };
        let rest = rest.iter().filter(|layer| layer.kind != LayerKind::Filters);
        all.extend(rest.flat_map(TargetTensor::of_layer));
        for layer in 0..self.n_layer {
            let block = format!("layers.{layer}");
            let parts = [
                ("weight_real", vec![d, self.bins()], Start::Ones),
                ("weight_imag", vec![d, self.bins()], Start::Zeros),
                ("bias", vec![d], Start::Zeros),
            ];
            all.extend(parts.map(|(name, dims, start)| {
                TargetTensor::trained(format!("{block}.spectral_mix.{name}"), &dims, start)
            }));
            all.extend(
                ["norm1", "norm2"]
                    .iter()
                    .flat_map(|norm| layer_norm_tensors(&format!("{block}.{norm}"), d)),
            );
        }
        all.extend(layer_norm_tensors(LAST_NORM, d));
        all
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let mut x_btd = match self.encoder {
            Encoder::Embedding => bytes::project(b, pass, tokens_bt)?,
            Encoder::Causal | Encoder::Loop => self.encode(b, pass, tokens_bt)?,
        };
        for layer in 0..self.n_layer {
            let block = format!("layers.{layer}");
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm1"), x_btd, NORM_EPS)?;
            let mixed_btd = self.mix(b, pass, &format!("{block}.spectral_mix"), normed_btd)?;
            x_btd = b.add(x_btd, mixed_btd)?;
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm2"), x_btd, NORM_EPS)?;
            let hidden_btm = pass.linear(b, &format!("{block}.mlp.0"), normed_btd)?;
            let hidden_btm = b.gelu(hidden_btm, GeluKind::Exact)?;
            let mlp_btd = pass.linear(b, &format!("{block}.mlp.3"), hidden_btm)?;
            x_btd = b.add(x_btd, mlp_btd)?;
        }
        let x_btd = layer_norm(b, pass, LAST_NORM, x_btd, NORM_EPS)?;
        bytes::output(b, pass, x_btd)
    }
}
