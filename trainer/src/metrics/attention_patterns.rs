//! `attention_patterns/<mask>`: how far the patterns of attention are from the target's, for the
//! masks `ci_masked` and `stochastic`. It is the mean over attentions, heads and queries of
//!
//! ```text
//! KL(p || p')     p = softmax(scale q k^T) over the keys that the query attends to
//! ```
//!
//! in nats, with `p` the pattern of the target and `p'` that of a pass whose sites are all masked:
//! its queries and keys are those that reach the attention, with their biases, norms and angles of
//! positions. `attention_patterns/<mask>/<n>` is that of the `n`-th attention alone. In slow
//! evaluations; an attention without a softmax has none.
//!
//! With `"components"`, `p` is made of the components of its own block, all of them and without the
//! delta, on what comes into the block in the target: the matrices may be off from the target's,
//! and that does not count as an error of the masks. So it is in the reference.
//!
//! The patterns are `[t, t]` for each head of each row, and are in memory, unlike those of a pass:
//! a long context takes a small `batch_size` in `[eval]`.
//!
//! # Keys of `[eval]`
//!
//! - `attention_patterns` | none | `CIMaskedAttnPatternsReconLoss` | whether slow evaluations
//!   measure patterns of attention against those of the `"target"` or of all `"components"`, as
//!   `eval/attention_patterns/<mask>`; language models only

use serde::Serialize;
use spd_configs::reader::Table;
use spd_configs::words;
use spd_engine::ops::{Expr, Heads, Qkv};
use spd_engine::{Builder, Result, Value};

use super::{Before, Evaluated, Mean, Metric};
use crate::component_model::Masking;
use crate::networks::{Side, UnitKind};
use crate::pass::Attended;
use crate::repeat::repeat_rows;
use crate::sites::Site;

/// Patterns of attention.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AttentionPatterns {
    /// The patterns that they are measured against, if they are measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_patterns: Option<Against>,
}

words! {
    /// The patterns that those of a masked pass are measured against.
    pub enum Against {
        /// The patterns of the target.
        Target = "target",
        /// The patterns of all components of the block, without delta, on the target's values.
        Components = "components",
    }
}

/// In the place of the score of a key that a query does not attend to.
const BEYOND: f32 = -1e6;

impl Metric for AttentionPatterns {
    fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self> {
        let attention_patterns = table.maybe("attention_patterns", Against::WORDS)?;
        if let (Some(_), Some(name)) = (attention_patterns, before.target.of_features()) {
            let message = format!("expected a language model, which attends; found {name}");
            table.refuse::<()>("attention_patterns", message);
        }
        Some(Self { attention_patterns })
    }

    fn means(&self, b: &mut Builder, on: &Evaluated<'_>) -> Result<Vec<Mean>> {
        let mut means = Vec::new();
        let clean_pass = on.from.clean_pass;
        let Some(against) = self.attention_patterns else {
            return Ok(means);
        };
        if !on.is_slow || clean_pass.attended.is_empty() {
            return Ok(means);
        }
        let mut targets = Vec::new();
        for (number, &clean) in clean_pass.attended.iter().enumerate() {
            let attended = match against {
                Against::Target => clean,
                Against::Components => of_components(b, on, number)?.unwrap_or(clean),
            };
            let scores = scores(b, attended)?;
            let sums = b.log_sum_exp(scores)?;
            targets.push((scores, sums));
        }
        let each = 1.0 / targets.len() as f64;
        for (kind, masking) in [
            ("ci_masked", Masking::Importance),
            ("stochastic", Masking::Stochastic),
        ] {
            let masked = on.masks(b, masking)?;
            let pass = on.from.model.masked_pass(b, clean_pass, &masked)?;
            let mut parts = Vec::new();
            let attentions = pass.attended.iter().zip(&targets).enumerate();
            for (number, (&attended, &(target, sums))) in attentions {
                let scores = scores(b, attended)?;
                let value = b.kl_divergence(target, sums, scores)?;
                parts.push((each, value));
                means.push(on.mean(format!("attention_patterns/{kind}/{number}"), value));
            }
            let all = b.weighted_sum(&parts)?;
            means.push(on.mean(format!("attention_patterns/{kind}"), all));
        }
        Ok(means)
    }
}

/// An attention by all components of its block alone; `None` where no site leads to it.
fn of_components(b: &mut Builder, on: &Evaluated<'_>, number: usize) -> Result<Option<Attended>> {
    let leads_to = |site: &Site| {
        let block = site.layer.block.map(|block| block.number);
        let aligned = site.layer.aligned.is_some_and(|aligned| {
            aligned.side == Side::Output && aligned.units.kind == UnitKind::AttentionHead
        });
        aligned && block == Some(number)
    };
    let model = on.from.model;
    let mut masked = on.masks(b, Masking::Ones)?;
    masked.retain(|(site, _)| leads_to(&model.sites[*site]));
    if masked.is_empty() {
        return Ok(None);
    }
    let pass = model.masked_pass(b, on.from.clean_pass, &masked)?;
    Ok(pass.attended.get(number).copied())
}

