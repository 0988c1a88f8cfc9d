//! Layers of the networks, composed of ops, one by one: outputs, and gradients of a sum of these
//! times recorded numbers.

use std::collections::BTreeMap;
use std::f64::consts::PI;

use spd_engine::ops::{AdditiveScores, ReactionParameters};
use spd_engine::{Alone, Builder, Processor, Result, Store, Value};

use super::{GRADIENTS, VALUES};
use crate::golden::compare::{Comparison, largest};
use crate::golden::numbers::Numbers;
use crate::harness::Outcome;

/// For gradients that nearly cancel.
const LARGER: f64 = 5e-5;

/// A recorded layer.
#[derive(Clone, Copy)]
pub(super) struct Case {
    /// The name of its test.
    pub(super) name: &'static str,
    /// The file.
    file: &'static str,
    /// Of its gradients.
    tolerance: f64,
    build: fn(&mut Layer) -> Result<()>,
}

const fn case(name: &'static str, build: fn(&mut Layer) -> Result<()>) -> Case {
    Case {
        name,
        file: name,
        tolerance: GRADIENTS,
        build,
    }
}

const fn penalty(name: &'static str, build: fn(&mut Layer) -> Result<()>) -> Case {
    Case {
        file: "gram_penalty",
        ..case(name, build)
    }
}

pub(super) const CASES: [Case; 23] = [
    // K1: the scores of all pairs, by parts; K11.
    case("knot", Layer::knot),
    // K4: rows of equal weights, so that all weights of a row are equal.
    case("knot_mean", Layer::knot),
    // K9: one position.
    case("knot_t1", Layer::knot),
    Case {
        tolerance: LARGER,
        ..case("knot_scaled", Layer::knot)
    },
    // K6: the closed form of two steps, elements up to 1e4 among them.
    case("reaction_2", |layer| layer.reaction(2)),
    case("reaction_3", |layer| layer.reaction(3)),
    // K10: clamps act.
    case("reaction_12", |layer| layer.reaction(12)),
    // S5: above 0, and below the penalty of equal columns.
    penalty("penalty_random", |layer| layer.penalty("random")),
    // S3: equal columns.
    penalty("penalty_uniform", |layer| layer.penalty("uniform")),
    // S4: columns without a common position.
    penalty("penalty_one_hot", |layer| layer.penalty("one_hot")),
    // S8: one column.
    penalty("penalty_k1", |layer| layer.penalty("k1")),
    // S9: one position.
    penalty("penalty_t1", |layer| layer.penalty("t1")),
    penalty("penalty_zero_column", |layer| layer.penalty("zero_column")),
    // F1: scores of all pairs; F4: queries and keys times the basis.
    case("fsa", Layer::fsa),
    case("mix_causal_64_16_of_16", |layer| layer.mix_causally(16)),
    case("mix_causal_8_12_of_12", |layer| layer.mix_causally(12)),
    case("mix_causal_8_16_of_33", |layer| layer.mix_causally(33)),
    case("mix_causal_8_7_of_12", |layer| layer.mix_causally(12)),
    // B6: a circular convolution; B9 to B11.
    case("mix_circular_64_16", Layer::mix),
    case("mix_circular_8_16", Layer::mix),
    case("mix_circular_8_33", Layer::mix),
    case("mix_circular_8_9", Layer::mix),
    // B7: gains of filters at the start of training.
    case("mix_circular_init", Layer::mix),
];

impl Case {
    /// Compares it on a processor.
    pub(super) fn check(self, processor: &Processor) -> Outcome {
        let numbers = Numbers::open(&format!("spectral/{}", self.file))?;
        let mut layer = Layer {
            numbers,
            b: Builder::new(),
            store: Store::new(),
            leaves: BTreeMap::new(),
            terms: Vec::new(),
        };
        (self.build)(&mut layer).expect("shapes fit");
        Ok(layer.compare(self, processor).finish())
    }
}

/// The numbers of a case, and a program to be compared with them.
struct Layer {
    numbers: Numbers,
    b: Builder,
    store: Store,
    /// Operands that may have a gradient, by name.
    leaves: BTreeMap<String, Value>,
    /// The sum of these is differentiated.
    terms: Vec<(f64, Value)>,
}

