use candle_core::{DType, Device, Tensor};

use crate::op::Builder;
use crate::ops::oracle::{Oracle, Sample, random};
use crate::value::Type;

fn reference(phi: &Tensor) -> candle_core::Result<Tensor> {
    let (_, _, k) = phi.dims3()?;
    let q = phi.broadcast_div(&phi.sqr()?.sum_keepdim(1)?.sqrt()?)?;
    let gram = q.t()?.contiguous()?.matmul(&q)?;
    let rest = gram.broadcast_sub(&Tensor::eye(k, DType::F32, &Device::Cpu)?)?;
    rest.sqr()?.mean_all()
}

#[test]
fn penalties_agree_with_candle() {
    for dims in [[2, 5, 4], [3, 1, 3], [1, 7, 1], [2, 40, 33]] {
        Oracle::new(&[random(&dims, 1)])
            .ours(|b, v| {
                let penalty = b.gram_penalty(v[0])?;
                // Another use of the basis.
                let squares = b.sum_squares(v[0])?;
                b.weighted_sum(&[(1.0, penalty), (0.01, squares)])
            })
            .candle(|v| reference(&v[0])? + (v[0].sqr()?.sum_all()? * 0.01)?)
            // Sums of 40 products, divided by norms.
            .agree(2e-6);
    }
}

// S3 to S5: 0 and `1 - 1 / k`.
#[test]
fn orthogonal_and_equal_columns_have_the_least_and_the_largest_penalty() {
    let sample = |of: fn(usize, usize) -> f32| Sample {
        dims: vec![1, 9, 4],
        values: (0..36).map(|at| of(at / 4, at % 4)).collect(),
    };
    for (sample, expected) in [
        (sample(|t, k| if t % 4 == k { 0.7 } else { 0.0 }), 0.0),
        (sample(|t, _| 1.0 + t as f32), 0.75),
    ] {
        Oracle::new(&[sample])
            .ours(|b, v| b.gram_penalty(v[0]))
            // The gradients of both are 0.
            .candle(|v| {
                let sum = v[0].sum_all()?;
                (&sum - &sum)? + expected
            })
            .agree(1e-6);
    }
}

#[test]
fn a_basis_has_three_dimensions() {
    let mut b = Builder::new();
    let x = b.input("x", &Type::f32(&[4, 5])).unwrap();
    assert_eq!(
        b.gram_penalty(x).unwrap_err().to_string(),
        "gram_penalty: needs f32 [b, t, k], found f32 [4, 5]"
    );
}
