//! Layers of spectral networks, composed of ops, against numbers computed in f64 by other programs:
//! `../shared/golden/spectral`, whose README says how.

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::path::{Path, PathBuf};

use candle_core::Device;

use super::{AdditiveScores, ReactionParameters};
use crate::op::{Builder, Result};
use crate::ops::oracle::{Sample, outputs};
use crate::store::Store;
use crate::value::Value;

// Of the README: what PyTorch in f32 deviates by, at most 5e-6, and a margin. Each is in units of a
// tensor's largest element.
const VALUES: f32 = 1e-5;
const GRADIENTS: f32 = 2e-5;
/// For gradients that nearly cancel.
const LARGER: f32 = 5e-5;

/// The numbers of a case by name, and a program to be compared with them.
struct Case {
    name: &'static str,
    numbers: BTreeMap<String, Sample>,
    b: Builder,
    store: Store,
    /// Operands of the program that may have a gradient, by name.
    leaves: BTreeMap<String, Value>,
    /// The sum of these is differentiated.
    terms: Vec<(f64, Value)>,
}

impl Case {
    /// `None` without the file, which is reported.
    fn of(name: &'static str) -> Option<Self> {
        let shared = std::env::var_os("SPD_SHARED").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
            PathBuf::from,
        );
        let path = shared.join(format!("golden/spectral/{name}.safetensors"));
        if !path.is_file() {
            spd_testing::skip("shared/golden/spectral");
            return None;
        }
        let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let numbers = tensors.into_iter().map(|(name, tensor)| {
            let values = tensor.flatten_all().unwrap().to_vec1().unwrap();
            let dims = tensor.dims().to_vec();
            (name, Sample { dims, values })
        });
        Some(Self {
            name,
            numbers: numbers.collect(),
            b: Builder::new(),
            store: Store::new(),
            leaves: BTreeMap::new(),
            terms: Vec::new(),
        })
    }

    fn has(&self, name: &str) -> bool {
        self.numbers.contains_key(name)
    }

    fn dims(&self, name: &str) -> &[usize] {
        &self.numbers[name].dims
    }

    fn kept(&mut self, name: &str, dims: &[usize], values: Vec<f32>) -> Value {
        let slot = self.store.add(name, dims, values);
        self.b.persistent(&self.store, slot)
    }

    /// An operand of the case.
    fn leaf(&mut self, name: &str) -> Value {
        if let Some(&leaf) = self.leaves.get(name) {
            return leaf;
        }
        let Sample { dims, values } = self.numbers[name].clone();
        let leaf = self.kept(name, &dims, values);
        self.leaves.insert(name.to_owned(), leaf);
        leaf
    }

    /// Compares a value with a result of the case, and differentiates it if the case does.
    fn result(&mut self, name: &str, value: Value) -> Result<()> {
        self.b.output(name, value);
        let cotangent = name.replacen("out", "cot", 1);
        if self.has(&cotangent) {
            let Sample { dims, values } = self.numbers[&cotangent].clone();
            let cotangent = self.kept(&cotangent, &dims, values);
            let names = ["dot", "dot_grad"];
            let term = self
                .b
                .elementwise_sum(names, 1.0, [value, cotangent], |[x, y]| x * y)?;
            self.terms.push((1.0, term));
        }
        Ok(())
    }

    /// Asserts that all results and gradients agree, on the CPU and on a device if there is one. A
    /// gradient that the case does not have is 0.
    fn agree(mut self, gradients: f32) {
        let loss = self.b.weighted_sum(&self.terms).unwrap();
        let leaves: Vec<(String, Value)> = self.leaves.into_iter().collect();
        let wanted: Vec<Value> = leaves.iter().map(|leaf| leaf.1).collect();
        let made = self.b.gradients(loss, &wanted).unwrap();
        for ((name, _), gradient) in leaves.iter().zip(made) {
            if let Some(gradient) = gradient {
                self.b.output(format!("grad.{name}"), gradient);
            } else {
                let theirs = self.numbers.get(&format!("grad.{name}"));
                let is_zero = theirs.is_none_or(|of| of.values.iter().all(|x| *x == 0.0));
                assert!(is_zero, "{} has a gradient of {name}", self.name);
            }
        }
        for (name, ours) in outputs(&self.b, self.store).into_iter().flatten() {
            let zeros = vec![0.0; ours.len()];
            let theirs = self.numbers.get(&name).map_or(&zeros, |of| &of.values);
            assert_eq!(ours.len(), theirs.len(), "{} {name}", self.name);
            let is_gradient = name.starts_with("grad.");
            let tolerance = if is_gradient { gradients } else { VALUES };
            let largest = theirs.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let unit = if largest < 1e-7 { 1.0 } else { largest };
            for (at, (x, y)) in ours.iter().zip(theirs).enumerate() {
                // The slope of the norm of a column of zeros, which PyTorch's gradient divides by.
                let y = if y.is_nan() { &0.0 } else { y };
                let is_close = (x - y).abs() <= tolerance * unit;
                assert!(is_close, "{} {name} {at}: ours {x}, theirs {y}", self.name);
            }
        }
    }

    /// A layer with a weight in PyTorch's layout, and its bias if there is one.
    fn linear(&mut self, x: Value, name: &str) -> Result<Value> {
        let w = self.leaf(&format!("param.{name}.weight"));
        let bias = format!("param.{name}.bias");
        let bias = self.has(&bias).then(|| self.leaf(&bias));
        self.b.linear_oi(x, w, bias)
    }

    /// The knot gate: attention with the scores of a crossing network, and a network of two layers.
    fn knot(&mut self, x: Value, c: Value, layer: &str) -> Result<Value> {
        let named = |name: &str| format!("{layer}{name}");
        let [b, t, d] = self.b.ty(x).dims[..] else {
            unreachable!("[b, t, d]");
        };
        let (heads, size) = (2, d / 2);
        let [q, k, v] = ["to_q", "to_k", "to_v"].map(|name| self.linear(x, &named(name)));
        let mut by_head = |x, name: &str| {
            let heads = self.b.reshape(x, &[b, t, heads, size])?;
            self.linear(heads, &named(name))
        };
        let by_head = [by_head(q?, "cross_q")?, by_head(k?, "cross_k")?];
        let w = self.leaf(&format!("param.{layer}cross_ci.weight"));
        let bias = self.leaf(&format!("param.{layer}crossing_net.0.bias"));
        let shared = [
            self.b.linear_oi(c, w, Some(bias))?,
            self.linear(c, &named("cross_cj"))?,
        ];
        // Over minus under.
        let difference = self.kept("difference", &[1, 2], vec![1.0, -1.0]);
        let w = self.leaf(&format!("param.{layer}crossing_net.2.weight"));
        let w = self.b.matmul(difference, w)?;
        let w = self.b.reshape(w, &[d / 2])?;
        let beta = self.leaf(&format!("param.{layer}crossing_net.2.bias"));
        let beta = self.b.reshape(beta, &[2, 1])?;
        let beta = self.b.matmul(difference, beta)?;
        let beta = self.b.reshape(beta, &[])?;
        let scale = if self.has("param.score_scale") {
            self.leaf("param.score_scale")
        } else {
            self.b.constant(1.0 / (size as f32).sqrt(), &[])?
        };
        let scores = AdditiveScores {
            by_head,
            shared,
            w,
            beta,
            scale,
        };
        let o = self.b.additive_attention(scores, v?, true)?;
        let hidden = self.linear(o, &named("invariant_net.0"))?;
        let hidden = self.b.silu(hidden)?;
        let y = self.linear(hidden, &named("invariant_net.2"))?;
        self.linear(y, &named("to_out"))
    }

    fn reaction_parameters(&mut self) -> ReactionParameters {
        let [a, b, dt] = ["a", "b", "dt"].map(|name| self.leaf(&format!("param.{name}")));
        ReactionParameters { a, b, dt }
    }

    /// The weights of a mixing as a kernel `[lags, d]`: a table of cosines and sines of the first
    /// frequencies, of a period, times the weights.
    fn mixing_kernel(&mut self, lags: usize, period: usize, used: usize) -> Result<Value> {
        let frequencies = self.dims("param.weight_real")[1];
        let scale = if period == lags { period } else { period / 2 };
        #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
        let entry = |at: usize| {
            let (lag, column) = (at / (2 * frequencies), at % (2 * frequencies));
            let frequency = column % frequencies;
            if frequency >= used {
                return 0.0;
            }
            let angle = 2.0 * PI * ((frequency * lag) % period) as f64 / period as f64;
            let of = if column < frequencies {
                angle.cos()
            } else {
                -angle.sin()
            };
            (of / scale as f64) as f32
        };
        let table = (0..lags * 2 * frequencies).map(entry).collect();
        let table = self.kept("table", &[lags, 2 * frequencies], table);
        let weights = ["real", "imag"].map(|part| self.leaf(&format!("param.weight_{part}")));
        let weights = self.b.concatenate(&weights)?;
        self.b.linear_oi(table, weights, None)
    }
}

