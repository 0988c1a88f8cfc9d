use candle_core::{D, Device, Tensor};

use crate::op::Builder;
use crate::ops::oracle::{Oracle, random};
use crate::value::Type;

// Sums of up to 150 products of probabilities, and of 8 products in an exponent.
const TOLERANCE: f32 = 1e-5;

/// Attention of `q`, `k` and `v`, f32 `[b, heads, t, size]`, with as many heads each, to `[b, t, heads size]`.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool) -> candle_core::Result<Tensor> {
    let (b, heads, t, size) = q.dims4()?;
    let scores = (q.matmul(&k.t()?.contiguous()?)? / (size as f64).sqrt())?;
    let mask: Vec<f32> = (0..t * t)
        .map(|i| if causal && i % t > i / t { -1e9 } else { 0.0 })
        .collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(mask, (t, t), &Device::Cpu)?)?;
    let powers = scores
        .broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?
        .exp()?;
    let p = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
    p.matmul(v)?.transpose(1, 2)?.reshape((b, t, heads * size))
}

/// f32 `[b, t, heads size]` to `[b, heads, t, size]`.
fn split(x: &Tensor, heads: usize) -> candle_core::Result<Tensor> {
    let (b, t, columns) = x.dims3()?;
    x.reshape((b, t, heads, columns / heads))?
        .transpose(1, 2)?
        .contiguous()
}

fn fused_reference(qkv: &Tensor, heads: usize, causal: bool) -> candle_core::Result<Tensor> {
    let d = qkv.dim(2)? / 3;
    let part = |index: usize| split(&qkv.narrow(2, index * d, d)?, heads);
    reference(&part(0)?, &part(1)?, &part(2)?, causal)
}

fn check_fused(b: usize, t: usize, d: usize, heads: usize, causal: bool) {
    Oracle::new(&[random(&[b, t, 3 * d], 1)])
        .ours(|b, v| b.fused_attention(v[0], heads, causal))
        .candle(|v| fused_reference(&v[0], heads, causal))
        .agree(TOLERANCE);
}

/// Turns each head of f32 `[b, heads, t, size]`: columns `i` and `i + size / 2` of position `p` by `p base^(-2 i / size)`.
fn turned(x: &Tensor, base: f64) -> candle_core::Result<Tensor> {
    let (_, _, t, size) = x.dims4()?;
    let half = size / 2;
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    let table = |of: fn(f64) -> f64| {
        let angle =
            |i: usize| (i / half) as f64 * base.powf(-2.0 * (i % half) as f64 / size as f64);
        let values: Vec<f32> = (0..t * half).map(|i| of(angle(i)) as f32).collect();
        Tensor::from_vec(values, (t, half), &Device::Cpu)
    };
    let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
    let (low, high) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let turn = |a: &Tensor, b: &Tensor| a.broadcast_mul(&cos)? + b.broadcast_mul(&sin)?;
    Tensor::cat(&[turn(&low, &high.neg()?)?, turn(&high, &low)?], 3)
}

/// Each head as often as queries share it, one after the other.
fn repeated(x: &Tensor, group: usize) -> candle_core::Result<Tensor> {
    let (b, heads, t, size) = x.dims4()?;
    let copies = vec![x.unsqueeze(2)?; group];
    Tensor::cat(&copies, 2)?.reshape((b, heads * group, t, size))
}

/// `[b, t]`, query and key heads, columns of a head.
fn check_grouped([b, t]: [usize; 2], (heads, kv_heads): (usize, usize), size: usize, rotary: bool) {
    const BASE: f32 = 100.0;
    let sample = |heads, seed| random(&[b, t, heads * size], seed);
    let samples = [sample(heads, 1), sample(kv_heads, 2), sample(kv_heads, 3)];
    Oracle::new(&samples)
        .ours(|b, v| {
            let table = rotary.then(|| b.rotary_table(t, size, BASE)).transpose()?;
            b.attention([v[0], v[1], v[2]], (heads, kv_heads), true, table)
        })
        .candle(|v| {
            let [mut q, mut k] = [split(&v[0], heads)?, split(&v[1], kv_heads)?];
            if rotary {
                (q, k) = (turned(&q, f64::from(BASE))?, turned(&k, f64::from(BASE))?);
            }
            let [k, v] = [k, split(&v[2], kv_heads)?].map(|x| repeated(&x, heads / kv_heads));
            reference(&q, &k?, &v?, true)
        })
        .agree(TOLERANCE);
}

