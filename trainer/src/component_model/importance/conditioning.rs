//! Logits that see the activations of their own components, beside what an importance function of
//! any kind makes of the inputs. With `h = x V` of a component,
//!
//! ```text
//! z + s_p clamp(a_p h + b_p) + s_n clamp(b_n - a_n h) + bias
//! ```
//!
//! where `clamp` is between 0 and 1, and leaks on both sides: its gradient is that between 0 and 1,
//! and beyond either of them a hundredth of it where that leads back, or else nothing. The seven
//! numbers of each component are learned, and the gradient flows into `V` too. `s_p` and `s_n`
//! start at `output_scale`, `a_p` and `a_n` at `input_scale`, or else at the reciprocal of the
//! 0.999-quantile of `|h|` over some training rows, and the others at 0.
//!
//! # Keys of `[importance]`
//!
//! - `conditioning` | none | | `{ output_scale, input_scale }`: logits also see the activation of
//!   their own component, times the latter, between -1 and 1, times the former; numbers that are
//!   learned start so. With `min_tokens` in the place of `input_scale`, it is the reciprocal of the
//!   0.999-quantile of the activation's size over so many positions of the training data

use serde::Serialize;
use spd_configs::all_read;
use spd_configs::reader::Table;
use spd_configs::values::{Number, Whole};
use spd_engine::ops::{Gates, ImportanceGates, LogitNoise};
use spd_engine::{Builder, Result, Value};

use super::SeenSite;
use super::layers::{ImportanceTensor, Weights};
use crate::networks::Start;
use crate::sites::Site;

/// Logits that see the activations of their own components.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditioning {
    /// Start of the factors of what is added to logits.
    pub output_scale: f64,
    /// Start of the factors of activations, unless they follow from these.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_scale: Option<f64>,
    /// Positions over which activations are looked at for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_tokens: Option<u64>,
}

/// The names of the vectors of one side.
const SIDE: [&str; 3] = ["input_scale", "input_bias", "output_scale"];

fn name(site: &Site, vector: &str) -> String {
    format!("_ci_fns.readouts.{}.{vector}", site.dashed())
}

/// Names of the factors of a site's activations.
pub(crate) fn input_scales(site: &Site) -> [String; 2] {
    ["positive", "negative"].map(|side| name(site, &format!("{side}.{}", SIDE[0])))
}

impl Conditioning {
    /// Reads its keys.
    pub(super) fn read(table: &mut Table<'_>) -> Option<Self> {
        let output_scale = table.need("output_scale", Number::FINITE);
        let input_scale = table.maybe("input_scale", Number::POSITIVE);
        let min_tokens = table.maybe("min_tokens", Whole::at_least(1));
        let found = match (input_scale, min_tokens) {
            (Some(None), Some(None)) => Some("neither"),
            (Some(Some(_)), Some(Some(_))) => Some("both"),
            _ => None,
        };
        if let Some(found) = found {
            let message = format!("expected either `input_scale` or `min_tokens`, found {found}");
            table.refuse_table::<()>(message);
        }
        all_read! { Self: output_scale, input_scale, min_tokens }
    }

    /// Its tensors.
    pub(super) fn tensors(&self, sites: &[Site]) -> Vec<ImportanceTensor> {
        let input_scale = self.input_scale.unwrap_or(1.0);
        let starts = [input_scale, 0.0, self.output_scale].map(Start::Filled);
        let of_site = |(index, site): (usize, &Site)| {
            let tensor = |vector: &str, start| ImportanceTensor {
                name: name(site, vector),
                dims: vec![site.components],
                start,
                // Nothing is drawn.
                draws: (index, 0),
            };
            let sides = ["positive", "negative"].into_iter().flat_map(|side| {
                let vectors = SIDE.iter().zip(starts);
                vectors.map(move |(vector, start)| (format!("{side}.{vector}"), start))
            });
            let tensors = sides.map(|(vector, start)| tensor(&vector, start));
            let mut tensors: Vec<ImportanceTensor> = tensors.collect();
            tensors.push(tensor("bias", Start::Zeros));
            tensors
        };
        sites.iter().enumerate().flat_map(of_site).collect()
    }
}

/// Adds to the logits of a site what the activations of its components say.
pub(super) fn add(
    b: &mut Builder,
    weights: Weights<'_>,
    seen: &SeenSite<'_>,
    mut logits: Value,
) -> Result<Value> {
    let acts = seen.activations(b)?;
    let vector = |b: &mut Builder, vector: &str| weights(b, &name(seen.site, vector));
    let zeros = b.constant(0.0, &[seen.site.components])?;
    for side in ["positive", "negative"] {
        let of_side = |b: &mut Builder, index: usize| vector(b, &format!("{side}.{}", SIDE[index]));
        let [mut scale, shift, out] = [0, 1, 2].map(|index| of_side(b, index));
        let mut bias = zeros;
        if side == "negative" {
            scale = b.elementwise(["minus", "minus_grad"], [scale], |[a]| a * -1.0)?;
            bias = vector(b, "bias");
        }
        let limited = each(b, acts, scale, shift)?;
        let clamped = clamp(b, limited)?;
        let added = each(b, clamped, out, bias)?;
        logits = b.add(logits, added)?;
    }
    Ok(logits)
}

/// `x * scale + bias` for each column of f32 `[.., c]`.
fn each(b: &mut Builder, x: Value, scale: Value, bias: Value) -> Result<Value> {
    let c = b.ty(scale).len();
    let scale = b.reshape(scale, &[c, 1, 1])?;
    b.parallel_linear(x, scale, bias)
}

/// `x` between 0 and 1, leaking on both sides. The lower leaky gate does so below 0 and passes
/// nothing above 1, and the same upside down does so above 1: where both pass all, the hard one
/// takes one of them away.
fn clamp(b: &mut Builder, x: Value) -> Result<Value> {
    let names = ["upside_down", "upside_down_grad"];
    let low = gate(b, Gates::LeakyHard, x)?;
    let down = b.elementwise(names, [x], |[x]| 1.0 - x)?;
    let down = gate(b, Gates::LeakyHard, down)?;
    let hard = gate(b, Gates::Hard, x)?;
    let names = ["leaky_clamp", "leaky_clamp_grad"];
    b.elementwise(names, [low, down, hard], |[low, down, hard]| {
        low + (1.0 - down) - hard
    })
}

fn gate(b: &mut Builder, gates: Gates, x: Value) -> Result<Value> {
    let op = ImportanceGates {
        gates,
        noise: LogitNoise::None,
        penalty: None,
        alive: 0.0,
    };
    Ok(b.importance_gates(op, x, None)?.importance)
}
