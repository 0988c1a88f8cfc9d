use candle_core::{D, Device, Tensor};

use super::{Heads, Qkv};
use crate::op::Builder;
use crate::ops::oracle::{Oracle, random};
use crate::value::Type;

// Sums of up to 150 products of probabilities, and of 8 products in an exponent.
const TOLERANCE: f32 = 1e-5;

// In bf16, operands, y, its gradient and theirs; on tensor cores, weights and their slopes too.
const ROUNDINGS: f32 = 6.0;

/// Attention of `q`, `k` and `v`, f32 `[b, heads, t, size]`, with as many heads each, to
/// `[b, t, heads size]`.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, of: &Heads) -> candle_core::Result<Tensor> {
    let (b, heads, t, size) = q.dims4()?;
    let scale = of.scale.map_or(1.0 / (size as f64).sqrt(), f64::from);
    let scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    let window = of.window.unwrap_or(t);
    let sees = |query: usize, key: usize| !of.causal || key <= query && query < key + window;
    let mask: Vec<f32> = (0..t * t)
        .map(|i| if sees(i / t, i % t) { 0.0 } else { -1e9 })
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

fn joined_reference(qkv: &Tensor, of: &Heads) -> candle_core::Result<Tensor> {
    let d = qkv.dim(2)? / 3;
    let part = |index: usize| split(&qkv.narrow(2, index * d, d)?, of.count);
    reference(&part(0)?, &part(1)?, &part(2)?, of)
}

fn check_joined(b: usize, t: usize, d: usize, heads: Heads) {
    Oracle::new(&[random(&[b, t, 3 * d], 1)])
        .ours(|b, v| b.attention(Qkv::Joined(v[0]), heads, None))
        .candle(|v| joined_reference(&v[0], &heads))
        .roundings(ROUNDINGS)
        .agree(TOLERANCE);
}

/// Rotates each head of f32 `[b, heads, t, size]`: columns `i` and `i + size / 2` of position `p`
/// by `p base^(-2 i / size)`.
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

/// Each head once for each query head that shares it, one after the other.
fn repeated(x: &Tensor, group: usize) -> candle_core::Result<Tensor> {
    let (b, heads, t, size) = x.dims4()?;
    let copies = vec![x.unsqueeze(2)?; group];
    Tensor::cat(&copies, 2)?.reshape((b, heads * group, t, size))
}

const BASE: f64 = 100.0;

/// `[b, t]`, heads, columns of a head.
fn check_grouped([b, t]: [usize; 2], of: Heads, size: usize, rotary: bool) {
    let (heads, kv_heads) = (of.count, of.kv);
    let sample = |heads, seed| random(&[b, t, heads * size], seed);
    let samples = [sample(heads, 1), sample(kv_heads, 2), sample(kv_heads, 3)];
    Oracle::new(&samples)
        .ours(|b, v| {
            let table = rotary.then(|| b.rotary_table(t, size, BASE, None));
            b.attention(Qkv::Apart([v[0], v[1], v[2]]), of, table.transpose()?)
        })
        .candle(|v| {
            let [mut q, mut k] = [split(&v[0], heads)?, split(&v[1], kv_heads)?];
            if rotary {
                (q, k) = (turned(&q, BASE)?, turned(&k, BASE)?);
            }
            let [k, v] = [k, split(&v[2], kv_heads)?].map(|x| repeated(&x, heads / kv_heads));
            reference(&q, &k?, &v?, &of)
        })
        .roundings(ROUNDINGS)
        .agree(TOLERANCE);
}

#[test]
fn full_and_partial_blocks_agree_with_candle() {
    for t in [1, 2, 63, 64, 65, 150] {
        check_joined(2, t, 12, Heads::causal(3, 3));
        check_joined(1, t, 8, Heads::full(1, 1));
    }
}

#[test]
fn chunks_of_several_heads_agree_with_candle() {
    check_joined(80, 7, 4, Heads::causal(2, 2));
}

