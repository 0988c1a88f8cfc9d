//! A program with every op, every kind of mask and every gradient, for tests of all kernels.

use spd_draws::{Purpose, Stream};

use crate::derivation::SiteInputs;
use crate::op::{Builder, Result};
use crate::ops::oracle::random;
use crate::ops::{
    AdamW, AdamWOperands, AdditiveScores, ComponentMlpWeights, Decay, Draw, Gates, GeluKind, Half,
    Heads, ImportanceGates, ImportanceMinimality, Lines, LogitNoise, Mask, MaskValues, Penalty,
    Qkv, ReactionParameters, RotaryScaling, Weight,
};
use crate::store::Store;
use crate::value::{Type, Value};

/// Dimensions of the program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) positions: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Columns of a head.
    pub(crate) size: usize,
    pub(crate) components: usize,
    pub(crate) hidden: usize,
    pub(crate) vocabulary: usize,
}

/// All rows are whole vectors of four.
pub(crate) const EVEN: Sizes = Sizes {
    batch: 2,
    positions: 36,
    heads: 4,
    kv_heads: 2,
    size: 4,
    components: 40,
    hidden: 12,
    vocabulary: 52,
};

/// No dimension divides another.
pub(crate) const RAGGED: Sizes = Sizes {
    batch: 3,
    positions: 35,
    heads: 3,
    kv_heads: 1,
    size: 6,
    components: 37,
    hidden: 9,
    vocabulary: 33,
};

/// A transformer of GPT-2's shape, with more components than columns.
pub(crate) const LARGE: Sizes = Sizes {
    batch: 64,
    positions: 512,
    heads: 12,
    kv_heads: 4,
    size: 64,
    components: 1024,
    hidden: 16,
    vocabulary: 50_257,
};

/// The program, its store, and its inputs.
pub(crate) struct EveryOp {
    pub(crate) b: Builder,
    pub(crate) store: Store,
    pub(crate) inputs: Vec<(&'static str, Vec<u32>)>,
    sizes: Sizes,
    leaves: Vec<Value>,
    terms: Vec<(f64, Value)>,
    values: bool,
}

impl EveryOp {
    /// Builds the program; without `values` the tensors of the store have shapes alone.
    pub(crate) fn new(sizes: Sizes, values: bool) -> Self {
        let store = if values {
            Store::new()
        } else {
            Store::of_shapes()
        };
        let mut every_op = Self {
            b: Builder::new(),
            store,
            inputs: Vec::new(),
            sizes,
            leaves: Vec::new(),
            terms: Vec::new(),
            values,
        };
        every_op.build().unwrap();
        every_op
    }

    /// A tensor of the store that gets a gradient.
    fn leaf(&mut self, dims: &[usize]) -> Value {
        let (name, seed) = (
            format!("leaf {}", self.leaves.len()),
            self.leaves.len() as u64,
        );
        let leaf = self.kept(&name, dims, seed, |x| 0.3 * x);
        self.leaves.push(leaf);
        leaf
    }

    fn kept(&mut self, name: &str, dims: &[usize], seed: u64, of: impl Fn(f32) -> f32) -> Value {
        let slot = if self.values {
            let values = random(dims, seed).values.into_iter().map(of).collect();
            self.store.add(name, dims, values)
        } else {
            self.store.zeros(name, dims)
        };
        self.b.persistent(&self.store, slot)
    }

    /// An input of normal numbers.
    fn given(&mut self, name: &'static str, dims: &[usize]) -> Value {
        if self.values {
            let values = random(dims, 1000 + self.inputs.len() as u64).values;
            let words = values.iter().map(|x| x.to_bits()).collect();
            self.inputs.push((name, words));
        }
        self.b.input(name, &Type::f32(dims)).unwrap()
    }

    fn ids(&mut self, name: &'static str, dims: &[usize], ids: impl Fn(usize) -> usize) -> Value {
        if self.values {
            let words = (0..dims.iter().product()).map(|i| u32::try_from(ids(i)).unwrap());
            self.inputs.push((name, words.collect()));
        }
        self.b.input(name, &Type::u32(dims)).unwrap()
    }

    /// Makes the loss depend on a value.
    fn count(&mut self, value: Value) -> Result<()> {
        let squares = self.b.sum_squares(value)?;
        let weight = 1.0 / self.b.ty(value).len() as f64;
        self.terms.push((weight, squares));
        Ok(())
    }