impl Layer {
    fn kept(&mut self, name: &str, dims: &[usize], values: Vec<f32>) -> Value {
        let slot = self.store.add(name, dims, values);
        self.b.persistent(&self.store, slot)
    }

    /// An operand.
    fn leaf(&mut self, name: &str) -> Value {
        if let Some(&leaf) = self.leaves.get(name) {
            return leaf;
        }
        let recorded = self.numbers.get(name).clone();
        let leaf = self.kept(name, &recorded.dims, recorded.f32());
        self.leaves.insert(name.to_owned(), leaf);
        leaf
    }

    /// Compares a value with a result, and differentiates it if the case does.
    fn result(&mut self, name: &str, value: Value) -> Result<()> {
        self.b.output(name, value);
        let cotangent = name.replacen("out", "cot", 1);
        if let Some(recorded) = self.numbers.find(&cotangent).cloned() {
            let cotangent = self.kept(&cotangent, &recorded.dims, recorded.f32());
            let names = ["dot", "dot_grad"];
            let both = [value, cotangent];
            let term = self.b.elementwise_sum(names, 1.0, both, |[x, y]| x * y)?;
            self.terms.push((1.0, term));
        }
        Ok(())
    }

    /// All results and gradients. A gradient that is not recorded is 0.
    fn compare(mut self, case: Case, processor: &Processor) -> Comparison {
        let mut comparison = Comparison::new(case.name, case.tolerance);
        if !self.terms.is_empty() {
            let loss = self.b.weighted_sum(&self.terms).expect("scalars");
            let leaves: Vec<Value> = self.leaves.values().copied().collect();
            let gradients = self.b.gradients(loss, &leaves).expect("ops with gradients");
            for (name, gradient) in self.leaves.keys().zip(gradients) {
                let name = format!("grad.{name}");
                if let Some(gradient) = gradient {
                    self.b.output(name, gradient);
                } else {
                    let recorded = self.numbers.find(&name);
                    let is_zero = recorded.is_none_or(|of| largest(&of.values) == 0.0);
                    assert!(is_zero, "{}: {name} is not 0", case.name);
                }
            }
        }
        let mut executor = Alone::new(&self.b, processor).expect("a processor that works");
        let ran = executor.run_and_fetch(&mut self.store);
        ran.expect("a processor that works");
        comparison.group("values and gradients");
        let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
        for name in names {
            let ours = executor.output(&name, &self.store);
            let theirs = match self.numbers.find(&name) {
                // The slope of the norm of a column of zeros, which their gradient divides by.
                Some(recorded) => {
                    let values = recorded.values.iter();
                    values.map(|x| if x.is_nan() { 0.0 } else { *x }).collect()
                }
                None => vec![0.0; ours.len()],
            };
            // A tensor of rounding errors has no scale of its own.
            let scale = Some(largest(&theirs)).filter(|&largest| largest > 1e-7);
            let scale = scale.unwrap_or(1.0);
            if name.starts_with("grad.") {
                comparison.at_scale(scale, &name, ours, &theirs);
            } else {
                comparison.within(VALUES, &name, ours, &theirs);
            }
        }
        comparison
    }

    /// A layer with a weight in PyTorch's layout, and its bias if there is one.
    fn linear(&mut self, x: Value, name: &str) -> Result<Value> {
        let w = self.leaf(&format!("param.{name}.weight"));
        let bias = format!("param.{name}.bias");
        let is_there = self.numbers.find(&bias).is_some();
        let bias = is_there.then(|| self.leaf(&bias));
        self.b.linear_oi(x, w, bias)
    }

