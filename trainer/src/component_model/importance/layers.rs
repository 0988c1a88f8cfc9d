//! Layers that importance functions are made of: their tensors, and their values in a program.
//!
//! A linear layer's weight is f32 `[d_in, d_out]` and starts normal with standard deviation
//! `gain / sqrt(d_in)`: gain `sqrt 2` before a GELU, 1 at an end. The projections of an attention
//! are f32 `[d_out, d]` without a bias, and start uniform within `1 / sqrt(d)`.

use serde::Serialize;
use serde_json::{Value as Json, json};
use spd_configs::reader::Table;
use spd_configs::values::Number;
use spd_engine::ops::{GeluKind, Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use crate::networks::Start;
use crate::run_file::reference::Made;

/// The tensors of an importance function in a program, by name.
pub(super) type Weights<'w> = &'w dyn Fn(&mut Builder, &str) -> Value;

/// Gain of a linear layer before a GELU.
pub(super) const BEFORE_GELU: f64 = std::f64::consts::SQRT_2;

/// Gain of one at an end.
pub(super) const AT_END: f64 = 1.0;

/// Added to a mean square.
const NORM_EPS: f32 = f32::EPSILON;

/// A tensor of an importance function.
pub(super) struct ImportanceTensor {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) start: Start,
    /// The site and the number, from 2 on, that key its starting draws; those of a network over all
    /// sites are of the site behind the last.
    pub(super) draws: (usize, usize),
}

/// A linear layer: weight and bias, and the lengths of its input and output.
pub(super) struct Linear {
    pub(super) weight: String,
    pub(super) bias: String,
    d_in: usize,
    d_out: usize,
}

impl Linear {
    /// The one of the module `of`.
    pub(super) fn new(of: &str, d_in: usize, d_out: usize) -> Self {
        Self {
            weight: format!("_ci_fns.{of}.W"),
            bias: format!("_ci_fns.{of}.b"),
            d_in,
            d_out,
        }
    }

    /// From f32 `[.., d_in]` to `[.., d_out]`.
    pub(super) fn apply(&self, b: &mut Builder, weights: Weights<'_>, x: Value) -> Result<Value> {
        let (weight, bias) = (weights(b, &self.weight), weights(b, &self.bias));
        b.linear_io(x, weight, Some(bias))
    }
}

/// The linear layers of an MLP in the module `of`. The odd numbers are its GELUs.
pub(super) fn mlp_layers(of: &str, d_in: usize, hidden: &[usize], d_out: usize) -> Vec<Linear> {
    let widths = [&[d_in], hidden, &[d_out]].concat();
    let pairs = widths.windows(2).enumerate();
    pairs
        .map(|(depth, pair)| Linear::new(&format!("{of}.{}", 2 * depth), pair[0], pair[1]))
        .collect()
}

/// An MLP from f32 `[.., d_in]` to `[.., d_out]`: exact GELUs between its layers.
pub(super) fn mlp(
    b: &mut Builder,
    weights: Weights<'_>,
    layers: &[Linear],
    mut x: Value,
) -> Result<Value> {
    for (depth, layer) in layers.iter().enumerate() {
        if depth > 0 {
            x = b.gelu(x, GeluKind::Exact)?;
        }
        x = layer.apply(b, weights, x)?;
    }
    Ok(x)
}

/// Each row of f32 `[.., d]`, brought to a mean square of 1; times f32 `[d]` if there is a `scale`.
pub(super) fn norm(b: &mut Builder, x: Value, scale: Option<Value>) -> Result<Value> {
    let scale = match scale {
        Some(scale) => scale,
        None => {
            let columns = b.ty(x).columns();
            b.constant(1.0, &[columns])?
        }
    };
    b.rms_norm(x, scale, NORM_EPS)
}

/// The name of the scale of the norm `of`.
pub(super) fn scale_name(of: &str) -> String {
    format!("_ci_fns.{of}.weight")
}

/// Attention of each position to all of its row, by rotary queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SelfAttention {
    /// Heads, of an even width.
    pub n_head: usize,
    /// Base of the rotary angles.
    pub rope_base: f64,
}

const PROJECTIONS: [&str; 4] = ["q_proj", "k_proj", "v_proj", "out_proj"];

fn projection_name(of: &str, projection: &str) -> String {
    format!("_ci_fns.{of}.{projection}.weight")
}

impl SelfAttention {
    /// Reads its keys, beside `n_head`.
    pub(super) fn read(
        table: &mut Table<'_>,
        d_model: Option<usize>,
        n_head: Option<usize>,
    ) -> Option<Self> {
        let rope_base = table.or("rope_base", Number::POSITIVE, 1e4);
        let (d_model, n_head) = (d_model?, n_head?);
        check_heads(table, d_model, n_head)?;
        Some(Self {
            n_head,
            rope_base: rope_base?,
        })
    }