    fn build(&mut self) -> Result<()> {
        let Sizes {
            batch, positions, ..
        } = self.sizes;
        let x = self.model()?;
        self.components(x)?;
        self.plain(x)?;
        self.draws(batch * positions)?;
        self.losses(x)?;
        self.sites(x)?;
        self.spectral(x)?;
        self.thin(x)?;
        self.gated(x)?;
        self.update()
    }

    /// Embeddings, norms, attentions, activations: f32 `[b, t, d]`.
    fn model(&mut self) -> Result<Value> {
        let Sizes {
            batch,
            positions,
            heads,
            kv_heads,
            size,
            vocabulary,
            ..
        } = self.sizes;
        let (d, kv) = (heads * size, kv_heads * size);
        let tokens = self.ids("tokens", &[batch, positions], |i| i * i % vocabulary);
        let (wte, wpe) = (self.leaf(&[vocabulary, d]), self.leaf(&[positions + 1, d]));
        let x = self.b.embed(tokens, wte, Some(wpe))?;
        let (weight, bias) = (self.leaf(&[d]), self.leaf(&[d]));
        let normal = self.b.layer_norm(x, weight, bias, 1e-5)?;
        let (w, bias) = (self.leaf(&[3 * d, d]), self.leaf(&[3 * d]));
        let qkv = self.b.linear_oi(normal, w, Some(bias))?;
        let joined = self
            .b
            .attention(Qkv::Joined(qkv), Heads::causal(heads, heads), None)?;
        let scaling = RotaryScaling {
            factor: 4.0,
            low: 1.0,
            high: 4.0,
            context: 16.0,
        };
        let table = self.b.rotary_table(positions, 2, 10.0, Some(scaling))?;
        let all = Heads::causal(heads, heads);
        let by_head = self.b.attention(Qkv::ByHead(qkv), all, Some(table))?;
        let attended = self.b.add(joined, by_head)?;
        let x = self.b.add(x, attended)?;
        let weight = self.leaf(&[d]);
        let normal = self.b.rms_norm(x, weight, 1e-5)?;
        let weights = [self.leaf(&[d, d]), self.leaf(&[d, kv]), self.leaf(&[d, kv])];
        let [q, k, v] = weights.map(|w| self.b.linear_io(normal, w, None).unwrap());
        let table = self.b.rotary_table(positions, size, 1e4, None)?;
        let qkv = Qkv::Apart([q, k, v]);
        let causal = self
            .b
            .attention(qkv, Heads::causal(heads, kv_heads), Some(table))?;
        // None ends: with few keys to a query, gradients would amplify the roundings of bf16.
        let documents = Some(self.b.documents(tokens, u32::MAX)?);
        let all = Heads::full(heads, kv_heads);
        let all = self.b.attention_in_documents(qkv, all, None, documents)?;
        let x = self.b.add(causal, all)?;
        let local = Heads {
            window: Some(3),
            scale: Some(1.0),
            ..Heads::causal(heads, kv_heads)
        };
        let windowed = self.b.attention(qkv, local, None)?;
        let x = self.b.add(x, windowed)?;
        let (w_gate, w_up) = (self.leaf(&[d, 2 * d]), self.leaf(&[d, 2 * d]));
        let (gate, up) = (self.b.matmul(x, w_gate)?, self.b.matmul(x, w_up)?);
        let through = self.b.swiglu(gate, up)?;
        let positive = self.b.relu(up)?;
        let exact = self.b.gelu(gate, GeluKind::Exact)?;
        let tanh = self.b.gelu(up, GeluKind::Tanh)?;
        let hidden = [positive, exact, tanh].into_iter();
        let hidden = hidden.fold(through, |sum, term| self.b.add(sum, term).unwrap());
        let w = self.leaf(&[2 * d, d]);
        let out = self.b.matmul(hidden, w)?;
        let placed = self.b.add_positions(out, wpe)?;
        self.count(placed)?;
        self.b.add(x, out)
    }

