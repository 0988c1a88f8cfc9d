use candle_core::Tensor;

use crate::op::Builder;
use crate::ops::oracle::{Oracle, random};
use crate::value::{Type, Value};

const LAYER_EPS: f32 = 1e-5;
const RMS_EPS: f32 = 1e-2;

/// Both norms, of `x`, a weight and, the first, a bias.
type Ours = fn(&mut Builder, &[Value]) -> crate::Result<Value>;
type Theirs = fn(&[Tensor]) -> candle_core::Result<Tensor>;

const NORMS: [(usize, Ours, Theirs); 2] = [
    (3, |b, v| b.layer_norm(v[0], v[1], v[2], LAYER_EPS), layer),
    (2, |b, v| b.rms_norm(v[0], v[1], RMS_EPS), rms),
];

fn layer(v: &[Tensor]) -> candle_core::Result<Tensor> {
    let last = v[0].rank() - 1;
    let centred = v[0].broadcast_sub(&v[0].mean_keepdim(last)?)?;
    let variance = centred.sqr()?.mean_keepdim(last)?;
    let normal = centred.broadcast_div(&(variance + f64::from(LAYER_EPS))?.sqrt()?)?;
    normal.broadcast_mul(&v[1])?.broadcast_add(&v[2])
}

fn rms(v: &[Tensor]) -> candle_core::Result<Tensor> {
    let square = v[0].sqr()?.mean_keepdim(v[0].rank() - 1)?;
    let normal = v[0].broadcast_div(&(square + f64::from(RMS_EPS))?.sqrt()?)?;
    normal.broadcast_mul(&v[1])
}

#[test]
fn values_and_gradients_agree_with_candle() {
    for (count, ours, theirs) in NORMS {
        // One row, short rows, and rows in several chunks; on a GPU also rows of one thread, of part
        // of a warp, of a warp and of several, with one vector or more for each thread.
        let of_gpu = [[130, 8], [5, 120], [3, 768], [3, 2056]];
        let of_gpu = of_gpu.iter().map(|dims| &dims[..]);
        for dims in [&[1, 5][..], &[2, 3, 33], &[700, 100]]
            .into_iter()
            .chain(of_gpu)
        {
            let d = dims[dims.len() - 1];
            let samples = [random(dims, 1), random(&[d], 2), random(&[d], 3)];
            // Means of up to 2056 numbers, and sums over 700 rows in the parameters' gradients.
            Oracle::new(&samples[..count])
                .ours(ours)
                .candle(theirs)
                .agree(1e-5);
        }
    }
}

#[test]
fn a_second_use_adds_to_the_gradients() {
    for (count, ours, theirs) in NORMS {
        let samples = [random(&[4, 9], 1), random(&[9], 2), random(&[9], 3)];
        Oracle::new(&samples[..count])
            .ours(|b, v| {
                let y = ours(b, v)?;
                let y = b.add(y, v[0])?;
                ours(b, &[&[y], &v[1..]].concat())
            })
            .candle(|v| {
                let y = (theirs(v)? + &v[0])?;
                theirs(&[&[y], &v[1..]].concat())
            })
            // As above, twice.
            .agree(1e-5);
    }
}

#[test]
fn a_row_of_zeros_stays_zero() {
    let mut zeros = random(&[2, 7], 1);
    zeros.values.fill(0.0);
    Oracle::new(&[zeros, random(&[7], 2)])
        .ours(NORMS[1].1)
        .candle(rms)
        // The gradient is w / sqrt(eps).
        .agree(1e-6);
}

#[test]
fn a_weight_of_another_length_is_refused() {
    let mut b = Builder::new();
    let x = b.input("x", &Type::f32(&[2, 3])).unwrap();
    let w = b.input("w", &Type::f32(&[4])).unwrap();
    for (name, (_, ours, _)) in ["layer_norm", "rms_norm"].into_iter().zip(NORMS) {
        assert_eq!(
            ours(&mut b, &[x, w, w]).unwrap_err().to_string(),
            format!("{name}: weight is f32 [4], not [3] as for f32 [2, 3]")
        );
    }
}