#[test]
fn queries_that_share_keys_agree_with_candle() {
    for rotary in [false, true] {
        check_grouped([2, 70], Heads::causal(4, 2), 6, rotary);
        check_grouped([1, 5], Heads::causal(3, 1), 2, rotary);
        check_grouped([3, 65], Heads::causal(2, 2), 8, rotary);
    }
}

// Windows of one key, within a block, of a block and one more, and beyond all positions. Scales are
// no larger than usual: the rounding errors of scores grow with them.
#[test]
fn windows_and_scales_agree_with_candle() {
    for (window, scale) in [(1, None), (3, Some(0.3)), (65, None), (500, Some(0.1))] {
        let heads = |count, kv| Heads {
            window: Some(window),
            scale,
            ..Heads::causal(count, kv)
        };
        check_joined(2, 150, 12, heads(3, 3));
        check_grouped([2, 70], heads(4, 2), 6, true);
    }
}

/// Rotates the first `columns` of each head of f32 `[b, heads, t, size]`.
fn partly_turned(x: &Tensor, columns: usize) -> candle_core::Result<Tensor> {
    let rest = x.dim(3)? - columns;
    let turned = turned(&x.narrow(3, 0, columns)?, BASE)?;
    Tensor::cat(&[turned, x.narrow(3, columns, rest)?], 3)
}

#[test]
fn partly_rotated_heads_agree_with_candle() {
    for (t, size, columns) in [(5, 8, 2), (70, 6, 4)] {
        let heads = Heads::causal(4, 2);
        let sample = |heads: usize, seed| random(&[2, t, heads * size], seed);
        Oracle::new(&[sample(4, 1), sample(2, 2), sample(2, 3)])
            .ours(|b, v| {
                let table = b.rotary_table(t, columns, BASE, None)?;
                let x = b.attention(Qkv::Apart([v[0], v[1], v[2]]), heads, Some(table))?;
                // A second use adds to the gradients.
                let y = b.attention(Qkv::Apart([x, v[1], v[2]]), heads, Some(table))?;
                b.add(x, y)
            })
            .candle(|v| {
                let [k, values] = [split(&v[1], 2)?, split(&v[2], 2)?];
                let (k, values) = (
                    repeated(&partly_turned(&k, columns)?, 2)?,
                    repeated(&values, 2)?,
                );
                let attend = |q: &Tensor| {
                    reference(&partly_turned(&split(q, 4)?, columns)?, &k, &values, &heads)
                };
                let x = attend(&v[0])?;
                attend(&x)? + x
            })
            .roundings(ROUNDINGS)
            .agree(TOLERANCE);
    }
}

#[test]
fn queries_keys_and_values_joined_by_head_agree_with_candle() {
    for (t, heads) in [(5, 3), (70, 2)] {
        let (size, of) = (4, Heads::causal(heads, heads));
        Oracle::new(&[random(&[2, t, 3 * heads * size], 1)])
            .ours(|b, v| {
                let table = b.rotary_table(t, 2, BASE, None)?;
                let x = b.attention(Qkv::ByHead(v[0]), of, Some(table))?;
                let y = b.attention(Qkv::ByHead(v[0]), of, None)?;
                b.add(x, y)
            })
            .candle(|v| {
                let parts = v[0].reshape((2, t, heads, 3, size))?;
                let part = |index: usize| {
                    parts
                        .narrow(3, index, 1)?
                        .squeeze(3)?
                        .transpose(1, 2)?
                        .contiguous()
                };
                let (q, k, v) = (part(0)?, part(1)?, part(2)?);
                let [turned_q, turned_k] = [partly_turned(&q, 2)?, partly_turned(&k, 2)?];
                reference(&turned_q, &turned_k, &v, &of)? + reference(&q, &k, &v, &of)?
            })
            .roundings(ROUNDINGS)
            .agree(TOLERANCE);
    }
}