    /// Masks of every kind, and sites with every combination of further inputs.
    fn components(&mut self, x: Value) -> Result<()> {
        let Sizes {
            batch,
            positions,
            heads,
            size,
            components: c,
            hidden,
            ..
        } = self.sizes;
        let (d, rows) = (heads * size, batch * positions);
        let (v, u) = (self.leaf(&[d, c]), self.leaf(&[c, d]));
        let a = self.b.matmul(x, v)?;
        let with = ComponentMlpWeights {
            w1: self.leaf(&[c, 1, hidden]),
            b1: self.leaf(&[c, hidden]),
            w2: self.leaf(&[c, hidden, 1]),
            b2: self.leaf(&[c, 1]),
        };
        let z = self.b.component_mlp(a, &with)?;
        let power = Some((Penalty::Power, self.b.step_scalar("p")));
        let gamma = self.b.step_scalar("gamma");
        let smooth = |normalized| Some((Penalty::Smooth { normalized }, gamma));
        let stream = |site| Stream::new(Purpose::LogitNoise, 0, site);
        let noise = self.given("noise", &[batch, positions, c]);
        for (half, draws) in [
            (Half::Bf16, None),
            (Half::Unit, None),
            (Half::Unit, Some(noise)),
        ] {
            let words = self.b.pack(noise, half, draws)?;
            let numbers = self.b.unpack(words, half, c)?;
            self.b
                .output(format!("{half:?} {}", draws.is_some()), numbers);
        }
        let mut importances = Vec::new();
        for (gates, noise_kind, penalty) in [
            (Gates::LeakyHard, LogitNoise::None, power),
            (Gates::Hard, LogitNoise::Drawn(stream(1)), smooth(false)),
            (Gates::UpperLeakyHard, LogitNoise::Given, power),
            (Gates::LeakyHard, LogitNoise::Given, smooth(true)),
            (Gates::Normal, LogitNoise::None, power),
            (Gates::SwishHard, LogitNoise::None, None),
        ] {
            let op = ImportanceGates {
                gates,
                noise: noise_kind,
                penalty,
                alive: 0.1,
            };
            let found = self.b.importance_gates(op, z, Some(noise))?;
            if penalty.is_some() {
                let op = ImportanceMinimality {
                    beta: 0.5,
                    ..ImportanceMinimality::mean(rows)
                };
                let penalty = self.b.importance_minimality(op, found.penalty_sums)?;
                self.terms.push((0.1, penalty));
            }
            self.b
                .output(format!("active {gates:?} {noise_kind:?}"), found.active);
            importances.push(found.importance);
        }
        let most = self.b.max_rows(&[importances.clone()])?;
        self.b.output("most", most[0]);
        let w = self.leaf(&[d, d]);
        let bias = self.leaf(&[d]);
        let clean = self.b.linear_io(x, w, Some(bias))?;
        let (each, row) = (self.leaf(&[batch, positions, c]), self.leaf(&[c]));
        let (deltas, delta) = (self.leaf(&[rows]), self.leaf(&[1]));
        let stream = Stream::new(Purpose::Source, 1, 2);
        let route = self
            .b
            .bernoulli(Stream::new(Purpose::Routing, 0, 0), rows, 0.6)?;
        for (index, (mask, given, delta, route)) in [
            (Mask::Importance, None, None, None),
            (
                Mask::Between(Draw::Uniform(stream)),
                None,
                Some(deltas),
                Some(route),
            ),
            (Mask::Between(Draw::Coin(stream)), None, Some(delta), None),
            (
                Mask::Between(Draw::Given),
                Some(each),
                Some(deltas),
                Some(route),
            ),
            (
                Mask::Between(Draw::Given),
                Some(row),
                Some(delta),
                Some(route),
            ),
            (Mask::Drawn(Draw::Given), Some(row), None, None),
            (Mask::Drawn(Draw::Uniform(stream)), None, None, Some(route)),
            (Mask::Rounded(0.2), None, Some(deltas), None),
            (Mask::Ones, None, Some(delta), Some(route)),
        ]
        .into_iter()
        .enumerate()
        {
            let importance = Some(importances[index % importances.len()]);
            let values = MaskValues {
                mask,
                importance,
                given,
                delta,
                route,
            };
            // Compacted rows come from a product, or from a matrix of all rows.
            let a = match route {
                Some(route) if index % 2 == 0 => self.b.compact_rows(a, route)?,
                Some(route) => self.b.routed_matmul(x, v, route)?,
                None => a,
            };
            let h = self.b.masked(a, &values)?;
            let with = SiteInputs {
                clean: Some(clean),
                bias: (index % 2 == 0).then_some(bias),
                delta,
                route,
            };
            let y = self.b.site_output(h, u, &with)?;
            self.count(y)?;
        }
        Ok(())
    }

