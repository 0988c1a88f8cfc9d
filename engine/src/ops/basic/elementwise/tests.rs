use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::{Elementwise, Expr, GeluKind};
use crate::cpu::{Alone, Pool};
use crate::op::{Builder, Result};
use crate::ops::oracle::{Oracle, Sample, random};
use crate::store::Store;
use crate::value::{Type, Value};

// Functions are within 6e-7, times products of three normal numbers and a gradient.
const TOLERANCE: f32 = 4e-6;

/// Asserts that a function of one value agrees with candle; a second reader adds to its gradient.
fn agrees(
    ours: impl Fn(&mut Builder, Value) -> Result<Value>,
    candle: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
) {
    // One chunk and several, of whole and partial tiles.
    for dims in [&[3, 7][..], &[], &[2, 90, 100]] {
        Oracle::new(&[random(dims, 1)])
            .ours(|b, v| {
                let y = ours(b, v[0])?;
                b.add(y, v[0])
            })
            .candle(|v| candle(&v[0])? + &v[0])
            .agree(TOLERANCE);
    }
}

/// [`agrees`] for functions of two values.
fn both_agree(
    ours: impl Fn(&mut Builder, [Value; 2]) -> Result<Value>,
    candle: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
) {
    for dims in [&[3, 7][..], &[2, 90, 100]] {
        Oracle::new(&[random(dims, 1), random(dims, 2)])
            .ours(|b, v| {
                let y = ours(b, [v[0], v[1]])?;
                let z = ours(b, [v[1], v[0]])?;
                b.add(y, z)
            })
            .candle(|v| candle(&v[0], &v[1])? + candle(&v[1], &v[0])?)
            .agree(TOLERANCE);
    }
    // One value gets both gradients.
    Oracle::new(&[random(&[5, 9], 1)])
        .ours(|b, v| ours(b, [v[0], v[0]]))
        .candle(|v| candle(&v[0], &v[0]))
        .agree(TOLERANCE);
}

fn tanh(b: &mut Builder, x: Value) -> Result<Value> {
    b.elementwise(["tanh", "tanh_grad"], [x], |[x]| x.tanh())
}

#[test]
fn functions_of_one_value_agree_with_candle() {
    agrees(|b, x| b.relu(x), Tensor::relu);
    agrees(|b, x| b.silu(x), Tensor::silu);
    agrees(tanh, Tensor::tanh);
    agrees(
        |b, x| b.elementwise(["exp", "exp_grad"], [x], |[x]| x.exp()),
        Tensor::exp,
    );
    agrees(
        |b, x| b.gelu(x, GeluKind::Exact),
        |x| (x * ((x * FRAC_1_SQRT_2)?.erf()? + 1.0)?)? * 0.5,
    );
    agrees(
        |b, x| b.gelu(x, GeluKind::Tanh),
        |x| {
            let u = ((x + (x.powf(3.0)? * 0.044_715)?)? * FRAC_2_PI.sqrt())?;
            (x * (u.tanh()? + 1.0)?)? * 0.5
        },
    );
}

#[test]
fn functions_of_two_values_agree_with_candle() {
    both_agree(|b, [x, y]| b.add(x, y), |x, y| x + y);
    both_agree(|b, [x, y]| b.mul(x, y), |x, y| x * y);
    both_agree(|b, [x, y]| b.swiglu(x, y), |x, y| x.silu()? * y);
}

#[test]
fn an_expression_agrees_with_candle() {
    both_agree(
        |b, [x, y]| {
            b.elementwise(["e", "e_grad"], [x, y], |[x, y]| {
                (&x - &y) * x.tanh() / (&y * &y + 2.0) - 1.5
            })
        },
        |x, y| (((x - y)? * x.tanh()?)? / (y.sqr()? + 2.0)?)? - 1.5,
    );
}