#[test]
fn whole_and_broken_blocks_agree_with_candle() {
    for t in [1, 2, 63, 64, 65, 150] {
        check_fused(2, t, 12, 3, true);
        check_fused(1, t, 8, 1, false);
    }
}

#[test]
fn chunks_of_several_heads_agree_with_candle() {
    check_fused(80, 7, 4, 2, true);
}

#[test]
fn queries_that_share_keys_agree_with_candle() {
    for rotary in [false, true] {
        check_grouped([2, 70], (4, 2), 6, rotary);
        check_grouped([1, 5], (3, 1), 2, rotary);
        check_grouped([3, 65], (2, 2), 8, rotary);
    }
}

#[test]
fn a_second_use_adds_to_the_gradient() {
    Oracle::new(&[random(&[2, 5, 12], 1)])
        .ours(|b, v| {
            let causal = b.fused_attention(v[0], 2, true)?;
            let full = b.fused_attention(v[0], 2, false)?;
            b.add(causal, full)
        })
        .candle(|v| fused_reference(&v[0], 2, true)? + fused_reference(&v[0], 2, false)?)
        .agree(TOLERANCE);
}

// All three operands are one value: its gradient has three parts, each added to those before.
#[test]
fn one_value_as_queries_keys_and_values_gets_the_sum() {
    let base = 10_000.0;
    Oracle::new(&[random(&[2, 5, 12], 1)])
        .ours(|b, v| {
            let x = b.add(v[0], v[0])?;
            let table = b.rotary_table(5, 6, base)?;
            let y = b.attention([x, x, x], (2, 2), false, Some(table))?;
            b.add(y, x)
        })
        .candle(|v| {
            let x = (&v[0] * 2.0)?;
            let heads = split(&x, 2)?;
            let turned = turned(&heads, f64::from(base))?;
            reference(&turned, &turned, &heads, false)? + x
        })
        .agree(TOLERANCE);
}

fn refused(build: impl FnOnce(&mut Builder) -> crate::Result<crate::Value>) -> String {
    build(&mut Builder::new()).unwrap_err().to_string()
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let input = |b: &mut Builder, columns: usize| {
        b.input(&columns.to_string(), &Type::f32(&[2, 5, columns]))
            .unwrap()
    };
    assert_eq!(
        refused(|b| {
            let qkv = input(b, 12);
            b.fused_attention(qkv, 3, true)
        }),
        "attention: needs f32 [b, t, 3 d] with d a multiple of 3 heads, found f32 [2, 5, 12]"
    );
    assert_eq!(
        refused(|b| {
            let (q, k) = (input(b, 12), input(b, 6));
            b.attention([q, k, k], (4, 3), true, None)
        }),
        "attention: needs 3 key heads to divide 4 heads, found f32 [2, 5, 12], f32 [2, 5, 6], f32 [2, 5, 6]"
    );
    assert_eq!(
        refused(|b| {
            let (q, k) = (input(b, 12), input(b, 4));
            b.attention([q, k, k], (4, 2), true, None)
        }),
        "attention: needs k and v f32 [2, 5, 6], found f32 [2, 5, 12], f32 [2, 5, 4], f32 [2, 5, 4]"
    );
    assert_eq!(
        refused(|b| {
            let (q, k) = (input(b, 12), input(b, 6));
            let table = b.rotary_table(5, 2, 1e4)?;
            b.attention([q, k, k], (4, 2), true, Some(table))
        }),
        "attention: needs a rotary table [5, 3] of an even number of columns, found f32 [2, 5, 12], f32 [2, 5, 6], \
         f32 [2, 5, 6], f32 [5, 2]"
    );
}
