//! Kaufmann attention, alone: an attention whose scores are those of a small network (the knot
//! gate), and Euler steps of a reaction at each element that its result drives.
//!
//! ```text
//! q, k, v = to_q x, to_k x, to_v x, in heads
//! alpha_i = cross_q q_i + cross_ci c_i + b        kappa_j = cross_k k_j + cross_cj c_j
//! o_i = attention over j <= i with scores  scale tanh((w . silu(alpha_i + kappa_j) + beta) / 2)
//! y = to_out invariant_net.2 silu(invariant_net.0 o)        u = out_proj reaction(x, y)
//! ```
//!
//! `w` and `beta` are the differences of the two rows of `crossing_net.2`. `cross_q`, `cross_k`,
//! `cross_ci` and `cross_cj` are the columns of the published `crossing_net.0`: one matrix on each
//! pair of positions would be the same function, but a mask of each pair would have to be stored.
//! `cross_q` and `cross_k` meet every head of a position, so their sites have a row for each.
//!
//! `scale` is `1 / sqrt(d_head)`: weights then lie within `e^(2 / sqrt(d_head))` of one another,
//! and select little. A learned one starts at 8. The toy reads positions of random `x` and `c`, and
//! is trained to give `x` again.
//!
//! # Keys of `[target]`
//!
//! - kaufmann, spectral: `positions` | | | positions of a sequence; a row of features is one
//! - kaufmann: `d_model`, `n_head`, `d_coords` | | | widths of `x` and of `c`
//! - kaufmann, nm_gpt_mini: `score_scale` | `"fixed"` | | `"fixed"` or `"learnable"`
//! - kaufmann: `steps` | 2 | | Euler steps

use std::sync::Arc;

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::Size;
use spd_configs::words;
use spd_engine::ops::{AdditiveScores, ReactionParameters};
use spd_engine::{Builder, Result, Value};

use super::layer::add_bias;
use super::{Found, Input, Layer, Listed, Start, Target, TargetTensor, read_heads};
use crate::pass::Pass;
use crate::rounded::rounded;

/// Sizes of a Kaufmann attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Kaufmann {
    /// Positions of a sequence.
    pub positions: usize,
    /// The layer.
    #[serde(flatten)]
    pub layer: KaufmannLayer,
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KaufmannLayer {
    /// Width of `x`.
    pub d_model: usize,
    /// Heads; divides `d_model`.
    pub n_head: usize,
    /// Width of the coordinates.
    pub d_coords: usize,
    /// The largest score.
    pub score_scale: ScoreScale,
    /// Euler steps.
    pub steps: usize,
}

words! {
    /// The largest score.
    pub enum ScoreScale {
        /// `1 / sqrt(d_head)`.
        Fixed = "fixed",
        /// A parameter that starts at 8.
        Learnable = "learnable",
    }
}

fn read(table: &mut Table<'_>) -> Found<Kaufmann> {
    let positions = table.need("positions", Size::at_least(1));
    let d_model = table.need("d_model", Size::at_least(2));
    let n_head = read_heads(table, d_model);
    let d_coords = table.need("d_coords", Size::at_least(1));
    let score_scale = table.or("score_scale", ScoreScale::WORDS, ScoreScale::Fixed);
    let steps = table.or("steps", Size::at_least(1), 2);
    let layer = all_read! { KaufmannLayer: d_model, n_head, d_coords, score_scale, steps };
    let network = all_read! { Kaufmann: positions, layer };
    Found::of_features(network.map(|network| network.features()), network)
}

pub(super) const KAUFMANN: Listed<Kaufmann> = Listed::new(read, |sizes| Ok(Arc::new(*sizes)));

impl Kaufmann {
    fn features(&self) -> usize {
        self.positions * (self.layer.d_model + self.layer.d_coords)
    }
}

impl KaufmannLayer {
    /// Width of the network of scores.
    fn hidden(&self) -> usize {
        self.d_model / 2
    }

