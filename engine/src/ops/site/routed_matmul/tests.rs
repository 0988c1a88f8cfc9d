use candle_core::{Device, Tensor};
use spd_draws::{Purpose, Stream};

use super::*;
use crate::derivation::SiteInputs;
use crate::ops::oracle::{Oracle, Sample, random};
use crate::ops::{Draw, Mask, MaskValues};

const D_IN: usize = 6;
const D_OUT: usize = 5;

/// The draws of all positions.
fn drawn(stream: Stream, rows: usize, c: usize) -> Tensor {
    let mut values = vec![0.0; rows * c];
    for (row, out) in (0u32..).zip(values.chunks_mut(c)) {
        stream.fill_uniform(0, 0, row, out);
    }
    Tensor::from_vec(values, (rows, c), &Device::Cpu).unwrap()
}

/// A masked site with routed positions, against the reference's formula: the weight delta is
/// formed, and all positions pass through the components. Gradients of the input, `V`, `U`,
/// importances, delta and given draws.
fn agree(routes: &[f32], c: usize, mask: Mask, [given, delta]: [&[usize]; 2], tolerance: f32) {
    let rows = routes.len();
    let route = Sample {
        dims: vec![rows],
        values: routes.to_vec(),
    };
    let point = [
        random(&[rows, D_IN], 1),
        random(&[D_IN, c], 2),
        random(&[c, D_OUT], 3),
        random(&[D_OUT, D_IN], 4),
        random(&[D_OUT], 5),
        random(&[rows, c], 6),
        random(given, 7),
        random(delta, 8),
        route,
    ];
    // Roundings on the way back to x: x, V, x V, masked activations, U, W, G, U G, its mask, that
    // V, its share of the clean output, and the sum. A delta that all rows share sums terms that
    // partly cancel (seen: 14.1).
    let oracle = Oracle::new(&point).roundings(16.0);
    let oracle = oracle.constant(3).constant(4).constant(8);
    let oracle = match mask {
        Mask::Between(Draw::Given) => oracle,
        Mask::Drawn(Draw::Given) => oracle.constant(5),
        _ => oracle.constant(6),
    };
    oracle
        .ours(|b, v| {
            let masks = MaskValues {
                mask,
                importance: Some(v[5]),
                given: Some(v[6]),
                delta: Some(v[7]),
                route: Some(v[8]),
            };
            let with = SiteInputs {
                clean: Some(b.linear_oi(v[0], v[3], Some(v[4]))?),
                bias: Some(v[4]),
                delta: Some(v[7]),
                route: Some(v[8]),
            };
            let a = b.routed_matmul(v[0], v[1], v[8])?;
            let h = b.masked(a, &masks)?;
            b.site_output(h, v[2], &with)
        })
        .candle(|v| {
            let [x, v_ic, u_co, w_oi, bias, g, given, delta, route] = v else {
                unreachable!("nine values")
            };
            let m = match mask {
                Mask::Importance => g.clone(),
                Mask::Drawn(_) => given.broadcast_as((rows, c))?,
                Mask::Between(Draw::Uniform(stream)) => {
                    (g + (1.0 - g)?.mul(&drawn(stream, rows, c))?)?
                }
                _ => (g + (1.0 - g)?.broadcast_mul(given)?)?,
            };
            let weight_delta = (w_oi - v_ic.matmul(u_co)?.t()?)?;
            let (delta, route) = (delta.unsqueeze(1)?, route.unsqueeze(1)?);
            let inside = x.matmul(v_ic)?.mul(&m)?.matmul(u_co)?;
            let inside = (inside + x.matmul(&weight_delta.t()?)?.broadcast_mul(&delta)?)?;
            let outside = x.matmul(&w_oi.t()?)?.broadcast_mul(&(1.0 - &route)?)?;
            (inside.broadcast_mul(&route)? + outside)?.broadcast_add(bias)
        })
        .agree(tolerance);
}

// Sums of some tens of products of normal numbers.
const TOLERANCE: f32 = 6e-6;

#[test]
fn a_routed_site_agrees_with_the_formula_of_the_reference() {
    let (rows, c) = (7, 9);
    let some = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0];
    for routes in [some, [1.0; 7]] {
        let of_each: [&[usize]; 2] = [&[rows, c], &[rows]];
        agree(&routes, c, Mask::Importance, of_each, TOLERANCE);
        for mask in [Mask::Between(Draw::Given), Mask::Drawn(Draw::Given)] {
            agree(&routes, c, mask, of_each, TOLERANCE);
            agree(&routes, c, mask, [&[c], &[1]], TOLERANCE);
        }
    }
}