/// Scores f32 `[t, b heads, t]` of the keys for each query and head, whose softmax is its pattern.
fn scores(b: &mut Builder, attended: Attended) -> Result<Value> {
    let Attended { heads, rotary, .. } = attended;
    let [q, k] = queries_and_keys(b, attended)?;
    let [rows, t, columns] = b.ty(q).dims[..] else {
        unreachable!("queries of rows and positions");
    };
    let size = columns / heads.count;
    let units = rows * heads.count;
    let q = turned(b, q, (heads.count, size), rotary)?;
    let k = turned(b, k, (heads.kv, size), rotary)?;
    // Keys by row and head, each repeated for the heads of queries that share it.
    let k = b.reshape(k, &[t, rows * heads.kv * size])?;
    let k = b.transpose(k)?;
    let k = b.reshape(k, &[rows * heads.kv, size * t])?;
    let k = repeat_rows(b, k, heads.count / heads.kv)?;
    let k = b.reshape(k, &[units, size, t])?;
    let q = b.reshape(q, &[t, units * size])?;
    let zeros = b.constant(0.0, &[units, t])?;
    let products = b.parallel_linear(q, k, zeros)?;
    let products = b.reshape(products, &[t * units, t])?;
    let scale = heads.scale.unwrap_or(1.0 / (size as f32).sqrt());
    let scores = if heads.causal {
        let reach = reach(b, heads, t)?;
        let reach = repeat_rows(b, reach, units)?;
        let names = ["reached_scores", "reached_scores_grad"];
        b.elementwise(names, [products, reach], |[score, reach]| {
            let beyond = Expr::from(BEYOND).where_positive(&(1e-9 - reach.clone()));
            (score * scale).where_positive(&reach) + beyond
        })?
    } else {
        b.elementwise(["scores", "scores_grad"], [products], |[score]| {
            score * scale
        })?
    };
    b.reshape(scores, &[t, units, t])
}

/// For each query f32 `[t, t]` that is positive for the keys that it attends to, and else 0: an
/// attention of equal scores to unit vectors.
fn reach(b: &mut Builder, heads: Heads, t: usize) -> Result<Value> {
    let equal = b.constant(0.0, &[1, t, t])?;
    let units = b.identity(t)?;
    let units = b.reshape(units, &[1, t, t])?;
    let one = Heads {
        count: 1,
        kv: 1,
        ..heads
    };
    let reach = b.attention(Qkv::Apart([equal, equal, units]), one, None)?;
    b.reshape(reach, &[t, t])
}

/// Queries f32 `[b, t, heads size]`, and keys `[b, t, kv_heads size]`.
fn queries_and_keys(b: &mut Builder, attended: Attended) -> Result<[Value; 2]> {
    match attended.qkv {
        Qkv::Apart([q, k, _]) => Ok([q, k]),
        Qkv::Joined(all) => {
            let columns = b.ty(all).columns() / 3;
            Ok([
                b.slice(all, 0..columns)?,
                b.slice(all, columns..2 * columns)?,
            ])
        }
        Qkv::ByHead(all) => {
            let dims = b.ty(all).dims.clone();
            let count = attended.heads.count;
            let size = dims[2] / (3 * count);
            let by_head = b.reshape(all, &[dims[0], dims[1], count, 3 * size])?;
            let part = |b: &mut Builder, at: usize| {
                let part = b.slice(by_head, at * size..(at + 1) * size)?;
                b.reshape(part, &[dims[0], dims[1], count * size])
            };
            Ok([part(b, 0)?, part(b, 1)?])
        }
    }
}

