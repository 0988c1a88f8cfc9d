//! Steps of networks that the engine has as one op each, composed of plain ones: what fusion is
//! measured against. As PyTorch's eager ops do, each writes its result to memory, that of every
//! pair of positions too.

use spd_engine::ops::{AdditiveScores, ReactionParameters};
use spd_engine::{Builder, Given, Result, Type, Value};

/// The input that is added to scores, f32 `[t, t]`.
const MASK: &str = "causal mask";

/// Gives a program the mask: 0 up to a query's own position, and next to nothing after it.
pub(super) fn draw(given: &mut Given) {
    if given.has_input(MASK) {
        let mask = given.input(MASK);
        let positions = mask.len().isqrt();
        for (query, row) in mask.chunks_exact_mut(positions).enumerate() {
            row[..=query].fill(0.0);
            row[query + 1..].fill(-1e30);
        }
    }
}

/// Columns `at * len..` of a value as one row.
fn piece(b: &mut Builder, x: Value, at: usize, len: usize) -> Result<Value> {
    b.slice(x, at * len..(at + 1) * len)
}

fn tanh(b: &mut Builder, x: Value) -> Result<Value> {
    b.elementwise(["tanh", "tanh_grad"], [x], |[x]| x.tanh())
}

/// Causal attention with the hidden layer of all pairs.
pub(super) fn attention(b: &mut Builder, of: AdditiveScores, v_btd: Value) -> Result<Value> {
    let [rows, t, heads, e] = b.ty(of.by_head[0]).dims[..] else {
        unreachable!("queries [b, t, heads, e]");
    };
    let size = b.ty(v_btd).columns() / heads;
    let mask = b.input(MASK, &Type::f32(&[t, t]))?;
    let w = b.reshape(of.w, &[1, e])?;
    let mut of_rows = Vec::new();
    for row in 0..rows {
        let mut of_heads = Vec::new();
        for head in 0..heads {
            // A row of the batch, in the columns of a head.
            let unit = |b: &mut Builder, x: Value, head, columns| {
                let wide = b.ty(x).len() / (rows * t);
                let flat = b.reshape(x, &[rows * t * wide])?;
                let x = piece(b, flat, row, t * wide)?;
                let x = b.reshape(x, &[t, wide])?;
                piece(b, x, head, columns)
            };
            let q = unit(b, of.by_head[0], head, e)?;
            let c = unit(b, of.shared[0], 0, e)?;
            let k = unit(b, of.by_head[1], head, e)?;
            let d = unit(b, of.shared[1], 0, e)?;
            let v = unit(b, v_btd, head, size)?;
            let (alpha, kappa) = (b.add(q, c)?, b.add(k, d)?);
            let alphas = b.concatenate(&vec![alpha; t])?;
            let alphas = b.reshape(alphas, &[t, t, e])?;
            let sums = b.add_positions(alphas, kappa)?;
            let hidden = b.silu(sums)?;
            let scores = b.linear_oi(hidden, w, None)?;
            let scores = b.reshape(scores, &[t, t])?;
            let names = ["add_scalar", "add_scalar_grad"];
            let scores = b.elementwise(names, [scores, of.beta], |[x, beta]| x + beta)?;
            let scores = b.elementwise(["halve", "halve_grad"], [scores], |[x]| x * 0.5)?;
            let links = tanh(b, scores)?;
            let scores = b.scale(links, of.scale)?;
            let scores = b.add(scores, mask)?;
            let weights = b.softmax(scores)?;
            of_heads.push(b.matmul(weights, v)?);
        }
        let y = b.concatenate(&of_heads)?;
        of_rows.push(b.reshape(y, &[t * heads * size])?);
    }
    let y = b.concatenate(&of_rows)?;
    b.reshape(y, &[rows, t, heads * size])
}

