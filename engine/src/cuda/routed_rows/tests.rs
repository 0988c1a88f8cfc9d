use spd_draws::{Purpose, Stream};

use super::*;
use crate::cuda::program::Program;
use crate::cuda::tests::{agree, replay};
use crate::derivation::SiteInputs;
use crate::op::Builder;
use crate::ops::oracle::random;
use crate::ops::{Draw, Mask, MaskValues};
use crate::step_parameters::StepParameters;
use crate::store::Store;

/// Enough rows that a route of half of them has room for fewer.
const ROWS: usize = 600;

/// Two sites of a residual stream, each with a subset of the rows, and the gradients of all that
/// they read but frozen weights. With `associates`, the second reads the components of the first;
/// `beside` each other, both read what precedes them, with so many frozen weights, and neither deltas
/// nor biases are trained.
fn program(c: usize, associates: bool, beside: Option<usize>) -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    if associates {
        b.associate();
    }
    let d = if associates { 30 } else { 8 };
    let mut frozen = |dims: &[usize], seed: u64| {
        let slot = store.add(format!("{dims:?} {seed}"), dims, random(dims, seed).values);
        b.persistent(&store, slot)
    };
    let weights = [3, 4].map(|seed| frozen(&[d, d], seed));
    let bias = frozen(&[d], 3);
    let mut leaves = Vec::new();
    let mut leaf = |b: &mut Builder, dims: &[usize]| {
        let name = format!("leaf {}", leaves.len());
        let slot = store.add(&name, dims, random(dims, leaves.len() as u64).values);
        leaves.push(b.persistent(&store, slot));
        leaves[leaves.len() - 1]
    };
    let (x, first) = (leaf(&mut b, &[ROWS, 3]), leaf(&mut b, &[3, d]));
    let before = b.matmul(x, first).unwrap();
    let mut stream = before;
    let routes = Stream::new(Purpose::Routing, 0, 0);
    let routes = b.uniform_subsets(routes, ROWS, 2).unwrap();
    let route = Stream::new(Purpose::Routing, 0, 1);
    let route = b.bernoulli(route, ROWS, 0.3).unwrap();
    for (site, route) in (0..).zip([routes[0], route]) {
        let (v, u) = (leaf(&mut b, &[d, c]), leaf(&mut b, &[c, d]));
        let (delta, bias) = if beside.is_some() {
            let delta = Stream::new(Purpose::Delta, 0, site);
            (b.uniform_rows(delta, ROWS).unwrap(), bias)
        } else {
            (leaf(&mut b, &[ROWS]), leaf(&mut b, &[d]))
        };
        let masks = MaskValues {
            mask: Mask::Between(Draw::Uniform(Stream::new(Purpose::Source, 1, site))),
            importance: Some(leaf(&mut b, &[ROWS, c])),
            given: None,
            delta: Some(delta),
            route: Some(route),
        };
        let x = if beside.is_some() { before } else { stream };
        let weight = weights[if beside == Some(1) { 0 } else { site as usize }];
        let a = b.routed_matmul(x, v, route).unwrap();
        let h = b.masked(a, &masks).unwrap();
        let bias = Some(bias);
        let with = SiteInputs {
            clean: Some(b.linear_oi(x, weight, bias).unwrap()),
            bias,
            delta: masks.delta,
            route: Some(route),
        };
        let site = b.site_output(h, u, &with).unwrap();
        stream = b.add(stream, site).unwrap();
    }
    let last = leaf(&mut b, &[d, 2]);
    let y = b.matmul(stream, last).unwrap();
    b.output("y", y);
    let loss = b.sum_squares(y).unwrap();
    let loss = b.weighted_sum(&[(1e-3, loss)]).unwrap();
    let gradients = b.gradients(loss, &leaves).unwrap();
    for (index, gradient) in gradients.into_iter().enumerate() {
        b.output(format!("gradient {index}"), gradient.unwrap());
    }
    (b, store)
}

/// The rows of all compacted matrices that products read.
fn rooms(b: &Builder) -> Vec<usize> {
    let lists = b.nodes.iter().filter(|node| node.op.is::<RoutedRows>());
    let len = |value: Value| b.ty(value).len();
    lists
        .map(|node| len(node.outputs[0]) - len(node.inputs[0]))
        .collect()
}