    /// Importances that masks alone read, and layers with biases as wide as a block.
    fn gated(&mut self, x: Value) -> Result<()> {
        let Sizes { heads, size, .. } = self.sizes;
        let (d, c) = (heads * size, 128);
        let (w, bias) = (self.leaf(&[d, c]), self.leaf(&[c]));
        let y = self.b.linear_io(x, w, Some(bias))?;
        let y = self.b.gelu(y, GeluKind::Exact)?;
        self.count(y)?;
        let (w, bias) = (self.leaf(&[d, c]), self.leaf(&[c]));
        let z = self.b.linear_io(x, w, Some(bias))?;
        // No rounding moves a logit across an edge.
        let op = ImportanceGates {
            gates: Gates::Normal,
            noise: LogitNoise::None,
            penalty: Some((Penalty::Power, self.b.step_scalar("p"))),
            alive: 0.1,
        };
        let found = self.b.importance_gates(op, z, None)?;
        self.count(found.penalty_sums)?;
        let v = self.leaf(&[d, c]);
        let a = self.b.matmul(x, v)?;
        for mask in [
            Mask::Between(Draw::Uniform(Stream::new(Purpose::Source, 3, 0))),
            Mask::Importance,
        ] {
            let values = MaskValues {
                mask,
                importance: Some(found.importance),
                given: None,
                delta: None,
                route: None,
            };
            let h = self.b.masked(a, &values)?;
            self.count(h)?;
        }
        Ok(())
    }

    /// Separate sites, which a device may fuse into one op each if the program is bf16.
    fn sites(&mut self, x: Value) -> Result<()> {
        let Sizes {
            batch,
            positions,
            heads,
            size,
            components: c,
            ..
        } = self.sizes;
        let (d, rows) = (heads * size, batch * positions);
        let importance = self.leaf(&[batch, positions, c]);
        let stream = |site| Stream::new(Purpose::Source, 2, site);
        let route = self.b.bernoulli(stream(0), rows, 0.5)?;
        for (site, route) in [(1, None), (2, Some(route))] {
            let (v, u) = (self.leaf(&[d, c]), self.leaf(&[c, d]));
            let values = MaskValues {
                mask: Mask::Between(Draw::Uniform(stream(site))),
                importance: Some(importance),
                given: None,
                delta: None,
                route,
            };
            let a = match route {
                Some(route) => self.b.routed_matmul(x, v, route)?,
                None => self.b.matmul(x, v)?,
            };
            let h = self.b.masked(a, &values)?;
            let with = SiteInputs {
                clean: route.is_some().then_some(x),
                route,
                ..SiteInputs::default()
            };
            let y = self.b.site_output(h, u, &with)?;
            self.count(y)?;
        }
        Ok(())
    }

    /// All other ops.
    fn plain(&mut self, x: Value) -> Result<()> {
        let Sizes {
            components: c,
            heads,
            size,
            ..
        } = self.sizes;
        let d = heads * size;
        let mean = self.b.mean(x)?;
        self.terms.push((0.5, mean));
        let (w, bias) = (self.leaf(&[heads, size, 3]), self.leaf(&[heads, 3]));
        let each = self.b.parallel_linear(x, w, bias)?;
        self.count(each)?;
        let (weight, bias) = (self.leaf(&[d]), self.leaf(&[d]));
        let twice = self.b.add(x, x)?;
        let normal = self.b.layer_norm(twice, weight, bias, 1e-5)?;
        let again = self.b.rms_norm(normal, weight, 1e-5)?;
        self.count(twice)?;
        self.count(again)?;
        let shares = self.b.softmax(again)?;
        self.count(shares)?;
        let product = self.b.mul(again, normal)?;
        let names = ["tanh", "tanh_grad"];
        let bounded = self.b.elementwise(names, [product], |[x]| x.tanh())?;
        let names = ["exp", "exp_grad"];
        let power = self.b.elementwise(names, [bounded], |[x]| x.exp())?;
        let silu = self.b.silu(power)?;
        let scaled = self.b.scale(silu, mean)?;
        self.count(scaled)?;
        // Runs of columns that are whole vectors of four, and runs that are not.
        let joined = self.b.concatenate(&[x, again, x])?;
        for range in [d..2 * d, 1..d + 3] {
            let some = self.b.slice(joined, range)?;
            self.count(some)?;
        }
        let flat = self.b.reshape(x, &[heads, self.b.ty(x).len() / heads])?;
        self.count(flat)?;
        let turned = self.b.second_first(x)?;
        self.count(turned)?;
        let matrix = self.leaf(&[d, c]);
        let transposed = self.b.transpose(matrix)?;
        self.count(transposed)?;
        let one = self.b.identity(d)?;
        let ones = self.b.constant(1.0, &[d, d])?;
        let sum = self.b.add(one, ones)?;
        let product = self.b.matmul(sum, matrix)?;
        self.count(product)
    }