#[test]
fn a_scalar_scales_all_elements() {
    for dims in [&[3, 7][..], &[2, 90, 100]] {
        Oracle::new(&[random(dims, 1), random(&[], 2)])
            .ours(|b, v| {
                let y = b.scale(v[0], v[1])?;
                b.scale(y, v[1])
            })
            .candle(|v| v[0].broadcast_mul(&v[1])?.broadcast_mul(&v[1]))
            // The scalar's gradient is a sum over all elements, here of up to 18000.
            .agree(2e-5);
    }
    let scalars = [random(&[], 1), random(&[], 2)];
    Oracle::new(&scalars)
        .ours(|b, v| b.scale(v[0], v[1]))
        .candle(|v| &v[0] * &v[1])
        .agree(TOLERANCE);
}

#[test]
fn sums_agree_with_candle() {
    for dims in [&[1][..], &[3, 7], &[150, 131]] {
        let samples = [random(dims, 1), random(dims, 2)];
        Oracle::new(&samples)
            .ours(|b, v| {
                // A second use of each adds to the gradients.
                let twice = b.add(v[1], v[1])?;
                let terms = [
                    (3.0, b.mean(v[0])?),
                    (0.3, b.mean(twice)?),
                    (1.0, b.mse(v[0], v[1])?),
                    (0.5, b.mse(v[0], twice)?),
                    (1e-4, b.sum_squares(v[0])?),
                ];
                b.weighted_sum(&terms)
            })
            .candle(|v| {
                let [x, y] = [&v[0], &v[1]];
                let twice = (y * 2.0)?;
                let means = ((x.mean_all()? * 3.0)? + (twice.mean_all()? * 0.3)?)?;
                let errors = (x - y)?.sqr()?.mean_all()?;
                let errors = (errors + ((x - twice)?.sqr()?.mean_all()? * 0.5)?)?;
                (means + errors)? + (x.sqr()?.sum_all()? * 1e-4)?
            })
            // Candle sums 19650 numbers in f32.
            .agree(1e-5);
    }
}

#[test]
fn a_sum_of_an_expression_scales_with_a_scalar() {
    let samples = [random(&[90, 100], 1), random(&[], 2)];
    Oracle::new(&samples)
        .ours(|b, v| {
            let names = ["cost", "cost_grad"];
            let cost =
                b.elementwise_sum(names, 1e-3, [v[0], v[1]], |[x, s]| (&x * &s).tanh() * x)?;
            b.add(cost, v[1])
        })
        .candle(|v| {
            let x = &v[0];
            let cost = (x.broadcast_mul(&v[1])?.tanh()? * x)?.sum_all()?;
            (cost * 1e-3)? + &v[1]
        })
        // Sums of 9000 numbers.
        .agree(1e-5);
}

#[test]
fn zero_gets_no_gradient_of_relu() {
    let x = Sample {
        dims: vec![3],
        values: vec![-1.0, 0.0, 2.0],
    };
    Oracle::new(&[x])
        .ours(|b, v| b.relu(v[0]))
        // Candle's own relu passes the gradient at 0.
        .candle(|v| &v[0] * v[0].gt(0f32)?.to_dtype(DType::F32)?.detach())
        // Nothing is rounded.
        .agree(0.0);
}

/// The last of a chain of functions of `x`, each the gradient of the one before, at `x`.
fn nth_gradient(order: usize, x: f32, of: impl Fn(&mut Builder, Value) -> Result<Value>) -> f32 {
    let mut b = Builder::new();
    let input = b.input("x", &Type::scalar()).unwrap();
    let mut y = of(&mut b, input).unwrap();
    for _ in 0..order {
        y = b.gradients(y, &[input]).unwrap()[0].unwrap();
    }
    b.output("y", y);
    let (mut executor, mut store) = (Alone::new(&b, Arc::new(Pool::single())), Store::new());
    executor.input("x")[0] = x;
    executor.run(&mut store);
    executor.output("y", &store)[0]
}