/// Heads f32 `[b, t, heads size]` as rows `[t b heads, size]`, turned by their positions.
fn turned(
    b: &mut Builder,
    x: Value,
    (heads, size): (usize, usize),
    rotary: Option<Value>,
) -> Result<Value> {
    let dims = b.ty(x).dims.clone();
    let (rows, t) = (dims[0], dims[1]);
    let x = b.second_first(x)?;
    let x = b.reshape(x, &[t * rows * heads, size])?;
    let Some(rotary) = rotary else {
        return Ok(x);
    };
    let turned = b.ty(rotary).columns();
    let half = turned / 2;
    let cos = b.slice(rotary, 0..half)?;
    let sin = b.slice(rotary, half..turned)?;
    let cos = repeat_rows(b, cos, rows * heads)?;
    let sin = repeat_rows(b, sin, rows * heads)?;
    let (left, right) = (b.slice(x, 0..half)?, b.slice(x, half..turned)?);
    let names = ["turned_left", "turned_left_grad"];
    let new_left = b.elementwise(names, [left, right, cos, sin], |[x, y, cos, sin]| {
        x * cos - y * sin
    })?;
    let names = ["turned_right", "turned_right_grad"];
    let new_right = b.elementwise(names, [left, right, cos, sin], |[x, y, cos, sin]| {
        y * cos + x * sin
    })?;
    match turned == size {
        true => b.concatenate(&[new_left, new_right]),
        false => {
            let rest = b.slice(x, turned..size)?;
            b.concatenate(&[new_left, new_right, rest])
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Alone, Pool, Store, Type};

    use super::*;

    const ROWS: usize = 2;
    const T: usize = 5;
    const SIZE: usize = 4;

    /// How queries, keys and values lie, and the columns of each head that are turned.
    #[derive(Clone, Copy)]
    enum Layout {
        Apart(usize),
        Joined,
        ByHead(usize),
    }

    /// The largest difference between an attention, and its patterns times its values.
    fn difference(layout: Layout, heads: Heads) -> f32 {
        let mut b = Builder::new();
        let columns = SIZE * heads.count;
        let input = |b: &mut Builder, name: &str, columns: usize| {
            b.input(name, &Type::f32(&[ROWS, T, columns])).unwrap()
        };
        let (qkv, turned) = match layout {
            Layout::Apart(turned) => {
                let q = input(&mut b, "q", columns);
                let [k, v] = ["k", "v"].map(|name| input(&mut b, name, SIZE * heads.kv));
                (Qkv::Apart([q, k, v]), turned)
            }
            Layout::Joined => (Qkv::Joined(input(&mut b, "all", 3 * columns)), 0),
            Layout::ByHead(turned) => (Qkv::ByHead(input(&mut b, "all", 3 * columns)), turned),
        };
        let rotary = (turned > 0).then(|| b.rotary_table(T, turned, 100.0, None).unwrap());
        let attended = Attended { qkv, heads, rotary };
        let mixed = b.attention(qkv, heads, rotary).unwrap();
        let scores = scores(&mut b, attended).unwrap();
        let pattern = b.softmax(scores).unwrap();
        b.output("mixed", mixed);
        b.output("pattern", pattern);
        let mut executor = Alone::new(&b, &Arc::new(Pool::single()).into()).unwrap();
        let wave = |offset: usize| move |i: usize| ((i * 37 + offset) as f32 * 0.61).sin() * 1.5;
        let mut given = Vec::new();
        for (number, name) in ["q", "k", "v", "all"].into_iter().enumerate() {
            if executor.has_input(name) {
                let to = executor.input(name);
                let values: Vec<f32> = (0..to.len()).map(wave(11 * number)).collect();
                to.copy_from_slice(&values);
                given = values;
            }
        }
        executor.run_and_fetch(&mut Store::new()).unwrap();
        // The value of a row, position, head of keys and column: those of `v` are given last.
        let value = |row: usize, t: usize, head: usize, column: usize| match layout {
            Layout::Apart(_) => given[((row * T + t) * heads.kv + head) * SIZE + column],
            Layout::Joined => {
                given[(row * T + t) * 3 * columns + 2 * columns + head * SIZE + column]
            }
            Layout::ByHead(_) => {
                given[((row * T + t) * heads.count + head) * 3 * SIZE + 2 * SIZE + column]
            }
        };
        let pattern = executor.output("pattern", &Store::new()).to_vec();
        let mixed = executor.output("mixed", &Store::new()).to_vec();
        let mut worst: f32 = 0.0;
        for (at, &found) in mixed.iter().enumerate() {
            let (column, head) = (at % SIZE, at / SIZE % heads.count);
            let (t, row) = (at / columns % T, at / columns / T);
            let of_query = &pattern[((t * ROWS + row) * heads.count + head) * T..][..T];
            let shared = head / (heads.count / heads.kv);
            let terms = of_query.iter().enumerate();
            let sum: f32 = terms
                .map(|(key, p)| p * value(row, key, shared, column))
                .sum();
            worst = worst.max((sum - found).abs());
        }
        worst
    }

    // Sums of a few products of numbers below 1.5, in f32.
    #[test]
    fn patterns_are_those_of_the_attention() {
        let windowed = Heads {
            window: Some(2),
            scale: Some(1.0),
            ..Heads::causal(2, 2)
        };
        for (name, layout, heads) in [
            ("full", Layout::Apart(0), Heads::full(2, 2)),
            (
                "causal and turned",
                Layout::Apart(SIZE),
                Heads::causal(2, 2),
            ),
            ("shared keys", Layout::Apart(SIZE), Heads::causal(4, 2)),
            ("joined", Layout::Joined, Heads::causal(2, 2)),
            ("windowed", Layout::Apart(0), windowed),
            (
                "by head, partly turned",
                Layout::ByHead(2),
                Heads::causal(3, 3),
            ),
        ] {
            let worst = difference(layout, heads);
            assert!(worst < 1e-5, "{name}: {worst}");
        }
    }
}