    /// Its layers, below `prefix`, which is empty or ends with a dot.
    pub(super) fn layers(&self, prefix: &str) -> Vec<Layer> {
        let (d, e, m) = (self.d_model, self.hidden(), self.d_coords);
        let size = d / self.n_head;
        let layers = [
            ("knot_gate.to_q", d, d, false),
            ("knot_gate.to_k", d, d, false),
            ("knot_gate.to_v", d, d, false),
            ("knot_gate.cross_q", size, e, false),
            ("knot_gate.cross_k", size, e, false),
            ("knot_gate.cross_ci", m, e, false),
            ("knot_gate.cross_cj", m, e, false),
            ("knot_gate.invariant_net.0", d, d, true),
            ("knot_gate.invariant_net.2", d, d, true),
            ("knot_gate.to_out", d, d, false),
            ("out_proj", d, d, true),
        ];
        Layer::below(prefix, layers).to_vec()
    }

    /// Its tensors beside those of the layers. `weight` starts the last layer of the scores.
    pub(super) fn tensors(&self, prefix: &str, weight: Start, bias: Start) -> Vec<TargetTensor> {
        let e = self.hidden();
        let trained = |name: &str, dims: &[usize], start| {
            TargetTensor::trained(format!("{prefix}{name}"), dims, start)
        };
        let mut all = vec![
            trained("knot_gate.crossing_net.0.bias", &[e], bias),
            trained("knot_gate.crossing_net.2.weight", &[2, e], weight),
            trained("knot_gate.crossing_net.2.bias", &[2], bias),
            trained("a", &[], Start::Filled(0.7)),
            trained("b", &[], Start::Filled(0.8)),
            trained("dt", &[], Start::Filled(0.1)),
        ];
        if self.score_scale == ScoreScale::Learnable {
            all.push(trained("knot_gate.score_scale", &[], Start::Filled(8.0)));
        }
        all
    }

    /// From `x` f32 `[b, t, d]` and coordinates f32 `[b, t, m]` to f32 `[b, t, d]`.
    pub(super) fn forward(
        &self,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        prefix: &str,
        of: [Value; 2],
    ) -> Result<Value> {
        self.forward_by(Ways::ONE_OP_EACH, b, pass, prefix, of)
    }

    fn forward_by(
        &self,
        ways: Ways,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        prefix: &str,
        [x_btd, c_btm]: [Value; 2],
    ) -> Result<Value> {
        let (d, e, heads) = (self.d_model, self.hidden(), self.n_head);
        let [rows, t] = [b.ty(x_btd).dims[0], b.ty(x_btd).dims[1]];
        let path = |name: &str| format!("{prefix}{name}");
        let cross = |b: &mut Builder, pass: &mut Pass<'_>, to: &str, cross: &str| {
            let of_heads = pass.linear(b, &path(to), x_btd)?;
            let of_heads = b.reshape(of_heads, &[rows, t, heads, d / heads])?;
            pass.linear(b, &path(cross), of_heads)
        };
        let q_bthe = cross(b, pass, "knot_gate.to_q", "knot_gate.cross_q")?;
        let k_bthe = cross(b, pass, "knot_gate.to_k", "knot_gate.cross_k")?;
        let v_btd = pass.linear(b, &path("knot_gate.to_v"), x_btd)?;
        let ci_bte = pass.linear(b, &path("knot_gate.cross_ci"), c_btm)?;
        let ci_bte = add_bias(
            b,
            ci_bte,
            pass.weight(&path("knot_gate.crossing_net.0.bias")),
        )?;
        let cj_bte = pass.linear(b, &path("knot_gate.cross_cj"), c_btm)?;
        let scale = match self.score_scale {
            ScoreScale::Learnable => pass.weight(&path("knot_gate.score_scale")),
            ScoreScale::Fixed => b.constant(1.0 / rounded(((d / heads) as f64).sqrt()), &[])?,
        };
        let w = pass.weight(&path("knot_gate.crossing_net.2.weight"));
        let beta = pass.weight(&path("knot_gate.crossing_net.2.bias"));
        let scores = AdditiveScores {
            by_head: [q_bthe, k_bthe],
            shared: [ci_bte, cj_bte],
            w: difference(b, w, &[e])?,
            beta: difference(b, beta, &[])?,
            scale,
        };
        let o_btd = (ways.attention)(b, scores, v_btd)?;
        let hidden = pass.linear(b, &path("knot_gate.invariant_net.0"), o_btd)?;
        let hidden = b.silu(hidden)?;
        let hidden = pass.linear(b, &path("knot_gate.invariant_net.2"), hidden)?;
        let y_btd = pass.linear(b, &path("knot_gate.to_out"), hidden)?;
        let with = ReactionParameters {
            a: pass.weight(&path("a")),
            b: pass.weight(&path("b")),
            dt: pass.weight(&path("dt")),
        };
        let u_btd = (ways.reaction)(b, [x_btd, y_btd], with, self.steps)?;
        pass.linear(b, &path("out_proj"), u_btd)
    }
}