#[test]
fn gradients_have_gradients() {
    type Of = fn(&mut Builder, Value) -> Result<Value>;
    let functions: [Of; 5] = [
        |b, x| b.gelu(x, GeluKind::Exact),
        |b, x| b.gelu(x, GeluKind::Tanh),
        |b, x| b.silu(x),
        tanh,
        |b, x| b.swiglu(x, x),
    ];
    for of in functions {
        for x in [-1.5f32, -0.2, 0.7, 2.0] {
            // Central differences: error h^2 / 6 of the third derivative of the slope, and rounding
            // / h.
            let h = 1e-2;
            let [above, below] = [x + h, x - h].map(|x| nth_gradient(1, x, of));
            let (difference, found) = ((above - below) / (2.0 * h), nth_gradient(2, x, of));
            assert!(
                (difference - found).abs() < 5e-4,
                "{x}: {difference} {found}"
            );
        }
    }
}

#[test]
fn relu_keeps_only_its_result() {
    let mut b = Builder::new();
    let x = b.input("x", &Type::f32(&[2, 3])).unwrap();
    let y = b.relu(x).unwrap();
    let loss = b.sum_squares(y).unwrap();
    b.gradients(loss, &[x]).unwrap();
    let last = b.nodes.last().unwrap();
    assert_eq!((last.op.name(), last.inputs[0]), ("relu_grad", y));
    assert!(!last.inputs.contains(&x));
}

#[test]
fn a_constant_passes_no_gradient_on() {
    let mut b = Builder::new();
    let [x, factor] = ["x", "factor"].map(|name| {
        let dims: &[usize] = if name == "x" { &[2, 3] } else { &[] };
        b.input(name, &Type::f32(dims)).unwrap()
    });
    let double = |[x, factor]: [Expr; 2]| x * factor;
    let constant = b
        .elementwise_constant("double", [x, factor], double)
        .unwrap();
    // The same expression, through which a gradient passes, is another value.
    let passing = b.elementwise(["double"; 2], [x, factor], double).unwrap();
    assert_ne!(constant, passing);
    let both = b.add(constant, passing).unwrap();
    let loss = b.sum_squares(both).unwrap();
    let constant = b.gradients(loss, &[constant, x]).unwrap();
    b.output("gradient", constant[1].unwrap());
    let (mut executor, mut store) = (Alone::new(&b, Arc::new(Pool::single())), Store::new());
    executor.input("x").fill(1.0);
    executor.input("factor").fill(2.0);
    executor.run(&mut store);
    // By hand: d/dx of (c + 2 x)^2 at c = 2, x = 1.
    assert_eq!(executor.output("gradient", &store), [16.0; 6]);
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let mut b = Builder::new();
    let [x, other] = [("x", [2, 3]), ("other", [2, 4])]
        .map(|(name, dims)| b.input(name, &Type::f32(&dims)).unwrap());
    let ids = b.input("ids", &Type::u32(&[2, 3])).unwrap();
    let nothing = b.input("nothing", &Type::f32(&[2, 0])).unwrap();
    let refused = |found: Result<Value>| found.unwrap_err().to_string();
    for (found, expected) in [
        (b.add(x, other), "add: f32 [2, 3] and f32 [2, 4] differ"),
        (b.mul(x, other), "mul: f32 [2, 3] and f32 [2, 4] differ"),
        (
            b.swiglu(x, other),
            "swiglu: f32 [2, 3] and f32 [2, 4] differ",
        ),
        (
            b.mse(x, other),
            "mse: prediction f32 [2, 3] and target f32 [2, 4] differ",
        ),
        (b.mean(nothing), "mean: f32 [2, 0] has no element"),
        (b.relu(ids), "relu: needs f32, found u32 [2, 3]"),
        (
            b.scale(x, other),
            "scale: the factor must be a scalar, found f32 [2, 4]",
        ),
        (b.op1(Elementwise::sum(0), &[]), "add: there are no values"),
    ] {
        assert_eq!(refused(found), expected);
    }
    let wide = |x: Expr| {
        // Each constant takes a register.
        let terms: Vec<Expr> = (0..40u8)
            .map(|n| (&x * (2.0 + f32::from(n))).exp())
            .collect();
        terms
            .into_iter()
            .rev()
            .reduce(|sum, term| sum + term)
            .unwrap()
    };
    let error = refused(b.elementwise(["wide", "wide_grad"], [x], |[x]| wide(x)));
    let start = "wide: needs more than 32 numbers at once: ";
    assert!(error.starts_with(start), "{error}");
}
