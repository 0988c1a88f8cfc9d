//! NmGptMini: the smallest language model in which Kaufmann attention and a spectral basis both
//! reach the logits.
//!
//! ```text
//! x = token embedding + positions
//! c = manifold.encoder(x)            phi = spectral(c)                       each block
//! x = x + attention(norm1(x), c)     x = x + gain fsa(norm_s(x), phi)        the second if wired
//! x = x + mlp.w_down(silu(mlp.w_gate(norm2(x))) * mlp.w_up(norm2(x)))
//! logits = lm_head(norm(x))
//! ```
//!
//! `fsa` is causal linear attention whose queries and keys are multiplied by the basis:
//! `o_t = k^(-1/2) sum_(s <= t) (phi_t q_t . phi_s k_s) v_s`. Without `wire_basis` the basis
//! reaches nothing but its own penalty: the control of a decomposition, whose components are to end
//! at importance 0. The encoder of coordinates is three linear layers with LayerNorms and SiLUs
//! between them; the layer norms of blocks are LayerNorms, the last is an RMS norm.
//!
//! `positions = "ramanujan"` adds the fixed table `c_q(n) / sqrt(q)` of Ramanujan's sums, with
//! `q` the column from 1 and `n` the position.
//!
//! # Keys of `[target]`
//!
//! - nm_gpt_mini: `d_coords`, `n_basis` | | | widths of the coordinates and of the basis
//! - nm_gpt_mini: `d_mlp` | 8/3 `d_model`, rounded down | | width of the MLP
//! - nm_gpt_mini: `wire_basis`, `fsa_gain` | true, 1 | | whether the basis reaches the logits, and
//!   what its branch is multiplied by; `fsa_gain` needs `wire_basis`
//! - nm_gpt_mini: `positions` | `"learned"` | | `"learned"` or `"ramanujan"`

use std::sync::Arc;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Flag, Number, Size};
use spd_configs::words;
use spd_engine::{Builder, Result, Value};

use super::kaufmann::{KaufmannLayer, ScoreScale};
use super::layer::times;
use super::layer_norm::{NORM_EPS, layer_norm, layer_norm_tensors};
use super::spectral::{Basis, SpectralLayer};
use super::{
    Found, Input, Layer, Listed, Most, Network, Start, Target, TargetTensor, read_d_mlp,
    read_heads, read_sizes,
};
use crate::pass::Pass;

/// Sizes of an NmGptMini.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NmGptMini {
    /// Vocabulary size.
    pub vocab: usize,
    /// Largest number of positions.
    pub n_ctx: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Blocks.
    pub n_layer: usize,
    /// Heads; divides `d_model`.
    pub n_head: usize,
    /// Width of the coordinates.
    pub d_coords: usize,
    /// Width of the basis.
    pub n_basis: usize,
    /// Width of the MLP.
    pub d_mlp: usize,
    /// Form of the basis.
    pub basis: Basis,
    /// Whether the basis reaches the logits, as run files say it.
    pub wire_basis: bool,
    /// Factor of its branch; `None` where it reaches none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fsa_gain: Option<f64>,
    /// The largest score.
    pub score_scale: ScoreScale,
    /// Vectors of positions.
    pub positions: Positions,
}

words! {
    /// Vectors of positions.
    pub enum Positions {
        /// Parameters.
        Learned = "learned",
        /// Ramanujan's sums.
        Ramanujan = "ramanujan",
    }
}