#[test]
fn a_second_use_adds_to_the_gradient() {
    Oracle::new(&[random(&[2, 5, 12], 1)])
        .ours(|b, v| {
            let causal = b.attention(Qkv::Joined(v[0]), Heads::causal(2, 2), None)?;
            let full = b.attention(Qkv::Joined(v[0]), Heads::full(2, 2), None)?;
            b.add(causal, full)
        })
        .candle(|v| {
            let causal = joined_reference(&v[0], &Heads::causal(2, 2))?;
            causal + joined_reference(&v[0], &Heads::full(2, 2))?
        })
        .roundings(ROUNDINGS)
        .agree(TOLERANCE);
}

// All three operands are one value: its gradient has three parts, each added to those before.
#[test]
fn one_value_as_queries_keys_and_values_gets_the_sum_of_gradients() {
    let base = 10_000.0;
    Oracle::new(&[random(&[2, 5, 12], 1)])
        .ours(|b, v| {
            let x = b.add(v[0], v[0])?;
            let table = b.rotary_table(5, 6, base, None)?;
            let y = b.attention(Qkv::Apart([x, x, x]), Heads::full(2, 2), Some(table))?;
            b.add(y, x)
        })
        .candle(|v| {
            let x = (&v[0] * 2.0)?;
            let heads = split(&x, 2)?;
            let turned = turned(&heads, base)?;
            reference(&turned, &turned, &heads, &Heads::full(2, 2))? + x
        })
        .roundings(ROUNDINGS)
        .agree(TOLERANCE);
}

#[test]
fn without_masks_every_query_sees_every_key() {
    let windowed = Heads {
        window: Some(2),
        scale: Some(0.3),
        ..Heads::causal(2, 2)
    };
    Oracle::new(&[random(&[2, 5, 12], 1)])
        .ours(|b, v| {
            b.remove_masks();
            let causal = b.attention(Qkv::Joined(v[0]), Heads::causal(2, 2), None)?;
            let windowed = b.attention(Qkv::Joined(v[0]), windowed, None)?;
            let full = b.attention(Qkv::Joined(v[0]), Heads::full(2, 2), None)?;
            assert_eq!((causal, b.removed_masks()), (full, 2));
            b.add(causal, windowed)
        })
        .candle(|v| {
            let full = Heads::full(2, 2);
            let scaled = Heads {
                scale: Some(0.3),
                ..full
            };
            joined_reference(&v[0], &full)? + joined_reference(&v[0], &scaled)?
        })
        .roundings(ROUNDINGS)
        .agree(TOLERANCE);
}

/// Attention of the first head of `x`, f32 `[b, t, 3 d]`, a document at a time.
fn apart(x: &Tensor, of: &Heads, documents: &[usize]) -> candle_core::Result<Tensor> {
    let mut first = 0;
    let parts = documents.iter().map(|&len| {
        let part = joined_reference(&x.narrow(1, first, len)?, of);
        first += len;
        part
    });
    Tensor::cat(&parts.collect::<candle_core::Result<Vec<_>>>()?, 1)
}

// Documents of one token, of a block and one more, and to the end of the row, unlike those of the
// other row: one call for both rows equals a call for each document.
#[test]
fn documents_are_apart() {
    let rows: [&[usize]; 2] = [&[1, 65, 84], &[150]];
    let ends: Vec<usize> = vec![0, 65];
    let windowed = Heads {
        window: Some(3),
        ..Heads::causal(3, 3)
    };
    for heads in [Heads::full(3, 3), Heads::causal(3, 3), windowed] {
        let mut tokens = vec![0u32; 300];
        ends.iter().for_each(|&end| tokens[end] = 7);
        Oracle::new(&[random(&[2, 150, 36], 1)])
            .tokens("tokens", &[2, 150], &tokens)
            .ours(|b, v| {
                let tokens = b.input("tokens", &Type::u32(&[2, 150]))?;
                let documents = b.documents(tokens, 7)?;
                b.attention_in_documents(Qkv::Joined(v[0]), heads, None, Some(documents))
            })
            .candle(|v| {
                let row = |index: usize| apart(&v[0].narrow(0, index, 1)?, &heads, rows[index]);
                Tensor::cat(&[row(0)?, row(1)?], 0)
            })
            .roundings(ROUNDINGS)
            .agree(TOLERANCE);
    }
}

