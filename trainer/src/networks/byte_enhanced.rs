//! The enhanced byte-spectral model: positions mix by phase shifts and by bands of the spectrum of
//! the whole window. LEAKY: every position reads those after it.
//!
//! ```text
//! x = byte_proj(bytes)
//! x = x + rotary(norm1(x))                each block
//! x = x + phase_mixing(norm2(x))          m (cos(p) x - sin(p) H x), for each column
//! x = x + gated(norm3(x))                 s(g) value_proj(x) + (1 - s(g)) w, with
//!                                         [g, w] = gate_proj.1(gate_proj.0(x)), a LayerNorm
//! x = x + multi_scale(x)                  fusion [low_freq(L x), mid_freq(M x), high_freq(H x)]
//! logits = output(norm(x))
//! ```
//!
//! `rotary` turns the pair of columns `2 j` and `2 j + 1` at position `t` by `t 10000^(-2 j / d)`.
//!
//! A filter of the window of `T` positions is a circular convolution. The Hilbert transform turns
//! the phase of every frequency by a quarter, and leaves out those of 0 and of `T / 2`:
//!
//! ```text
//! (H x)_t = sum_s h_(t - s) x_s        h_l = 2/T sum_(0 < f < T/2) sin 2 pi f l / T
//! ```
//!
//! A band keeps the bins `f` of one quarter, another quarter, and the upper half of `T / 2 + 1`:
//! `h_l = 1/T sum_f c_f cos 2 pi f l / T`, with `c` 1 for bins 0 and `T / 2`, and 2 for others.
//! The three bands add up to `x`, so the last is what the others leave.

use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_engine::ops::Expr;
use spd_engine::{Builder, Result, Value};

use super::bytes::{self, LAST_NORM};
use super::layer_norm::{NORM_EPS, layer_norm, layer_norm_tensors};
use super::{Found, Input, Layer, Listed, Most, Network, Start, Target, TargetTensor};
use crate::pass::Pass;
use crate::rounded::rounded;

/// Sizes of an enhanced byte-spectral model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ByteEnhanced {
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream, an even number.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
}

fn read(table: &mut Table<'_>) -> Found<ByteEnhanced> {
    let [n_ctx, d_model, n_layer] = bytes::read_sizes(table);
    if let Some(odd) = d_model.filter(|d_model| d_model % 2 == 1) {
        table.refuse::<()>("d_model", format!("expected an even number, found {odd}"));
    }
    let network = all_read! { ByteEnhanced: n_ctx, d_model, n_layer };
    Found::of_tokens(n_ctx, network)
}

pub(super) const BYTE_ENHANCED: Listed<ByteEnhanced> =
    Listed::new(read, |sizes| Ok(Arc::new(*sizes)));

/// The base of the angles of `rotary`.
const BASE: f64 = 1e4;

const BANDS: [&str; 3] = ["low_freq", "mid_freq", "high_freq"];

/// Pairs of columns turned by the angles of their position.
fn rotary(b: &mut Builder, x_btd: Value) -> Result<Value> {
    let [rows, t, d] = sizes(b, x_btd);
    let half = d / 2;
    let table = b.rotary_table(t, d, BASE, None)?;
    let flat = b.reshape(x_btd, &[rows * t * half, 2])?;
    let nothing = b.constant(0.0, &[rows, t, half])?;
    let part = |b: &mut Builder, at: usize| {
        let column = b.slice(flat, at..at + 1)?;
        let column = b.reshape(column, &[rows, t, half])?;
        let angles = b.slice(table, at * half..(at + 1) * half)?;
        // The same for all rows.
        Ok([column, b.add_positions(nothing, angles)?])
    };
    let ([even, cos], [odd, sin]) = (part(b, 0)?, part(b, 1)?);
    let turned = [
        b.elementwise(
            ["turn", "turn_grad"],
            [even, odd, cos, sin],
            |[x, y, cos, sin]| x * cos - y * sin,
        )?,
        b.elementwise(
            ["turn", "turn_grad"],
            [odd, even, cos, sin],
            |[x, y, cos, sin]| x * cos + y * sin,
        )?,
    ];
    let mut columns = Vec::new();
    for part in turned {
        columns.push(b.reshape(part, &[rows * t * half, 1])?);
    }
    let all = b.concatenate(&columns)?;
    b.reshape(all, &[rows, t, d])
}