// Rows longer than a tile, more than one chunk of them; sums of a thousand products.
#[test]
fn many_positions_and_components_agree_with_the_formula() {
    let routes: Vec<f32> = (0..150)
        .map(|row| f32::from(row % 5 < 2 && row != 7))
        .collect();
    let tolerance = 1e-5;
    let between = Mask::Between(Draw::Given);
    let uniform = Mask::Between(Draw::Uniform(Stream::new(Purpose::Source, 1, 2)));
    for c in [37, 1100] {
        let shared: [&[usize]; 2] = [&[c], &[150]];
        agree(&routes, c, uniform, shared, tolerance);
        agree(&routes, c, between, shared, tolerance);
    }
    agree(
        &routes,
        1100,
        Mask::Importance,
        [&[1100], &[150]],
        tolerance,
    );
    agree(&routes, 1100, between, [&[150, 1100], &[150]], tolerance);
    agree(&routes, 1100, between, [&[1100], &[1]], tolerance);
}

#[test]
fn a_site_without_routed_positions_is_the_frozen_layer() {
    let (rows, c) = (4, 3);
    agree(&[0.0; 4], c, Mask::Importance, [&[c], &[rows]], TOLERANCE);
    agree(
        &[0.0; 4],
        c,
        Mask::Between(Draw::Given),
        [&[c], &[1]],
        TOLERANCE,
    );
}

// The same input twice: the second product's gradients are added to those of the first.
#[test]
fn a_second_use_adds_to_the_gradients() {
    let route = Sample {
        dims: vec![4],
        values: vec![0.0, 1.0, 1.0, 0.0],
    };
    let [x, v, u] = [random(&[4, 3], 1), random(&[3, 6], 2), random(&[6, 2], 3)];
    let rows = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
    Oracle::new(&[x, v, u, route])
        .constant(3)
        .ours(|b, v| {
            let clean = b.matmul(v[0], v[1])?;
            let clean = b.matmul(clean, v[2])?;
            let with = SiteInputs {
                clean: Some(clean),
                route: Some(v[3]),
                ..SiteInputs::default()
            };
            let a = b.routed_matmul(v[0], v[1], v[3])?;
            let twice = b.add(a, a)?;
            b.site_output(twice, v[2], &with)
        })
        .candle(|v| {
            let y = v[0].matmul(&v[1])?.matmul(&v[2])?;
            let some = y.index_select(&rows, 0)?;
            y.index_add(&rows, &some, 0)
        })
        .agree(TOLERANCE);
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let mut b = Builder::new();
    let [x, w, route] = [("x", &[4, 3][..]), ("w", &[3, 6]), ("route", &[5])]
        .map(|(name, dims)| b.input(name, &Type::f32(dims)).unwrap());
    assert_eq!(
        b.routed_matmul(x, w, route).map_err(|error| error.to_string()),
        Err(
            "routed_matmul: f32 [4, 3], f32 [3, 6] and routes f32 [5] do not fit (Rows { transposed: false })"
                .to_owned()
        )
    );
    assert_eq!(
        b.compact_rows(x, route).map_err(|error| error.to_string()),
        Err("compact_rows: needs a route for each row, found f32 [4, 3] and f32 [5]".to_owned())
    );
}

// `[40, 30]` is wide enough that the input is not made: the product is computed from the input's
// factors. Its bias is added to all rows, of which the routed ones are compacted afterwards.
#[test]
fn a_routed_product_goes_through_its_input() {
    for bias in [false, true] {
        goes_through(bias);
    }
}

fn goes_through(bias: bool) {
    let route = Sample {
        dims: vec![40],
        values: (0..40).map(|row| f32::from(row % 3 == 1)).collect(),
    };
    let point = [
        random(&[40, 3], 1),
        random(&[3, 30], 2),
        random(&[30, 5], 3),
        random(&[5, 4], 4),
        random(&[40, 4], 5),
        route,
        random(&[30], 6),
    ];
    let oracle = Oracle::new(&point).constant(5);
    let oracle = if bias { oracle } else { oracle.constant(6) };
    oracle
        .ours(|b, v| {
            b.associate();
            let wide = b.linear_io(v[0], v[1], bias.then_some(v[6]))?;
            let before = b.nodes.len();
            let a = b.routed_matmul(wide, v[2], v[5])?;
            let added = b.nodes[before..].iter().map(|node| node.op.name());
            let expected: &[&str] = if bias {
                &["matmul", "matmul", "matmul", "compact_rows"]
            } else {
                &["matmul", "routed_matmul"]
            };
            assert_eq!(added.collect::<Vec<_>>(), expected);
            let with = SiteInputs {
                clean: Some(v[4]),
                route: Some(v[5]),
                ..SiteInputs::default()
            };
            b.site_output(a, v[3], &with)
        })
        .candle(|v| {
            let mut wide = v[0].matmul(&v[1])?;
            if bias {
                wide = wide.broadcast_add(&v[6])?;
            }
            let own = wide.matmul(&v[2])?.matmul(&v[3])?;
            let route = v[5].unsqueeze(1)?;
            own.broadcast_mul(&route)? + v[4].broadcast_mul(&(1.0 - &route)?)?
        })
        // Sums of 30 products of sums of 3, of numbers below 4, and of 5 of these.
        .agree(2e-5);
}
