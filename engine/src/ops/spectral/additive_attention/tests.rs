use candle_core::{D, Device, Tensor};

use super::AdditiveScores;
use crate::op::{Builder, Result};
use crate::ops::oracle::{Oracle, Sample, random};
use crate::ops::spectral::prefix::is_causal;
use crate::value::{Type, Value};

// Sums of up to 66 products of probabilities, and of 40 products in an exponent.
const TOLERANCE: f32 = 1e-5;

/// Attention in candle, of the operands of the op, by the scores of all pairs.
fn reference(of: &[Tensor], causal: bool) -> candle_core::Result<Tensor> {
    let [q, k, c, d, v, w, beta, scale] = of else {
        unreachable!("eight operands");
    };
    let (b, t, heads, hidden) = q.dims4()?;
    let side = |by_head: &Tensor, shared: &Tensor| {
        by_head
            .broadcast_add(&shared.unsqueeze(2)?)?
            .transpose(1, 2)
    };
    let (alpha, kappa) = (side(q, c)?.unsqueeze(3)?, side(k, d)?.unsqueeze(2)?);
    let half = (alpha.broadcast_add(&kappa)? * 0.5)?;
    let silu = (&half * (half.tanh()? + 1.0)?)?;
    let score = silu.broadcast_mul(&w.reshape((1, 1, 1, 1, hidden))?)?;
    let link = (score.sum(D::Minus1)?.broadcast_add(beta)? * 0.5)?.tanh()?;
    let powers = link.broadcast_mul(scale)?.exp()?;
    let sees = |i: usize| if causal && i % t > i / t { 0.0 } else { 1f32 };
    let mask = Tensor::from_vec((0..t * t).map(sees).collect(), (t, t), &Device::Cpu)?;
    let powers = powers.broadcast_mul(&mask)?;
    let p = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
    let v = v
        .reshape((b, t, heads, ()))?
        .transpose(1, 2)?
        .contiguous()?;
    p.matmul(&v)?.transpose(1, 2)?.flatten_from(2)
}

fn ours(b: &mut Builder, of: &[Value], causal: bool) -> Result<Value> {
    let [q, k, c, d, v, w, beta, scale] = *of else {
        unreachable!("eight operands");
    };
    let scores = AdditiveScores {
        by_head: [q, k],
        shared: [c, d],
        w,
        beta,
        scale,
    };
    b.additive_attention(scores, v, causal)
}

fn scaled(sample: Sample, by: f32) -> Sample {
    let values = sample.values.iter().map(|x| x * by).collect();
    Sample { values, ..sample }
}

/// Operands, with a hidden layer of `hidden` columns whose sums are some `large`.
fn samples([b, t, heads, hidden, size]: [usize; 5], large: f32, scale: f32) -> [Sample; 8] {
    let side = |seed| scaled(random(&[b, t, heads, hidden], seed), large);
    let shared = |seed| scaled(random(&[b, t, hidden], seed), large);
    let number = |x| Sample {
        dims: vec![],
        values: vec![x],
    };
    [
        side(1),
        side(2),
        shared(3),
        shared(4),
        random(&[b, t, heads * size], 5),
        scaled(random(&[hidden], 6), 1.0 / (large * (hidden as f32).sqrt())),
        number(-0.3),
        number(scale),
    ]
}

fn agrees(samples: &[Sample], causal: bool) {
    Oracle::new(samples)
        .ours(|b, v| ours(b, v, causal))
        .candle(|v| reference(v, causal))
        // Operands, and their sums in an exponent.
        .roundings(16.0)
        .agree(TOLERANCE);
}

// K1, K9: the scores of all pairs; one position.
#[test]
fn causal_and_full_attention_agree_with_candle() {
    for sizes in [
        [2, 1, 2, 3, 4],
        [1, 9, 1, 16, 33],
        [2, 37, 3, 20, 6],
        [1, 66, 2, 40, 5],
    ] {
        for causal in [true, false] {
            agrees(&samples(sizes, 1.0, 0.5), causal);
        }
    }
}