/// `m (cos(p) x - sin(p) H x)`, with `m` and `p` of each column.
fn phase_mixing(b: &mut Builder, pass: &Pass<'_>, path: &str, x_btd: Value) -> Result<Value> {
    let [_, t, d] = sizes(b, x_btd);
    let [magnitude, phase] =
        ["magnitude_filter", "phase_filter"].map(|name| pass.weight(&format!("{path}.{name}")));
    let names = ["phase_filter", "phase_filter_grad"];
    let direct = b.elementwise(names, [magnitude, phase], |[m, p]| m * p.cos())?;
    let direct_1d = b.reshape(direct, &[1, d])?;
    let nothing = b.constant(0.0, &[d])?;
    let direct_btd = b.causal_mixing(x_btd, direct_1d, nothing)?;
    let bins = t.div_ceil(2) - 1;
    if bins == 0 {
        return Ok(direct_btd);
    }
    let turned = b.elementwise(names, [magnitude, phase], |[m, p]| (m * p.sin()) * -1.0)?;
    let turned_1d = b.reshape(turned, &[1, d])?;
    let waves = b.fourier_table(t, bins + 1, t)?;
    // Bin 0 has no sine.
    let sines = b.slice(waves, bins + 2..2 * (bins + 1))?;
    let factor = b.constant(rounded(2.0 / t as f64), &[bins, 1])?;
    let hilbert_t1 = b.matmul(sines, factor)?;
    let kernel_td = b.matmul(hilbert_t1, turned_1d)?;
    let turned_btd = b.circular_mixing(x_btd, kernel_td, nothing)?;
    b.add(direct_btd, turned_btd)
}

/// The part of `x` in a band of bins.
fn band(b: &mut Builder, x_btd: Value, bins: Range<usize>) -> Result<Value> {
    let [rows, t, d] = sizes(b, x_btd);
    if bins.is_empty() {
        return b.constant(0.0, &[rows, t, d]);
    }
    let waves = b.fourier_table(t, bins.end, t)?;
    let cosines = b.slice(waves, bins.clone())?;
    let share = 2.0 / t as f64;
    let factor = b.constant(rounded(share), &[bins.len(), 1])?;
    let mut kernel_t1 = b.matmul(cosines, factor)?;
    if bins.start == 0 {
        let half = b.constant(rounded(share / -2.0), &[t, 1])?;
        kernel_t1 = b.add(kernel_t1, half)?;
    }
    let ones_1d = b.constant(1.0, &[1, d])?;
    let kernel_td = b.matmul(kernel_t1, ones_1d)?;
    let nothing = b.constant(0.0, &[d])?;
    b.circular_mixing(x_btd, kernel_td, nothing)
}

/// A layer for each band, and one over all.
fn multi_scale(b: &mut Builder, pass: &mut Pass<'_>, path: &str, x_btd: Value) -> Result<Value> {
    let bins = sizes(b, x_btd)[1] / 2 + 1;
    let low = band(b, x_btd, 0..bins / 4)?;
    let mid = band(b, x_btd, bins / 4..bins / 2)?;
    let names = ["rest", "rest_grad"];
    let high = b.elementwise(names, [x_btd, low, mid], |[x, low, mid]| x - low - mid)?;
    let mut of_bands = Vec::new();
    for (name, band_btd) in BANDS.into_iter().zip([low, mid, high]) {
        of_bands.push(pass.linear(b, &format!("{path}.{name}"), band_btd)?);
    }
    let all = b.concatenate(&of_bands)?;
    pass.linear(b, &format!("{path}.fusion"), all)
}