fn read(table: &mut Table<'_>) -> Found<NmGptMini> {
    let [vocab, n_ctx, d_model, n_layer] = read_sizes(table, 2);
    let n_head = read_heads(table, d_model);
    let d_coords = table.need("d_coords", Size::at_least(1));
    let n_basis = table.need("n_basis", Size::at_least(1));
    let d_mlp = read_d_mlp(table, d_model, [8, 3]);
    let basis = table.or("basis", Basis::LEARNED, Basis::Softmax);
    let wire_basis = table.or("wire_basis", Flag, true);
    let gain = table.or("fsa_gain", Number::FINITE, 1.0);
    let fsa_gain = match wire_basis {
        Some(false) if table.has("fsa_gain") => table.refuse(
            "fsa_gain",
            "nothing is multiplied by it with wire_basis = false",
        ),
        Some(false) => Some(None),
        _ => gain.map(Some),
    };
    let score_scale = table.or("score_scale", ScoreScale::WORDS, ScoreScale::Fixed);
    let positions = table.or("positions", Positions::WORDS, Positions::Learned);
    let network = all_read! {
        NmGptMini: vocab, n_ctx, d_model, n_layer, n_head, d_coords, n_basis, d_mlp, basis,
            wire_basis, fsa_gain, score_scale, positions
    };
    Found::of_tokens(n_ctx, network)
}

pub(super) const NM_GPT_MINI: Listed<NmGptMini> = Listed::new(read, |sizes| Ok(Arc::new(*sizes)));

const EMBEDDING: &str = "token_embedding";
const HEAD: &str = "lm_head";
const LAST_NORM: &str = "norm.weight";
const LAST_EPS: f32 = 1e-6;

impl NmGptMini {
    fn attention(&self) -> KaufmannLayer {
        KaufmannLayer {
            d_model: self.d_model,
            n_head: self.n_head,
            d_coords: self.d_coords,
            score_scale: self.score_scale,
            steps: 2,
        }
    }

    fn spectral(&self) -> SpectralLayer {
        SpectralLayer {
            d_coords: self.d_coords,
            n_basis: self.n_basis,
            basis: self.basis,
        }
    }

    /// Width of the hidden layers of the coordinates' encoder.
    fn d_encoder(&self) -> usize {
        self.d_model / 2
    }

    /// Name of the tensor of positions.
    fn positions_name(&self) -> &'static str {
        match self.positions {
            Positions::Learned => "pos_embedding.weight",
            Positions::Ramanujan => "table",
        }
    }

    /// Coordinates f32 `[b, t, m]`.
    fn coordinates(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        block: &str,
        x_btd: Value,
    ) -> Result<Value> {
        let mut h = x_btd;
        for part in [0, 3] {
            h = pass.linear(b, &format!("{block}.manifold.encoder.{part}"), h)?;
            let norm = format!("{block}.manifold.encoder.{}", part + 1);
            h = layer_norm(b, pass, &norm, h, NORM_EPS)?;
            h = b.silu(h)?;
        }
        pass.linear(b, &format!("{block}.manifold.encoder.6"), h)
    }

    /// The branch that the basis reaches, f32 `[b, t, d]`.
    fn fsa(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        block: &str,
        [x_btd, phi_btk]: [Value; 2],
        gain: f64,
    ) -> Result<Value> {
        let width = self.n_head * self.n_basis;
        let normed_btd = layer_norm(b, pass, &format!("{block}.norm_s"), x_btd, NORM_EPS)?;
        let qkv = pass.linear(b, &format!("{block}.fsa.to_qkv"), normed_btd)?;
        let part = |b: &mut Builder, at: usize| b.slice(qkv, at * width..(at + 1) * width);
        let (q, k, v) = (part(b, 0)?, part(b, 1)?, part(b, 2)?);
        let phi = b.concatenate(&vec![phi_btk; self.n_head])?;
        let (q, k) = (b.mul(q, phi)?, b.mul(k, phi)?);
        let mixed = b.linear_attention([q, k, v], self.n_head)?;
        let y_btd = pass.linear(b, &format!("{block}.fsa.to_out"), mixed)?;
        times(b, y_btd, gain)
    }
}