// Rotary angles go on through the row: only the difference of positions counts.
#[test]
fn rotated_heads_that_share_keys_have_documents_apart() {
    let heads = Heads::full(4, 2);
    let documents = [40usize, 30];
    Oracle::new(&[
        random(&[1, 70, 24], 1),
        random(&[1, 70, 12], 2),
        random(&[1, 70, 12], 3),
    ])
    .tokens(
        "tokens",
        &[1, 70],
        &(0..70).map(|at| u32::from(at == 39)).collect::<Vec<_>>(),
    )
    .ours(|b, v| {
        let tokens = b.input("tokens", &Type::u32(&[1, 70]))?;
        let documents = b.documents(tokens, 1)?;
        let table = b.rotary_table(70, 6, BASE, None)?;
        let qkv = Qkv::Apart([v[0], v[1], v[2]]);
        b.attention_in_documents(qkv, heads, Some(table), Some(documents))
    })
    .candle(|v| {
        let mut first = 0;
        let parts = documents.map(|len| {
            let part = |x: &Tensor, heads| split(&x.narrow(1, first, len)?, heads);
            let (q, k) = (
                turned(&part(&v[0], 4)?, BASE)?,
                turned(&part(&v[1], 2)?, BASE)?,
            );
            let (k, values) = (repeated(&k, 2)?, repeated(&part(&v[2], 2)?, 2)?);
            first += len;
            reference(&q, &k, &values, &heads)
        });
        Tensor::cat(
            &parts.into_iter().collect::<candle_core::Result<Vec<_>>>()?,
            1,
        )
    })
    .roundings(ROUNDINGS)
    // Rotated at other positions: angles of up to 70 rounded to f32.
    .agree(4.0 * TOLERANCE);
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
            b.attention(Qkv::Joined(qkv), Heads::causal(3, 3), None)
        }),
        "attention: needs f32 [b, t, 3 d] with d a multiple of 3 heads, found f32 [2, 5, 12]"
    );
    assert_eq!(
        refused(|b| {
            let (q, k) = (input(b, 12), input(b, 6));
            b.attention(Qkv::Apart([q, k, k]), Heads::causal(4, 3), None)
        }),
        "attention: needs 3 key heads to divide 4 heads, found f32 [2, 5, 12], f32 [2, 5, 6], f32 [2, 5, 6]"
    );
    assert_eq!(
        refused(|b| {
            let (q, k) = (input(b, 12), input(b, 4));
            b.attention(Qkv::Apart([q, k, k]), Heads::causal(4, 2), None)
        }),
        "attention: needs k and v f32 [2, 5, 6], found f32 [2, 5, 12], f32 [2, 5, 4], f32 [2, 5, 4]"
    );
    assert_eq!(
        refused(|b| {
            let (q, k) = (input(b, 12), input(b, 6));
            let table = b.rotary_table(5, 4, 1e4, None)?;
            b.attention(Qkv::Apart([q, k, k]), Heads::causal(4, 2), Some(table))
        }),
        "attention: needs a rotary table [5, n] of an even number of columns up to 3, found f32 [2, 5, 12], f32 [2, 5, 6], \
         f32 [2, 5, 6], f32 [5, 4]"
    );
    assert_eq!(
        refused(|b| {
            let qkv = input(b, 12);
            b.attention(Qkv::ByHead(qkv), Heads::causal(2, 1), None)
        }),
        "attention: needs as many key heads as heads, 2, where they are in one value, found f32 [2, 5, 12]"
    );
    let window = Heads {
        window: Some(3),
        ..Heads::full(2, 2)
    };
    assert_eq!(
        refused(|b| {
            let qkv = input(b, 12);
            b.attention(Qkv::Joined(qkv), window, None)
        }),
        "attention: needs a window of at least one key, of causal heads, found f32 [2, 5, 12]"
    );
}