    /// Makes its keys of those in a run file of the SPD reference. Rows may have any length here.
    pub(super) fn from_reference(of: &mut Table<'_>, made: &mut Made) -> Option<()> {
        made.need(of, ("n_heads", "a whole number"), "n_head");
        made.carry(of, "rope_base", "rope_base");
        of.pass_over();
        Some(())
    }

    /// Its keys in a run file of the SPD reference, which asks for the longest row.
    pub(super) fn to_reference(self) -> Json {
        json!({ "n_heads": self.n_head, "max_len": 2048, "rope_base": self.rope_base })
    }

    /// From f32 `[b, t, d]` to `[b, t, d]`, with the projections of the module `of`.
    pub(super) fn apply(
        self,
        b: &mut Builder,
        weights: Weights<'_>,
        of: &str,
        x: Value,
    ) -> Result<Value> {
        let how = Attending {
            heads: Heads::full(self.n_head, self.n_head),
            rope_base: self.rope_base,
            documents: None,
        };
        attend(b, weights, of, x, how)
    }
}

/// Refuses heads of an odd width, whose columns rotary positions cannot turn in pairs.
pub(super) fn check_heads(table: &mut Table<'_>, d_model: usize, n_head: usize) -> Option<()> {
    if d_model.is_multiple_of(2 * n_head) {
        return Some(());
    }
    let message = format!(
        "the width of a head, d_model / n_head, has to be a whole even number, found {d_model} / {n_head}"
    );
    table.refuse("n_head", message)
}

/// How positions attend to each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attending {
    pub(super) heads: Heads,
    /// Base of the rotary angles.
    pub(super) rope_base: f64,
    /// The number of each position's document, f32 `[b, t]`, if they see no other.
    pub(super) documents: Option<Value>,
}

/// Attention by rotary queries and keys from f32 `[b, t, d]` to `[b, t, d]`, with the projections
/// of the module `of`.
pub(super) fn attend(
    b: &mut Builder,
    weights: Weights<'_>,
    of: &str,
    x: Value,
    how: Attending,
) -> Result<Value> {
    let project = |b: &mut Builder, projection, x| {
        let weight = weights(b, &projection_name(of, projection));
        b.linear_oi(x, weight, None)
    };
    let [q, k, v, out] = PROJECTIONS;
    let qkv = [project(b, q, x)?, project(b, k, x)?, project(b, v, x)?];
    let (positions, columns) = (b.ty(x).dims[1], b.ty(x).columns());
    let size = columns / how.heads.count;
    let rotary = Some(b.rotary_table(positions, size, how.rope_base, None)?);
    let qkv = Qkv::Apart(qkv);
    let mixed = b.attention_in_documents(qkv, how.heads, rotary, how.documents)?;
    project(b, out, mixed)
}

/// The tensors of a network, in the order of updates, while they are listed.
pub(super) struct Tensors {
    /// The site that its draws are of.
    site: usize,
    /// Components with a network each, for a leading dimension; `None` for one network.
    components: Option<usize>,
    /// Weights so far.
    drawn: usize,
    pub(super) list: Vec<ImportanceTensor>,
}

impl Tensors {
    pub(super) fn new(site: usize, components: Option<usize>) -> Self {
        Self {
            site,
            components,
            drawn: 0,
            list: Vec::new(),
        }
    }

    fn add(&mut self, name: String, own: &[usize], start: Start) {
        let leading = self.components.into_iter();
        self.list.push(ImportanceTensor {
            name,
            dims: leading.chain(own.iter().copied()).collect(),
            start,
            draws: (self.site, 2 + self.drawn),
        });
    }

    pub(super) fn linear(&mut self, layer: Linear, gain: f64) {
        let start = Start::Normal(gain / (layer.d_in as f64).sqrt());
        self.add(layer.weight, &[layer.d_in, layer.d_out], start);
        self.add(layer.bias, &[layer.d_out], Start::Zeros);
        self.drawn += 1;
    }

    /// Adds those of an MLP; `last` is the gain of its last layer.
    pub(super) fn mlp(&mut self, layers: Vec<Linear>, last: f64) {
        let end = layers.len() - 1;
        for (depth, layer) in layers.into_iter().enumerate() {
            self.linear(layer, if depth == end { last } else { BEFORE_GELU });
        }
    }

    /// Adds those of an attention in the module `of`: of the columns that it reads and gives, and
    /// of those of its keys and values.
    pub(super) fn attention(&mut self, of: &str, [d, kv]: [usize; 2]) {
        for (projection, rows) in PROJECTIONS.into_iter().zip([d, kv, kv, d]) {
            let start = Start::Uniform(1.0 / (d as f64).sqrt());
            self.add(projection_name(of, projection), &[rows, d], start);
            self.drawn += 1;
        }
    }

    /// The scale of the norm `of`.
    pub(super) fn scale(&mut self, of: &str, width: usize) {
        self.add(scale_name(of), &[width], Start::Ones);
    }
}
