use candle_core::{Device, Tensor};

use crate::op::Builder;
use crate::ops::oracle::{Oracle, Sample, random};
use crate::ops::spectral::prefix::is_causal;
use crate::value::Type;

// Sums of up to 70 scores of 40 products.
const TOLERANCE: f32 = 5e-6;

/// `((q k^T) * mask) v / sqrt(size)` of each head, with a lower triangle or without.
fn reference(of: [&Tensor; 3], heads: usize, causal: bool) -> candle_core::Result<Tensor> {
    let (b, t, d) = of[0].dims3()?;
    let size = d / heads;
    let split = |x: &Tensor| {
        let x = x.reshape((b, t, heads, size))?;
        x.transpose(1, 2)?.contiguous()
    };
    let [q, k, v] = of.map(split);
    let sees = |i: usize| if causal && i % t > i / t { 0.0 } else { 1f32 };
    let mask = Tensor::from_vec((0..t * t).map(sees).collect(), (t, t), &Device::Cpu)?;
    let scores = q?.matmul(&k?.t()?.contiguous()?)?.broadcast_mul(&mask)?;
    let y = (scores.matmul(&v?)? / (size as f64).sqrt())?;
    y.transpose(1, 2)?.flatten_from(2)
}

fn samples(dims: [usize; 3]) -> [Sample; 3] {
    [1, 2, 3].map(|seed| random(&dims, seed))
}

// F1, F2. One tile and several, whole and partial.
#[test]
fn linear_attention_agrees_with_candle() {
    for (dims, heads) in [
        ([2, 1, 3], 3),
        ([2, 9, 6], 2),
        ([1, 33, 40], 1),
        ([40, 5, 4], 2),
        ([1, 70, 10], 2),
    ] {
        Oracle::new(&samples(dims))
            .ours(|b, v| {
                let y = b.linear_attention([v[0], v[1], v[2]], heads)?;
                // A second use adds to the gradients.
                b.add(y, v[2])
            })
            .candle(|v| reference([&v[0], &v[1], &v[2]], heads, true)? + &v[2])
            .agree(TOLERANCE);
    }
}

#[test]
fn one_value_as_all_operands_gets_the_sum_of_gradients() {
    Oracle::new(&[random(&[2, 35, 6], 1)])
        .ours(|b, v| b.linear_attention([v[0]; 3], 2))
        .candle(|v| reference([&v[0]; 3], 2, true))
        .agree(TOLERANCE);
}

#[test]
fn without_masks_every_query_sees_every_key() {
    Oracle::new(&samples([2, 35, 6]))
        .ours(|b, v| {
            b.remove_masks();
            let y = b.linear_attention([v[0], v[1], v[2]], 2)?;
            assert_eq!(b.removed_masks(), 1);
            Ok(y)
        })
        .candle(|v| reference([&v[0], &v[1], &v[2]], 2, false))
        .agree(TOLERANCE);
}

// F3.
#[test]
fn later_positions_change_no_bit() {
    is_causal(&samples([2, 70, 10]), 3, |b, v| {
        b.linear_attention([v[0], v[1], v[2]], 2)
    });
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut b = Builder::new();
    let x = b.input("x", &Type::f32(&[2, 5, 6])).unwrap();
    assert_eq!(
        b.linear_attention([x; 3], 4).unwrap_err().to_string(),
        "linear_attention: needs three f32 [b, t, d] with d a multiple of 4 heads, \
         found f32 [2, 5, 6], f32 [2, 5, 6], f32 [2, 5, 6]"
    );
}