impl Target for NmGptMini {
    fn describe(&self) -> String {
        let wired = self.fsa_gain.map(|gain| format!("wired {gain}"));
        let wired = wired.unwrap_or_else(|| "unwired".to_owned());
        format!(
            "nm_gpt_mini, {} layers of width {}, {} heads, {} scores of {} coordinates, {} basis of {}, {wired}, mlp {}, {} tokens, {} {} positions",
            self.n_layer,
            self.d_model,
            self.n_head,
            self.score_scale.word(),
            self.d_coords,
            self.basis.word(),
            self.n_basis,
            self.d_mlp,
            self.vocab,
            self.n_ctx,
            self.positions.word(),
        )
    }

    fn input(&self) -> Input {
        Input::tokens(self.vocab, self.n_ctx)
    }

    fn cut_to(&self, most: Most) -> Option<Network> {
        let [n_head, _] = most.heads(self.d_model, self.n_head, self.n_head);
        let d_model = self.d_model.min(most.width);
        Some(Arc::new(Self {
            vocab: self.vocab.min(most.vocab),
            n_ctx: self.n_ctx.min(most.positions),
            d_model,
            n_layer: self.n_layer.min(most.layers),
            n_head,
            d_mlp: self.d_mlp.min(4 * d_model),
            ..*self
        }))
    }

    fn layers(&self) -> Vec<Layer> {
        let (d, h, m) = (self.d_model, self.d_encoder(), self.d_coords);
        let width = self.n_head * self.n_basis;
        let mut all = vec![Layer::embedding(EMBEDDING, self.vocab, d)];
        for layer in 0..self.n_layer {
            let block = format!("blocks.{layer}.");
            let encoder = [
                ("manifold.encoder.0", d, h, true),
                ("manifold.encoder.3", h, h, true),
                ("manifold.encoder.6", h, m, true),
            ];
            all.extend(Layer::below(&block, encoder));
            all.extend(self.spectral().layers(&format!("{block}spectral.")));
            all.extend(self.attention().layers(&format!("{block}attention.")));
            if self.fsa_gain.is_some() {
                let fsa = [
                    ("fsa.to_qkv", d, 3 * width, false),
                    ("fsa.to_out", width, d, true),
                ];
                all.extend(Layer::below(&block, fsa));
            }
            let mlp = [
                ("mlp.w_gate", d, self.d_mlp, false),
                ("mlp.w_up", d, self.d_mlp, false),
                ("mlp.w_down", self.d_mlp, d, false),
            ];
            all.extend(Layer::below(&block, mlp));
        }
        all.push(Layer::head(HEAD, d, self.vocab, None));
        all
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let (d, h) = (self.d_model, self.d_encoder());
        let normal = Start::Normal(0.02);
        let dims = [self.n_ctx, d];
        let mut all = vec![match self.positions {
            Positions::Learned => TargetTensor::trained(self.positions_name(), &dims, normal),
            Positions::Ramanujan => {
                TargetTensor::fixed(self.positions_name(), &dims, Start::Ramanujan)
            }
        }];
        for layer in 0..self.n_layer {
            let block = format!("blocks.{layer}");
            for part in [1, 4] {
                all.extend(layer_norm_tensors(
                    &format!("{block}.manifold.encoder.{part}"),
                    h,
                ));
            }
            all.extend(self.spectral().tensors(&format!("{block}.spectral.")));
            let attention = format!("{block}.attention.");
            all.extend(self.attention().tensors(&attention, normal, Start::Zeros));
            let of_fsa = self.fsa_gain.map(|_| "norm_s");
            for norm in ["norm1", "norm2"].into_iter().chain(of_fsa) {
                all.extend(layer_norm_tensors(&format!("{block}.{norm}"), d));
            }
        }
        all.push(TargetTensor::trained(LAST_NORM, &[d], Start::Ones));
        let layers = self.layers();
        let starting = |layer| TargetTensor::starting(layer, [normal, Start::Zeros]);
        all.extend(layers.iter().flat_map(starting));
        all
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, tokens_bt: Value) -> Result<Value> {
        let positions_td = pass.weight(self.positions_name());
        let mut x_btd = pass.embedding(b, EMBEDDING, tokens_bt, Some(positions_td))?;
        for layer in 0..self.n_layer {
            let block = format!("blocks.{layer}");
            let c_btm = self.coordinates(b, pass, &block, x_btd)?;
            let spectral = format!("{block}.spectral.");
            let phi_btk = self.spectral().forward(b, pass, &spectral, c_btm, 0.01)?;
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm1"), x_btd, NORM_EPS)?;
            let attention = format!("{block}.attention.");
            let attn_btd = self
                .attention()
                .forward(b, pass, &attention, [normed_btd, c_btm])?;
            x_btd = b.add(x_btd, attn_btd)?;
            if let Some(gain) = self.fsa_gain {
                let branch_btd = self.fsa(b, pass, &block, [x_btd, phi_btk], gain)?;
                x_btd = b.add(x_btd, branch_btd)?;
            }
            let normed_btd = layer_norm(b, pass, &format!("{block}.norm2"), x_btd, NORM_EPS)?;
            let gate_btm = pass.linear(b, &format!("{block}.mlp.w_gate"), normed_btd)?;
            let up_btm = pass.linear(b, &format!("{block}.mlp.w_up"), normed_btd)?;
            let hidden_btm = b.swiglu(gate_btm, up_btm)?;
            let mlp_btd = pass.linear(b, &format!("{block}.mlp.w_down"), hidden_btm)?;
            x_btd = b.add(x_btd, mlp_btd)?;
        }
        let x_btd = b.rms_norm(x_btd, pass.weight(LAST_NORM), LAST_EPS)?;
        pass.linear(b, HEAD, x_btd)
    }
}