    /// A layer with one result for each component.
    fn thin(&mut self, x: Value) -> Result<()> {
        let Sizes { heads, size, .. } = self.sizes;
        let w = self.leaf(&[2 * heads, size / 2, 1]);
        let bias = self.leaf(&[2 * heads]);
        let each = self.b.parallel_linear(x, w, bias)?;
        self.count(each)
    }

    /// Ops of spectral networks.
    fn spectral(&mut self, x: Value) -> Result<()> {
        let Sizes {
            batch,
            positions,
            heads,
            size,
            ..
        } = self.sizes;
        let d = heads * size;
        let waves = self.b.fourier_table(positions, d / 2, 5)?;
        self.count(waves)?;
        let names = ["tanh", "tanh_grad"];
        let x = self.b.elementwise(names, [x], |[x]| x.tanh())?;
        let (h, bias) = (self.leaf(&[positions - 3, d]), self.leaf(&[d]));
        let mixed = self.b.causal_mixing(x, h, bias)?;
        self.count(mixed)?;
        let attended = self.b.linear_attention([mixed, x, x], heads)?;
        self.count(attended)?;
        let hidden = 2 * size;
        let by_head = self.b.reshape(x, &[batch, positions, heads, size])?;
        let weights = [self.leaf(&[size, hidden]), self.leaf(&[size, hidden])];
        let by_head = weights.map(|w| self.b.linear_io(by_head, w, None).unwrap());
        let weights = [self.leaf(&[d, hidden]), self.leaf(&[d, hidden])];
        let shared = weights.map(|w| self.b.linear_io(x, w, None).unwrap());
        let scores = AdditiveScores {
            by_head,
            shared,
            w: self.leaf(&[hidden]),
            beta: self.leaf(&[]),
            scale: self.leaf(&[]),
        };
        let causal = self.b.additive_attention(scores, mixed, true)?;
        let full = self.b.additive_attention(scores, causal, false)?;
        self.count(full)?;
        let penalty = self.b.gram_penalty(full)?;
        self.terms.push((0.1, penalty));
        let with = ReactionParameters {
            a: self.leaf(&[]),
            b: self.leaf(&[]),
            dt: self.leaf(&[]),
        };
        let u = self.b.reaction(x, full, with, 3)?;
        self.count(u)
    }

    fn draws(&mut self, rows: usize) -> Result<()> {
        let c = self.sizes.components;
        let stream = |site| Stream::new(Purpose::Delta, 2, site);
        let source = self.b.uniform(stream(1), &[rows, c])?;
        let row = self.b.uniform_row(stream(2), c)?;
        let each = self.b.uniform_rows(stream(3), rows)?;
        let subsets = self.b.uniform_subsets(stream(4), rows, 5)?;
        let up = self.given("up", &[rows, c]);
        let next = self.b.ascend(source, up, 0.1)?;
        for (name, value) in [("row", row), ("each", each), ("next", next)] {
            self.b.output(name, value);
        }
        for (site, subset) in subsets.into_iter().enumerate() {
            self.b.output(format!("subset {site}"), subset);
        }
        Ok(())
    }