/// Runs a case, if it is there.
fn compare(name: &'static str, gradients: f32, of: impl FnOnce(&mut Case) -> Result<()>) {
    if let Some(mut case) = Case::of(name) {
        of(&mut case).unwrap();
        case.agree(gradients);
    }
}

#[test]
fn knot_gates_agree() {
    for (name, gradients) in [
        ("knot", GRADIENTS),
        ("knot_mean", GRADIENTS),
        ("knot_t1", GRADIENTS),
        ("knot_scaled", LARGER),
    ] {
        compare(name, gradients, |case| {
            let (x, c) = (case.leaf("in.x"), case.leaf("in.c"));
            let y = case.knot(x, c, "")?;
            case.result("out.y", y)
        });
    }
}

#[test]
fn gates_with_a_reaction_agree() {
    for (name, steps) in [("kaufmann", 2), ("kaufmann_3", 3), ("kaufmann_nocoords", 2)] {
        compare(name, GRADIENTS, |case| {
            let x = case.leaf("in.x");
            let c = if case.has("in.c") {
                case.leaf("in.c")
            } else {
                case.b.slice(x, 0..4)?
            };
            let gate = case.knot(x, c, "knot_gate.")?;
            case.result("out.gate", gate)?;
            let with = case.reaction_parameters();
            let u = case.b.reaction(x, gate, with, steps)?;
            let y = case.linear(u, "out_proj")?;
            case.result("out.y", y)
        });
    }
}