#[test]
fn a_large_scale_agrees_with_candle() {
    for scale in [8.0, -8.0] {
        agrees(&samples([1, 20, 2, 8, 4], 1.0, scale), true);
    }
}

#[test]
fn chunks_of_several_heads_agree_with_candle() {
    agrees(&samples([70, 3, 2, 4, 2], 1.0, 0.7), true);
}

// Some sums are within the range of powers and some beyond it, of either sign.
#[test]
fn sums_without_powers_in_f32_agree_with_candle() {
    agrees(&samples([1, 19, 2, 5, 4], 30.0, 0.7), true);
    agrees(&samples([1, 19, 2, 5, 4], 200.0, 0.7), true);
}

#[test]
fn one_value_as_queries_and_keys_gets_the_sum_of_gradients() {
    let all = samples([2, 9, 2, 6, 3], 1.0, 1.5);
    Oracle::new(&[&all[..1], &all[2..3], &all[4..]].concat())
        .ours(|b, v| {
            let all = [v[0], v[0], v[1], v[1], v[2], v[3], v[4], v[5]];
            let x = ours(b, &all, true)?;
            // A second use adds to the gradients.
            let all = [v[0], v[0], v[1], v[1], x, v[3], v[4], v[5]];
            ours(b, &all, false)
        })
        .candle(|v| {
            let of = |values: &Tensor, causal| {
                let all = [&v[0], &v[0], &v[1], &v[1], values, &v[3], &v[4], &v[5]];
                reference(&all.map(Clone::clone), causal)
            };
            of(&of(&v[2], true)?, false)
        })
        .roundings(16.0)
        .agree(TOLERANCE);
}

#[test]
fn without_masks_attention_is_full() {
    let mut b = Builder::new();
    let dims = [&[2, 5, 3, 4][..], &[2, 5, 4], &[2, 5, 6], &[4], &[]];
    let [q, c, v, w, one] =
        dims.map(|dims| b.input(&format!("{dims:?}"), &Type::f32(dims)).unwrap());
    let mut attention = |causal| {
        let y = ours(&mut b, &[q, q, c, c, v, w, one, one], causal).unwrap();
        b.remove_masks();
        (y, b.removed_masks())
    };
    let (causal, full, unmasked) = (attention(true), attention(false), attention(true));
    assert_eq!((unmasked.0, unmasked.1, full.1), (full.0, 1, 0));
    assert_ne!(causal.0, full.0);
}

#[test]
fn later_positions_change_no_bit() {
    is_causal(&samples([2, 37, 2, 20, 6], 1.0, 8.0), 5, |b, v| {
        ours(b, v, true)
    });
    // Later sums without powers in f32 beside earlier ones that have them.
    is_causal(&samples([1, 21, 1, 4, 2], 14.0, 8.0), 5, |b, v| {
        ours(b, v, true)
    });
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut b = Builder::new();
    let mut input = |dims: &[usize]| b.input(&format!("{dims:?}"), &Type::f32(dims)).unwrap();
    let (q, c, v) = (input(&[2, 5, 3, 4]), input(&[2, 5, 4]), input(&[2, 5, 6]));
    let (w, one) = (input(&[4]), input(&[]));
    for (all, expected) in [
        (
            [q, c, c, c, v, w, one, one],
            "queries and keys f32 [2, 5, 3, 4], shared parts f32 [2, 5, 4]",
        ),
        (
            [q, q, c, c, c, w, one, one],
            "v f32 [2, 5, columns] for 3 heads",
        ),
        ([q, q, c, c, v, one, one, one], "f32 [4] and two scalars"),
        ([c, q, c, c, v, w, one, one], "queries f32 [b, t, heads, e]"),
    ] {
        let error = ours(&mut b, &all, true).unwrap_err().to_string();
        let start = format!("additive_attention: needs {expected}, found f32 [");
        assert!(error.starts_with(&start), "{error}");
    }
}