/// How the attention and the reaction of a layer are computed.
#[derive(Clone, Copy)]
pub(crate) struct Ways {
    /// Causal attention of scores to values f32 `[b, t, d]`.
    pub(crate) attention: fn(&mut Builder, AdditiveScores, Value) -> Result<Value>,
    /// Some steps from `x` and `y`.
    pub(crate) reaction: fn(&mut Builder, [Value; 2], ReactionParameters, usize) -> Result<Value>,
}

impl Ways {
    pub(crate) const ONE_OP_EACH: Self = Self {
        attention: |b, scores, v| b.additive_attention(scores, v, true),
        reaction: |b, [x, y], with, steps| b.reaction(x, y, with, steps),
    };
}

impl Kaufmann {
    pub(crate) fn forward_by(
        &self,
        ways: Ways,
        b: &mut Builder,
        pass: &mut Pass<'_>,
        input: Value,
    ) -> Result<Value> {
        let (rows, t, d) = (b.ty(input).rows(), self.positions, self.layer.d_model);
        let x = b.slice(input, 0..t * d)?;
        let c = b.slice(input, t * d..self.features())?;
        let x_btd = b.reshape(x, &[rows, t, d])?;
        let c_btm = b.reshape(c, &[rows, t, self.layer.d_coords])?;
        let y_btd = self.layer.forward_by(ways, b, pass, "", [x_btd, c_btm])?;
        b.reshape(y_btd, &[rows, t * d])
    }
}

/// The first of two rows less the second.
fn difference(b: &mut Builder, rows: Value, dims: &[usize]) -> Result<Value> {
    let len = b.ty(rows).len() / 2;
    let flat = b.reshape(rows, &[2 * len])?;
    let (first, second) = (b.slice(flat, 0..len)?, b.slice(flat, len..2 * len)?);
    let difference = b.elementwise(
        ["difference", "difference_grad"],
        [first, second],
        |[x, y]| x - y,
    )?;
    b.reshape(difference, dims)
}

impl Target for Kaufmann {
    fn describe(&self) -> String {
        let KaufmannLayer {
            d_model,
            n_head,
            d_coords,
            steps,
            ..
        } = self.layer;
        let scale = self.layer.score_scale.word();
        format!(
            "kaufmann, width {d_model}, {n_head} heads, {d_coords} coordinates, {scale} scores, {steps} steps, {} positions",
            self.positions
        )
    }

    fn input(&self) -> Input {
        Input::Features(self.features())
    }

    fn positions(&self) -> usize {
        self.positions
    }

    fn layers(&self) -> Vec<Layer> {
        self.layer.layers("")
    }

    fn tensors(&self) -> Vec<TargetTensor> {
        let start = Start::Uniform(1.0 / (self.layer.hidden() as f64).sqrt());
        let layers = self.layers();
        let of_layers = layers.iter().flat_map(TargetTensor::of_layer);
        of_layers
            .chain(self.layer.tensors("", start, start))
            .collect()
    }

    fn forward(&self, b: &mut Builder, pass: &mut Pass<'_>, input: Value) -> Result<Value> {
        self.forward_by(Ways::ONE_OP_EACH, b, pass, input)
    }

    fn loss(&self, b: &mut Builder, input: Value, output: Value) -> Result<Value> {
        let x = b.slice(input, 0..self.positions * self.layer.d_model)?;
        b.mse(output, x)
    }
}