// Sums of up to 600 products of numbers of the size of 10, in another order.
#[test]
fn sites_with_room_for_fewer_rows_agree_with_the_cpu() {
    let cases = [
        (12, false, None),
        (12, false, Some(2)),
        (5, false, Some(1)),
        (4, true, None),
    ];
    for (c, associates, beside) in cases {
        let (b, store) = program(c, associates, beside);
        // 600 * 3 / 4 + 5 * 24.5 = 572.5, and 600 * 0.3 + 122.5 = 302.5, in whole tiles of 64.
        assert_eq!(rooms(&on_device(&b)), [576, 320]);
        agree(&b, &store, &[], &StepParameters::default(), 2e-5);
    }
}

#[test]
fn a_product_and_its_gradient_share_gathered_rows() {
    let (b, _) = program(12, false, None);
    let b = on_device(&b);
    let gathered = b.nodes.iter().filter(|node| node.op.is::<Gather>());
    // At each site the rows of the stream, and those of the output's gradient.
    assert_eq!(gathered.count(), 4);
    assert!(!b.nodes.iter().any(|node| node.op.is::<RoutedMatMul>()));
}

#[test]
fn shares_of_clean_paths_are_taken_where_rows_are_spread() {
    use Clean::{Read, Replaced};
    // Outputs of two sites, then gradients of what they read. The gradient of a trained delta reads
    // the clean output, and that of a trained bias reads its share of the output's.
    let trained = (4, vec![Some(Read), Some(Read), None, None]);
    let frozen = (
        0,
        vec![Some(Replaced), Some(Replaced), Some(Replaced), Some(Read)],
    );
    for (beside, expected) in [(None, trained), (Some(2), frozen)] {
        let b = on_device(&program(12, false, beside).0);
        let shares = b.nodes.iter().filter(|node| node.op.is::<Share>()).count();
        let spreads = b.nodes.iter().filter_map(|node| node.op.get::<Spread>());
        let spreads: Vec<Option<Clean>> = spreads.map(|op| op.clean).collect();
        assert_eq!((shares, spreads), expected);
    }
}

#[test]
fn a_routed_row_without_room_is_nan() {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let slot = store.add("x", &[ROWS, 3], vec![1.0; 3 * ROWS]);
    let x = b.persistent(&store, slot);
    let route = Stream::new(Purpose::Routing, 0, 0);
    let route = b.bernoulli(route, ROWS, 0.3).unwrap();
    let rows = b.compact_rows(x, route).unwrap();
    let with = SiteInputs {
        clean: Some(x),
        route: Some(route),
        ..SiteInputs::default()
    };
    let slot = store.add("u", &[3, 3], vec![1.0; 9]);
    let u = b.persistent(&store, slot);
    let y = b.site_output(rows, u, &with).unwrap();
    b.output("route", route);
    b.output("y", y);
    let small = Program::of(&compacted_by(&b, |_, _| 64));
    let Some((_, found)) = replay(small, &store, &[], &StepParameters::default()) else {
        return;
    };
    let (route, y) = (&found[0].1, &found[1].1);
    let mut routed = 0;
    for (row, route) in y.chunks(3).zip(route) {
        routed += usize::from(*route != 0.0);
        match (*route != 0.0, routed > 64) {
            (true, true) => assert!(row.iter().all(|y| y.is_nan()), "{row:?}"),
            (true, false) => assert_eq!(row, [3.0; 3]),
            (false, _) => assert_eq!(row, [1.0; 3]),
        }
    }
    assert!(routed > 64, "{routed}");
}

// By hand, and Hoeffding's bound of exp(-2 * 4^2) for a row more.
#[test]
fn there_is_room_for_more_rows_than_are_routed() {
    assert_eq!(room(32_768, 29.0 / 56.0), 17_728);
    assert_eq!(room(256, 0.5), 192);
    assert_eq!(room(40_000, 1.0), 40_000);
    assert_eq!(room(0, 0.5), 0);
}
