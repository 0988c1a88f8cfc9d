use candle_core::Tensor;

use crate::op::Builder;
use crate::ops::oracle::{Oracle, Sample, random};
use crate::ops::spectral::prefix::is_causal;
use crate::value::Type;

/// By shifts: each lag times the positions that it reaches back to.
fn reference(x: &Tensor, h: &Tensor, bias: &Tensor) -> candle_core::Result<Tensor> {
    let (_, t, _) = x.dims3()?;
    let mut y = x.zeros_like()?.broadcast_add(bias)?;
    for lag in 0..t.min(h.dim(0)?) {
        let shifted = x.pad_with_zeros(1, lag, 0)?.narrow(1, 0, t)?;
        y = (y + shifted.broadcast_mul(&h.get(lag)?)?)?;
    }
    Ok(y)
}

fn samples([b, t, lags, d]: [usize; 4]) -> [Sample; 3] {
    [
        random(&[b, t, d], 1),
        random(&[lags, d], 2),
        random(&[d], 3),
    ]
}

// Whole and partial vectors and blocks, one or several; fewer and more lags than positions.
#[test]
fn convolutions_agree_with_candle() {
    for sizes in [
        [2, 1, 1, 1],
        [1, 9, 9, 16],
        [3, 20, 7, 5],
        [2, 7, 20, 33],
        [2, 40, 30, 19],
        [1, 130, 100, 70],
        [2, 20, 3, 17],
        [1, 300, 150, 9],
    ] {
        Oracle::new(&samples(sizes))
            .ours(|b, v| {
                let y = b.causal_mixing(v[0], v[1], v[2])?;
                // A second use adds to the gradients.
                let z = b.causal_mixing(y, v[1], v[2])?;
                let y = b.add(y, v[0])?;
                b.add(y, z)
            })
            .candle(|v| {
                let y = reference(&v[0], &v[1], &v[2])?;
                let z = reference(&y, &v[1], &v[2])?;
                (y + &v[0])? + z
            })
            .roundings(16.0)
            // Sums of up to 100 products, twice.
            .agree(5e-6);
    }
}

// Fewer and more lags than positions.
#[test]
fn without_masks_convolutions_are_circular() {
    for [b, t, lags, d] in [[2, 9, 5, 3], [1, 7, 7, 4], [2, 5, 8, 3]] {
        Oracle::new(&samples([b, t, lags, d]))
            .ours(|b, v| {
                b.remove_masks();
                let y = b.causal_mixing(v[0], v[1], v[2])?;
                let circular = b.circular_mixing(v[0], v[1], v[2])?;
                assert_eq!((y, b.removed_masks()), (circular, 1));
                Ok(y)
            })
            .candle(|v| {
                let y = reference(&Tensor::cat(&[&v[0], &v[0]], 1)?, &cut(&v[1], t)?, &v[2])?;
                y.narrow(1, t, t)
            })
            // Sums of up to 7 products.
            .agree(2e-6);
    }
}

/// The first lags of a kernel.
fn cut(h: &Tensor, lags: usize) -> candle_core::Result<Tensor> {
    h.narrow(0, 0, lags.min(h.dim(0)?))
}

#[test]
fn later_positions_change_no_bit() {
    for sizes in [
        [2, 40, 30, 19],
        [1, 21, 50, 8],
        [1, 30, 3, 8],
        [1, 270, 300, 9],
    ] {
        is_causal(&samples(sizes), 1, |b, v| b.causal_mixing(v[0], v[1], v[2]));
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut b = Builder::new();
    let [x, h, bias] = [&[2, 5, 4][..], &[7, 3], &[4]]
        .map(|dims| b.input(&format!("{dims:?}"), &Type::f32(dims)).unwrap());
    assert_eq!(
        b.causal_mixing(x, h, bias).unwrap_err().to_string(),
        "causal_mixing: needs f32 [b, t, d], [lags, d] and [d], found f32 [2, 5, 4], f32 [7, 3], f32 [4]"
    );
}