/// `c_q(n) / sqrt(q)`: Ramanujan's sum, `mu(q / g) phi(q) / phi(q / g)` with `g = gcd(n, q)`.
pub(crate) fn ramanujan(n: usize, q: usize) -> f64 {
    let (mut g, mut rest) = (q, n);
    while rest != 0 {
        (g, rest) = (rest, g % rest);
    }
    let (mut mobius, mut part, mut reduced) = (1.0, 1.0, q / g);
    let (mut phi, mut of_q) = (1.0, q);
    for prime in 2..=q {
        let (power, power_of_q) = (
            multiplicity(&mut reduced, prime),
            multiplicity(&mut of_q, prime),
        );
        let totient = |power: u32| match power.checked_sub(1) {
            None => 1.0,
            Some(others) => (prime - 1) as f64 * (prime as f64).powi(others.cast_signed()),
        };
        mobius *= [1.0, -1.0, 0.0][power.min(2) as usize];
        part *= totient(power);
        phi *= totient(power_of_q);
    }
    mobius * phi / part / (q as f64).sqrt()
}

/// How often a number divides another, which it then no longer does.
fn multiplicity(number: &mut usize, divisor: usize) -> u32 {
    let mut times = 0;
    while number.is_multiple_of(divisor) {
        *number /= divisor;
        times += 1;
    }
    times
}

#[cfg(test)]
mod tests {
    use super::ramanujan;

    // N7: the sum over the residues that are prime to q of cos(2 pi a n / q).
    #[test]
    fn ramanujan_sums_are_sums_of_cosines() {
        let gcd = |mut a: usize, mut b: usize| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        for q in 1..=40 {
            for n in 0..60 {
                let residues = (1..=q).filter(|&a| gcd(a, q) == 1);
                let terms = residues.map(|a| {
                    let turns = (a * n % q) as f64 / q as f64;
                    (std::f64::consts::TAU * turns).cos()
                });
                let sum = terms.sum::<f64>() / (q as f64).sqrt();
                assert!((ramanujan(n, q) - sum).abs() < 1e-12, "{q} {n}");
                assert!((ramanujan(n + q, q) - sum).abs() < 1e-12, "{q} {n}");
            }
        }
    }
}