    /// The knot gate: attention with the scores of a crossing network, and a network of two layers.
    fn knot(&mut self) -> Result<()> {
        let (x, c) = (self.leaf("in.x"), self.leaf("in.c"));
        let [b, t, d] = self.b.ty(x).dims[..] else {
            unreachable!("[b, t, d]");
        };
        let (heads, size) = (2, d / 2);
        let [q, k, v] = ["to_q", "to_k", "to_v"].map(|name| self.linear(x, name));
        let mut by_head = |x, name: &str| {
            let heads = self.b.reshape(x, &[b, t, heads, size])?;
            self.linear(heads, name)
        };
        let by_head = [by_head(q?, "cross_q")?, by_head(k?, "cross_k")?];
        let w = self.leaf("param.cross_ci.weight");
        let bias = self.leaf("param.crossing_net.0.bias");
        let ci = self.b.linear_oi(c, w, Some(bias))?;
        let shared = [ci, self.linear(c, "cross_cj")?];
        // Over minus under.
        let difference = self.kept("difference", &[1, 2], vec![1.0, -1.0]);
        let w = self.leaf("param.crossing_net.2.weight");
        let w = self.b.matmul(difference, w)?;
        let w = self.b.reshape(w, &[d / 2])?;
        let beta = self.leaf("param.crossing_net.2.bias");
        let beta = self.b.reshape(beta, &[2, 1])?;
        let beta = self.b.matmul(difference, beta)?;
        let beta = self.b.reshape(beta, &[])?;
        let scale = match self.numbers.find("param.score_scale") {
            Some(_) => self.leaf("param.score_scale"),
            None => self.b.constant(1.0 / (size as f32).sqrt(), &[])?,
        };
        let scores = AdditiveScores {
            by_head,
            shared,
            w,
            beta,
            scale,
        };
        let o = self.b.additive_attention(scores, v?, true)?;
        let hidden = self.linear(o, "invariant_net.0")?;
        let hidden = self.b.silu(hidden)?;
        let y = self.linear(hidden, "invariant_net.2")?;
        let y = self.linear(y, "to_out")?;
        self.result("out.y", y)
    }

    /// `u` after some steps. `w` is no output of ours, so gradients are those of whole attentions.
    fn reaction(&mut self, steps: usize) -> Result<()> {
        let [x, y] = ["in.x", "in.y"].map(|name| self.leaf(name));
        let [a, b, dt] = ["param.a", "param.b", "param.dt"].map(|name| self.leaf(name));
        let u = self
            .b
            .reaction(x, y, ReactionParameters { a, b, dt }, steps)?;
        self.b.output("out.u", u);
        Ok(())
    }

    /// The penalty of a given basis.
    fn penalty(&mut self, kind: &str) -> Result<()> {
        let phi = self.leaf(&format!("in.{kind}.phi"));
        let penalty = self.b.gram_penalty(phi)?;
        let loss = self.b.weighted_sum(&[(0.01, penalty)])?;
        self.terms.push((1.0, loss));
        self.result(&format!("out.{kind}.loss"), loss)
    }

    /// Linear attention whose queries and keys are multiplied by a basis.
    fn fsa(&mut self) -> Result<()> {
        let (x, phi) = (self.leaf("in.x"), self.leaf("in.phi"));
        let qkv = self.linear(x, "to_qkv")?;
        let columns = self.b.ty(qkv).columns() / 3;
        let phi = self.b.concatenate(&[phi; 2])?;
        let mut part = |at: usize| self.b.slice(qkv, at * columns..(at + 1) * columns);
        let [q, k, v] = [part(0)?, part(1)?, part(2)?];
        let qkv = [self.b.mul(q, phi)?, self.b.mul(k, phi)?, v];
        let o = self.b.linear_attention(qkv, 2)?;
        let y = self.linear(o, "to_out")?;
        self.result("out.y", y)
    }

    /// The weights of a mixing as a kernel `[lags, d]`: a table of cosines and sines of the first
    /// frequencies, of a period, times the weights.
    fn kernel(&mut self, lags: usize, period: usize, used: usize) -> Result<Value> {
        let frequencies = self.numbers.get("param.weight_real").dims[1];
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

    /// Mixing with earlier positions.
    fn mix_causally(&mut self, lags: usize) -> Result<()> {
        let h = self.kernel(lags, 2 * lags, lags.max(32))?;
        let (x, bias) = (self.leaf("in.x"), self.leaf("param.bias"));
        let y = self.b.causal_mixing(x, h, bias)?;
        self.result("out.y", y)
    }

    /// Circular mixing.
    fn mix(&mut self) -> Result<()> {
        let (x, bias) = (self.leaf("in.x"), self.leaf("param.bias"));
        let positions = self.b.ty(x).dims[1];
        let h = self.kernel(positions, positions, positions / 2)?;
        let y = self.b.circular_mixing(x, h, bias)?;
        self.result("out.y", y)
    }
}