    fn losses(&mut self, x: Value) -> Result<()> {
        let Sizes {
            batch,
            positions,
            heads,
            size,
            vocabulary,
            ..
        } = self.sizes;
        let d = heads * size;
        let w = self.leaf(&[vocabulary, d]);
        let logits = self.b.linear_oi(x, w, None)?;
        // A sum is stored, so all readers share it.
        let logits = self.b.add(logits, logits)?;
        let labels = self.ids("labels", &[batch, positions], |i| {
            if i % 5 == 3 {
                u32::MAX as usize
            } else {
                i % vocabulary
            }
        });
        let target = self.given("target", &[batch, positions, vocabulary]);
        let lse = self.b.log_sum_exp(target)?;
        let divergence = self.b.kl_divergence(target, lse, logits)?;
        let entropy = self.b.cross_entropy(logits, labels)?;
        // The gradient of each divergence replaces the logits, or a copy of them; all are added up.
        let other = self.b.add(target, target)?;
        let lse = self.b.log_sum_exp(other)?;
        let last = self.b.kl_divergence(other, lse, logits)?;
        self.terms.push((0.5, last));
        // Frozen heads: one with a bias and labels, one that compares two targets.
        let bias = self.given("head bias", &[vocabulary]);
        let head = self.kept("head", &[vocabulary, d], 600, |x| 0.3 * x);
        let logits = self.b.linear_oi(x, head, Some(bias))?;
        let labelled = self
            .b
            .kl_divergence_and_cross_entropy([other, lse, logits], labels)?;
        self.b.output("entropy", labelled[1]);
        let head = self.kept("other head", &[d, vocabulary], 601, |x| 0.3 * x);
        let logits = self.b.linear_io(x, head, None)?;
        let through = self.b.kl_divergence(other, lse, logits)?;
        self.terms.extend([(0.3, labelled[0]), (0.2, through)]);
        let goal = self.given("goal", &[batch, positions, d]);
        let error = self.b.mse(x, goal)?;
        self.terms
            .extend([(1.0, divergence), (0.7, entropy), (0.3, error)]);
        Ok(())
    }

    /// The loss, its gradients, and an update of every leaf.
    fn update(&mut self) -> Result<()> {
        let mut terms: Vec<(Weight, Value)> = Vec::new();
        for &(weight, term) in &self.terms {
            terms.push((weight.into(), term));
        }
        terms[0].0 = Weight::Step(self.b.step_scalar("weight"));
        let loss = self.b.weighted_sum(&terms)?;
        self.b.output("loss", loss);
        let leaves = self.leaves.clone();
        let gradients = self.b.gradients(loss, &leaves)?;
        let gradients: Vec<Value> = gradients.into_iter().map(Option::unwrap).collect();
        let group = self.b.gradient_norm(&gradients)?;
        let other = self.b.gradient_norm(&gradients[..2])?;
        let halt = self.kept("halt", &[2], 0, |_| 0.0);
        self.b.halt(halt, &[group, other])?;
        let correction = self.b.step_scalar("correction1");
        let average = self.kept("average", &[self.sizes.components], 3, |x| 0.1 * x);
        let x = self.kept("averaged", &[self.sizes.components], 4, |x| x);
        let smooth = self.b.average(average, x, 0.25, correction)?;
        self.b.output("average", smooth);
        self.b.keep_average(average, x, 0.25, &[group])?;
        let kept = self.kept("kept", &[self.sizes.components], 5, |x| x);
        self.b.keep(kept, x, &[])?;
        let sum = self.kept("sum", &[self.sizes.components], 6, |x| x);
        self.b.keep_sum(sum, x)?;
        let mut on = [Vec::new(), Vec::new()];
        for (index, (&parameter, &gradient)) in leaves.iter().zip(&gradients).enumerate() {
            let dims = self.b.ty(parameter).dims.clone();
            let seed = 500 + index as u64;
            let first = self.kept(&format!("first {index}"), &dims, seed, |x| 0.1 * x);
            let second = self.kept(&format!("second {index}"), &dims, seed, |x| 0.1 + x * x);
            on[index % 2].push(AdamWOperands {
                parameter,
                first,
                second,
                gradient,
            });
            self.b.output(format!("gradient {index}"), gradient);
        }
        for (on, clip) in on.iter().zip([Some(0.5), None]) {
            let op = AdamW {
                decay: 0.01,
                clip,
                ..AdamW::new(&mut self.b)
            };
            self.b.adamw(op, on, group, &[other])?;
        }
        for (of, root) in [(Lines::Columns, false), (Lines::Rows, true)] {
            let op = Decay {
                lr: self.b.step_scalar("lr"),
                decay: 0.5,
                root,
                of,
            };
            let matrix = self.kept(&format!("decayed {of:?}"), &[3, 5], 600, |x| x);
            let needed = self.kept(&format!("needed {of:?}"), &[3, 5], 601, |x| x);
            let needed = match of {
                Lines::Columns => self.b.max_rows(&[vec![needed]])?[0],
                Lines::Rows => self.b.slice(needed, 0..1)?,
            };
            self.b.decay(op, matrix, needed, &[group])?;
        }
        Ok(())
    }
}