#[test]
fn reactions_agree() {
    for (name, steps) in [("reaction_2", 2), ("reaction_3", 3), ("reaction_12", 12)] {
        compare(name, GRADIENTS, |case| {
            let (x, y) = (case.leaf("in.x"), case.leaf("in.y"));
            let ReactionParameters { a, b, dt } = case.reaction_parameters();
            let [u, w] = case.b.reaction_state([x, y, a, b, dt], steps)?;
            case.result("out.u", u)?;
            case.result("out.w", w)
        });
    }
}

#[test]
fn bases_and_their_penalties_agree() {
    for (name, gradients) in [
        ("sd_softmax", GRADIENTS),
        ("sd_l2", GRADIENTS),
        ("sd_2x64", GRADIENTS),
        ("sd_1x128", GRADIENTS),
        ("sd_ortho_only", LARGER),
    ] {
        compare(name, gradients, |case| {
            let c = case.leaf("in.c");
            let hidden = case.linear(c, "spectral_proj.0")?;
            let hidden = case.b.silu(hidden)?;
            let z = case.linear(hidden, "spectral_proj.2")?;
            let columns = case.b.ty(z).columns();
            let phi = if name == "sd_l2" {
                // z / |z| / sqrt(k), from the root of the mean square.
                let weight = case.b.constant(1.0 / columns as f32, &[columns])?;
                case.b.rms_norm(z, weight, 0.0)?
            } else {
                case.b.softmax(z)?
            };
            case.result("out.phi", phi)?;
            let penalty = case.b.gram_penalty(phi)?;
            let loss = case.b.weighted_sum(&[(0.01, penalty)])?;
            case.result("out.loss", loss)
        });
    }
}

#[test]
fn penalties_of_given_bases_agree() {
    for kind in ["random", "uniform", "one_hot", "k1", "t1", "zero_column"] {
        compare("gram_penalty", GRADIENTS, |case| {
            let phi = case.leaf(&format!("in.{kind}.phi"));
            let penalty = case.b.gram_penalty(phi)?;
            let loss = case.b.weighted_sum(&[(0.01, penalty)])?;
            case.terms.push((1.0, loss));
            case.result(&format!("out.{kind}.loss"), loss)
        });
    }
}

#[test]
fn spectral_attention_agrees() {
    compare("fsa", GRADIENTS, |case| {
        let (x, phi) = (case.leaf("in.x"), case.leaf("in.phi"));
        let qkv = case.linear(x, "to_qkv")?;
        let columns = case.b.ty(qkv).columns() / 3;
        let phi = case.b.concatenate(&[phi; 2])?;
        let mut part = |index: usize| {
            let part = case.b.slice(qkv, index * columns..(index + 1) * columns)?;
            if index == 2 {
                return Ok(part);
            }
            case.b.mul(part, phi)
        };
        let qkv = [part(0)?, part(1)?, part(2)?];
        let o = case.b.linear_attention(qkv, 2)?;
        let y = case.linear(o, "to_out")?;
        case.result("out.y", y)
    });
}

#[test]
fn causal_mixings_agree() {
    for (name, lags) in [
        ("mix_causal_64_16_of_16", 16),
        ("mix_causal_8_12_of_12", 12),
        ("mix_causal_8_16_of_33", 33),
        ("mix_causal_8_7_of_12", 12),
    ] {
        compare(name, GRADIENTS, |case| {
            let x = case.leaf("in.x");
            let h = case.mixing_kernel(lags, 2 * lags, lags.max(32))?;
            let bias = case.leaf("param.bias");
            let y = case.b.causal_mixing(x, h, bias)?;
            case.result("out.y", y)
        });
    }
}

#[test]
fn circular_mixings_agree() {
    for name in [
        "mix_circular_64_16",
        "mix_circular_8_16",
        "mix_circular_8_33",
        "mix_circular_8_9",
        "mix_circular_init",
    ] {
        compare(name, GRADIENTS, |case| {
            let x = case.leaf("in.x");
            let positions = case.dims("in.x")[1];
            let h = case.mixing_kernel(positions, positions, positions / 2)?;
            let bias = case.leaf("param.bias");
            let y = case.b.circular_mixing(x, h, bias)?;
            case.result("out.y", y)
        });
    }
}