/// Two Euler steps, none of whose clamps acts, an op for each operation.
pub(super) fn reaction(
    b: &mut Builder,
    [x, y]: [Value; 2],
    with: ReactionParameters,
    steps: usize,
) -> Result<Value> {
    let times = |b: &mut Builder, x, factor: f32| {
        b.elementwise(["times", "times_grad"], [x], |[x]| x * factor)
    };
    let (x, y) = (tanh(b, x)?, tanh(b, y)?);
    let drive = b.add(x, y)?;
    let names = ["logistic", "logistic_grad"];
    let dt = b.elementwise(names, [with.dt], |[dt]| dt.logistic() * 0.2)?;
    let (mut u, mut w) = (x, None);
    for step in 1..=steps {
        let square = b.mul(u, u)?;
        let cube = b.mul(square, u)?;
        let cubic = times(b, cube, -1.0 / 3.0)?;
        let mut rise = b.add(u, cubic)?;
        rise = b.add(rise, drive)?;
        if let Some(w) = w {
            let less = times(b, w, -1.0)?;
            rise = b.add(rise, less)?;
        }
        let names = ["add_scalar", "add_scalar_grad"];
        let mut growth = b.elementwise(names, [u, with.a], |[u, a]| u + a)?;
        if let Some(w) = w {
            let decay = b.scale(w, with.b)?;
            let less = times(b, decay, -1.0)?;
            growth = b.add(growth, less)?;
        }
        let rise = b.scale(rise, dt)?;
        u = b.add(u, rise)?;
        if step < steps {
            let growth = b.scale(growth, dt)?;
            let growth = times(b, growth, 0.08)?;
            w = Some(match w {
                Some(w) => b.add(w, growth)?,
                None => growth,
            });
        }
    }
    Ok(u)
}

/// The mean square of `G - I` over the rows of the batch, from a basis f32 `[b, t, k]`.
pub(super) fn penalty(b: &mut Builder, phi_btk: Value) -> Result<Value> {
    let [rows, t, k] = b.ty(phi_btk).dims[..] else {
        unreachable!("a basis [b, t, k]");
    };
    let flat = b.reshape(phi_btk, &[rows * t * k])?;
    let (ones_1t, ones_t1) = (b.constant(1.0, &[1, t])?, b.constant(1.0, &[t, 1])?);
    let identity = b.identity(k)?;
    let mut terms = Vec::new();
    for row in 0..rows {
        let phi = piece(b, flat, row, t * k)?;
        let phi_tk = b.reshape(phi, &[t, k])?;
        let squares = b.mul(phi_tk, phi_tk)?;
        let sums_1k = b.matmul(ones_1t, squares)?;
        let names = ["rsqrt", "rsqrt_grad"];
        let shares_1k = b.elementwise(names, [sums_1k], |[x]| 1.0 / x.sqrt())?;
        let shares_tk = b.matmul(ones_t1, shares_1k)?;
        let q_tk = b.mul(phi_tk, shares_tk)?;
        let q_kt = b.transpose(q_tk)?;
        let gram = b.matmul(q_kt, q_tk)?;
        let names = ["difference", "difference_grad"];
        let rest = b.elementwise(names, [gram, identity], |[x, y]| x - y)?;
        terms.push((1.0 / (rows * k * k) as f64, b.sum_squares(rest)?));
    }
    b.weighted_sum(&terms)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_engine::{Pool, Processor};

    use crate::bench::clock::Timed;
    use crate::bench::workload::Workload;
    use crate::bench::{Overrides, preset};
    use crate::world::World;

    fn loss_of_second_step(name: &str) -> f64 {
        let processor = Processor::from(Arc::new(Pool::single()));
        let preset = preset(name, &Overrides::default()).unwrap();
        let mut workload = Workload::new(&preset, &processor, &World::default()).unwrap();
        for _ in 0..2 {
            workload.step(0).unwrap();
        }
        workload.losses()[0].1
    }

    // The second loss also tells the gradients of the first step, if not their size: an update of
    // AdamW is a step of one length.
    #[test]
    fn plain_ops_have_the_losses_of_one_op() {
        for (one, plain) in [
            ("sd-2x5", "sd-plain-2x5"),
            ("kaufmann-2x5", "kaufmann-plain-2x5"),
            ("kaufmann-2x5", "kaufmann-tail-2x5"),
        ] {
            let [one, other] = [one, plain].map(loss_of_second_step);
            assert!(
                (one - other).abs() < 1e-4 * one.abs(),
                "{plain}: {one} {other}"
            );
        }
    }
}