/// Two ways, and a gate between them.
fn gated(b: &mut Builder, pass: &mut Pass<'_>, path: &str, x_btd: Value) -> Result<Value> {
    let d = b.ty(x_btd).columns();
    let both = pass.linear(b, &format!("{path}.gate_proj.0"), x_btd)?;
    let both = layer_norm(b, pass, &format!("{path}.gate_proj.1"), both, NORM_EPS)?;
    let (gate, other) = (b.slice(both, 0..d)?, b.slice(both, d..2 * d)?);
    let value = pass.linear(b, &format!("{path}.value_proj"), x_btd)?;
    b.elementwise(
        ["gated", "gated_grad"],
        [gate, value, other],
        |[gate, value, other]| {
            let gate = gate.logistic();
            &gate * value + (Expr::from(1.0) - &gate) * other
        },
    )
}

/// Sizes of f32 `[b, t, d]`.
fn sizes(b: &Builder, x_btd: Value) -> [usize; 3] {
    let dims = &b.ty(x_btd).dims;
    [dims[0], dims[1], dims[2]]
}

impl Target for ByteEnhanced {
    fn describe(&self) -> String {
        format!(
            "byte_enhanced, {} layers of width {}, {} positions",
            self.n_layer, self.d_model, self.n_ctx
        )
    }

    fn input(&self) -> Input {
        bytes::input(self.n_ctx)
    }

    fn leaks(&self) -> bool {
        true
    }

    fn cut_to(&self, most: Most) -> Option<Network> {
        Some(Arc::new(Self {
            n_ctx: self.n_ctx.min(most.positions),
            d_model: self.d_model.min(most.width),
            n_layer: self.n_layer.min(most.layers),
        }))
    }

    fn layers(&self) -> Vec<Layer> {
        let d = self.d_model;
        let of_block = [
            ("gated.gate_proj.0", d, 2 * d, true),
            ("gated.value_proj", d, d, true),
            ("multi_scale.low_freq", d, d, true),
            ("multi_scale.mid_freq", d, d, true),
            ("multi_scale.high_freq", d, d, true),
            ("multi_scale.fusion", 3 * d, d, true),
        ];
        let blocks = 0..self.n_layer;
        let blocks = blocks.flat_map(|layer| Layer::below(&format!("layers.{layer}."), of_block));
        let (first, last) = (bytes::projection_layer(d), bytes::output_layer(d));
        [first].into_iter().chain(blocks).chain([last]).collect()
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let d = self.d_model;
        let mut all = bytes::projection_tensors(d).to_vec();
        all.extend(self.layers()[1..].iter().flat_map(TargetTensor::of_layer));
        for layer in 0..self.n_layer {
            let block = format!("layers.{layer}");
            let filters = [("magnitude", Start::Ones), ("phase", Start::Zeros)];
            all.extend(filters.map(|(name, start)| {
                TargetTensor::trained(format!("{block}.phase_mixing.{name}_filter"), &[d], start)
            }));
            all.extend(layer_norm_tensors(
                &format!("{block}.gated.gate_proj.1"),
                2 * d,
            ));
            let norms = [1, 2, 3].map(|number| format!("{block}.norm{number}"));
            all.extend(norms.iter().flat_map(|norm| layer_norm_tensors(norm, d)));
        }
        all.extend(layer_norm_tensors(LAST_NORM, d));
        all
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let mut x_btd = bytes::project(b, pass, tokens_bt)?;
        for layer in 0..self.n_layer {
            let block = format!("layers.{layer}");
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm1"), x_btd, NORM_EPS)?;
            let turned_btd = rotary(b, normed_btd)?;
            x_btd = b.add(x_btd, turned_btd)?;
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm2"), x_btd, NORM_EPS)?;
            let mixed_btd = phase_mixing(b, pass, &format!("{block}.phase_mixing"), normed_btd)?;
            x_btd = b.add(x_btd, mixed_btd)?;
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm3"), x_btd, NORM_EPS)?;
            let gated_btd = gated(b, pass, &format!("{block}.gated"), normed_btd)?;
            x_btd = b.add(x_btd, gated_btd)?;
            let scales_btd = multi_scale(b, pass, &format!("{block}.multi_scale"), x_btd)?;
            x_btd = b.add(x_btd, scales_btd)?;
        }
        let x_btd = layer_norm(b, pass, LAST_NORM, x_btd, NORM_EPS)?;
        bytes::output(b, pass, x_btd)
    }
}
