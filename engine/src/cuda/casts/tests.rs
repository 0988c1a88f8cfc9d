use std::collections::BTreeSet;

use half::bf16;

use super::*;
use crate::cuda::every_op::{EVEN, EveryOp, LARGE, RAGGED};
use crate::cuda::program::Program;
use crate::cuda::routed_rows::on_device;
use crate::cuda::tests::{numbers, replay};
use crate::ops::oracle::random;
use crate::ops::{AdamW, AdamWOperands, MatMul};
use crate::rounding::precision_of_products;
use crate::step_parameters::StepParameters;
use crate::store::Store;

/// Every bf16, a number between it and the next, and the halfway point.
fn floats() -> Vec<u32> {
    let around = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let floats = (0..=u32::from(u16::MAX)).flat_map(|high| around.map(|low| high << 16 | low));
    floats.collect()
}

#[test]
fn a_device_rounds_as_the_host_does() {
    let all = floats();
    // By fours, and one by one.
    for len in [all.len(), all.len() - 1] {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[len])).unwrap();
        let mut b = on_device(&b);
        let rounded = cast(&mut b, x, DType::Bf16, "");
        let y = cast(&mut b, rounded, DType::F32, "");
        b.output("y", y);
        let inputs = [("x", all[..len].to_vec())];
        let numbers = StepParameters::default();
        let Some((_, found)) = replay(Program::of(&b), &Store::new(), &inputs, &numbers) else {
            return;
        };
        for (&bits, found) in all.iter().zip(&found[0].1) {
            let expected = bf16::from_f32(f32::from_bits(bits)).to_f32();
            let same = found.to_bits() == expected.to_bits();
            assert!(same || found.is_nan() && expected.is_nan(), "{bits:#x}");
        }
    }
}

/// Names of ops with a bf16 first result.
fn rounded(b: &Builder) -> BTreeSet<&'static str> {
    let first = |node: &Node| node.outputs.first().map(|&output| b.ty(output).dtype);
    let nodes = b.nodes.iter();
    let nodes = nodes.filter(|node| first(node) == Some(DType::Bf16));
    nodes.map(|node| node.op.name()).collect()
}

#[test]
fn activations_and_their_gradients_are_bf16_and_control_values_are_f32() {
    let b = stored(&EveryOp::new(EVEN, false).b);
    let expected = [
        "add",
        "add_positions",
        "additive_attention_grad",
        "attention",
        "attention_grad",
        "cast",
        "causal_mixing",
        "causal_mixing_grad",
        "columns_grad",
        "component_mlp",
        "component_mlp_grad",
        "concatenate",
        "cross_entropy_grad",
        "embed",
        "exp",
        "exp_grad",
        "gather_rows",
        "gelu",
        "gelu_grad",
        "head_divergence_grad",
        "importance_gates",
        "importance_gates_grad",
        "kl_divergence_grad",
        "layer_norm",
        "layer_norm_grad",
        "linear_attention",
        "masked",
        "masked_grad",
        "matmul",
        "mean_grad",
        "mse_grad",
        "mul",
        "mul_grad",
        "parallel_linear",
        "parallel_linear_input_grad",
        "reaction",
        "reaction_grad",
        "relu",
        "relu_grad",
        "reshape",
        "rms_norm",
        "rms_norm_grad",
        "scale",
        "scale_grad",
        "silu",
        "silu_grad",
        "site_output",
        "site_output_bias_grad",
        "site_share",
        "slice",
        "softmax",
        "softmax_grad",
        "spread_rows",
        "sum_squares_grad",
        "swiglu",
        "swiglu_grad",
        "tanh",
        "tanh_grad",
        "transpose",
    ];
    assert_eq!(rounded(&b).into_iter().collect::<Vec<_>>(), expected);
    for node in &b.nodes {
        let types = node.inputs.iter().map(|&input| b.ty(input).dtype);
        let types: Vec<DType> = types.collect();
        match node.op.name() {
            "adamw" | "gradient_norm" | "halt" | "ascend" => {
                let all = types.iter().all(|dtype| *dtype == DType::F32);
                assert!(all, "{} reads {types:?}", node.op.name());
            }
            "matmul" | "site_output" => assert_eq!(types[0], types[1]),
            _ => {}
        }
        for (output, into) in node.outputs.iter().zip(&node.into) {
            if let Some(into) = *into {
                assert_eq!(b.ty(*output), b.ty(into), "{}", node.op.name());
            }
        }
    }
    for (name, output) in &b.outputs {
        assert_eq!(b.ty(*output).dtype, DType::F32, "{name}");
    }
}

const PRODUCT: MatMul = MatMul::stored(false, false);

/// `x V U` and `x W`, some with routes, and the weight delta `V U - W`, with an update of `V` and
/// `U`; `W` may be frozen.
fn site(freeze: bool) -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let mut kept = |name: &str, dims: &[usize], frozen: bool| {
        let slot = store.add(name, dims, random(dims, 1).values);
        if frozen {
            store.freeze(slot);
        }
        b.persistent(&store, slot)
    };
    let (v, u, w) = (
        kept("v", &[8, 12], false),
        kept("u", &[12, 8], false),
        kept("w", &[8, 8], freeze),
    );
    let moments = ["mv", "mu", "sv", "su"].map(|name| {
        let dims = if name.ends_with('v') {
            [8, 12]
        } else {
            [12, 8]
        };
        kept(name, &dims, false)
    });
    let x = b.input("x", &Type::f32(&[6, 8])).unwrap();
    let a = b.matmul(x, v).unwrap();
    let y = b.matmul(a, u).unwrap();
    let clean = b.matmul(x, w).unwrap();
    let error = b.mse(y, clean).unwrap();
    let whole = b.op1(PRODUCT, &[v, u]).unwrap();
    let faithfulness = b.mse(whole, w).unwrap();
    let loss = b
        .weighted_sum(&[(1.0, error), (1e3, faithfulness)])
        .unwrap();
    b.output("loss", loss);
    let gradients = b.gradients(loss, &[v, u]).unwrap();
    let gradients = gradients.into_iter().map(Option::unwrap);
    let gradients: Vec<Value> = gradients.collect();
    let group = b.gradient_norm(&gradients).unwrap();
    let op = AdamW::new(&mut b);
    let on = [v, u].into_iter().enumerate();
    let on = on.map(|(index, parameter)| AdamWOperands {
        parameter,
        first: moments[index],
        second: moments[2 + index],
        gradient: gradients[index],
    });
    let on: Vec<AdamWOperands> = on.collect();
    b.adamw(op, &on, group, &[]).unwrap();
    (b, store)
}

/// Number of operands of each of the casts.
fn casts(b: &Builder) -> Vec<usize> {
    let casts = b.nodes.iter().filter(|node| node.op.name() == "cast");
    casts.map(|node| node.inputs.len()).collect()
}

#[test]
fn weights_are_rounded_once_together_and_frozen_ones_never() {
    // V, U and W, and the batch; each is read more than once.
    assert_eq!(casts(&stored(&site(false).0)), [3, 1]);
    let (b, _) = site(true);
    let b = stored(&b);
    assert_eq!(casts(&b), [2, 1]);
    let frozen = b.frozen.first().copied().unwrap();
    let homes = b.homes.iter().zip(&b.types);
    let kept = homes.filter(|(home, _)| **home == Home::Persistent(frozen));
    let kept: Vec<DType> = kept.map(|(_, ty)| ty.dtype).collect();
    assert_eq!(kept, [DType::F32, DType::Bf16]);
}

#[test]
fn a_weight_that_no_result_needs_is_not_rounded_with_the_others() {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let [old, w, v] = ["old", "w", "v"].map(|name| {
        let slot = store.add(name, &[8, 8], random(&[8, 8], 3).values);
        b.persistent(&store, slot)
    });
    let x = b.input("x", &Type::f32(&[6, 8])).unwrap();
    let (a, c) = (b.matmul(x, w).unwrap(), b.matmul(x, v).unwrap());
    // Nothing needs this product: its own cast does not run.
    b.matmul(x, old).unwrap();
    b.output("a", a);
    b.output("c", c);
    assert_eq!(casts(&stored(&b)), [2, 1, 1]);
}

#[test]
fn values_of_weights_alone_are_f32() {
    let (from, _) = site(true);
    let b = stored(&from);
    // V U, and its gradients through the delta; the other products depend on the batch.
    let full = |node: &&Node| b.ty(node.inputs[0]).dtype == DType::F32;
    let products = b.nodes.iter().filter(|node| node.op.name() == "matmul");
    let (full, rounded): (Vec<&Node>, Vec<&Node>) = products.partition(full);
    assert_eq!((full.len(), rounded.len()), (3, 6));
    for node in full {
        assert_eq!(b.ty(node.inputs[1]).dtype, DType::F32);
        assert_eq!(b.ty(node.outputs[0]).dtype, DType::F32);
    }
    // One gradient adds up both kinds.
    let added = rounded
        .iter()
        .filter(|node| node.into.iter().any(Option::is_some));
    assert!(added.clone().count() == 2, "{}", added.count());
}

// A CPU rounds exactly the factors that a device takes in bf16.
#[test]
fn a_cpu_rounds_the_factors_that_a_device_does() {
    let every_op = EveryOp::new(EVEN, false).b;
    for mut b in [site(false).0, site(true).0, every_op] {
        b.precision = Precision::Bf16;
        let is_product = |node: &&Node| node.op.formats()[0].contains(&Factor);
        let of_device = stored(&b);
        let of_device = of_device.nodes.iter().filter(is_product).map(|node| {
            let factor = operands(node).find(|&(_, format)| format == Factor);
            let (factor, _) = factor.expect("a factor");
            of_device.ty(factor).dtype == DType::Bf16
        });
        let all = b.nodes.iter().zip(precision_of_products(&b));
        let of_processor = all.filter(|(node, _)| is_product(node));
        let rounds = of_processor.map(|(_, precision)| precision == Precision::Bf16);
        let rounds: Vec<bool> = rounds.collect();
        assert_eq!(rounds, of_device.collect::<Vec<_>>());
        assert!(rounds.contains(&true));
        b.precision = Precision::F32;
        assert!(!precision_of_products(&b).contains(&Precision::Bf16));
    }
}

// `x F W` as `x (F W)`: `F W` is rounded as `x F` and its product with `W` would be. The delta
// `D - F W`, which only weights make, is not, though its factors are the same.
#[test]
fn a_product_of_weights_that_stands_for_one_with_the_batch_is_rounded() {
    let (mut b, mut store) = (Builder::with_precision(Precision::Bf16), Store::new());
    let dims = [("f", [3, 30]), ("w", [30, 5]), ("d", [3, 5])];
    let [f, w, d] = dims.map(|(name, dims)| {
        let slot = store.add(name, &dims, random(&dims, 1).values);
        b.persistent(&store, slot)
    });
    let x = b.input("x", &Type::f32(&[64, 3])).unwrap();
    b.associate();
    let wide = b.linear_io(x, f, None).unwrap();
    let y = b.linear_io(wide, w, None).unwrap();
    let of_weights = MatMul {
        alpha: -1.0,
        ..MatMul::stored(false, false)
    };
    let delta = b.matmul_into(of_weights, f, w, d).unwrap();
    b.output("y", y);
    b.output("delta", delta);
    let precision = |value: Value| precision_of_products(&b)[b.maker(value).unwrap()];
    let product = b.nodes[b.maker(y).unwrap()].inputs[1];
    assert_eq!(b.ty(product).dims, [3, 5]);
    let found = [y, product, delta].map(precision);
    assert_eq!(found, [Precision::Bf16, Precision::Bf16, Precision::F32]);
    let stored = stored(&b);
    let types = [y, product, delta].map(|value| {
        let node = &stored.nodes[stored.maker(value).unwrap()];
        [node.inputs[0], value].map(|value| stored.ty(value).dtype)
    });
    let (rounded, full) = (DType::Bf16, DType::F32);
    // Outputs are f32.
    assert_eq!(types, [[rounded, full], [rounded; 2], [full; 2]]);
}

// A product that depends on the batch equals that of rounded factors, within `256 2^-24` of the sum
// of magnitudes in any order of sums; a product of weights alone keeps its bits. Large enough not
// to be thin.
#[test]
fn a_cpu_multiplies_rounded_factors() {
    const SIDE: usize = 256;
    let values = |seed| random(&[SIDE, SIDE], seed).values;
    let rounded = |values: Vec<f32>| values.into_iter().map(|x| bf16::from_f32(x).to_f32());
    let run = |precision, x: Vec<f32>, w: Vec<f32>| {
        let (mut b, mut store) = (Builder::with_precision(precision), Store::new());
        let slot = store.add("w", &[SIDE, SIDE], w);
        let w = b.persistent(&store, slot);
        let x_value = b.input("x", &Type::f32(&[SIDE, SIDE])).unwrap();
        let y = b.matmul(x_value, w).unwrap();
        let of_weights = b.matmul(w, w).unwrap();
        b.output("y", y);
        b.output("of_weights", of_weights);
        let mut executor = crate::cpu::Alone::new(&b, Arc::new(crate::Pool::new(2).unwrap()));
        executor.input("x").copy_from_slice(&x);
        executor.run(&mut store);
        ["y", "of_weights"].map(|name| executor.output(name, &store).to_vec())
    };
    let [found, of_weights] = run(Precision::Bf16, values(1), values(2));
    let [full, alone] = run(Precision::F32, values(1), values(2));
    let [expected, _] = run(
        Precision::F32,
        rounded(values(1)).collect(),
        rounded(values(2)).collect(),
    );
    let sizes = |values: Vec<f32>| values.into_iter().map(f32::abs).collect::<Vec<_>>();
    let [magnitudes, _] = run(Precision::F32, sizes(values(1)), sizes(values(2)));
    for ((found, expected), size) in found.iter().zip(&expected).zip(&magnitudes) {
        let tolerance = SIDE as f32 * 2f32.powi(-24) * 1.01 * size;
        assert!((found - expected).abs() <= tolerance, "{found} {expected}");
    }
    assert!(found != full, "the factors are rounded");
    assert_eq!(of_weights, alone);
}

#[test]
fn a_program_that_writes_to_a_frozen_tensor_is_refused() {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let slot = store.zeros("halt", &[2]);
    store.freeze(slot);
    let halt = b.persistent(&store, slot);
    let error = b.op(crate::ops::Halt, &[halt]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "halt: writes to f32 [2], which is frozen"
    );
}

#[test]
fn a_frozen_tensor_is_read_in_bf16_as_it_is_rounded() {
    for (freeze, holds) in [(true, false), (true, true), (false, false)] {
        let (mut b, mut store) = site(freeze);
        if holds {
            store.hold_in_bf16(store.slot("w").unwrap());
        }
        let x = random(&[6, 8], 2).values;
        let inputs = [("x", x.iter().map(|x| x.to_bits()).collect())];
        let numbers = StepParameters {
            scalars: vec![0.1, 0.5, 0.5],
            ..StepParameters::default()
        };
        let mut run = |precision| {
            b.precision = precision;
            replay(Program::new(&b), &store, &inputs, &numbers)
        };
        let full = run(Precision::F32);
        let (Some((_, full)), Some((_, rounded))) = (full, run(Precision::Bf16)) else {
            return;
        };
        // The loss: squares of sums of products of three rounded numbers and three rounded results.
        let (full, rounded) = (full[0].1[0], rounded[0].1[0]);
        assert!(
            (full - rounded).abs() < 12.0 / 512.0 * full,
            "{full} {rounded}"
        );
        assert!(full.to_bits() != rounded.to_bits());
    }
}

#[test]
fn an_arena_of_bf16_is_smaller() {
    let mut every_op = EveryOp::new(LARGE, false);
    let mut bytes = |precision| {
        every_op.b.precision = precision;
        Program::new(&every_op.b).given.plan.arena_bytes()
    };
    let (full, rounded) = (bytes(Precision::F32), bytes(Precision::Bf16));
    // Inputs keep their type, among them a target's logits.
    assert!(rounded * 10 < full * 7, "{rounded} of {full}");
}

/// `|found - expected| / |expected|` in the 2-norm.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let differences = found.iter().zip(expected);
    let off = square(&mut differences.map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (off / square(&mut expected.iter().map(|x| f64::from(*x))).max(1e-30)).sqrt()
}

#[test]
fn every_op_in_bf16_is_close_to_f32() {
    for sizes in [EVEN, RAGGED] {
        let mut every_op = EveryOp::new(sizes, true);
        let numbers = numbers(&every_op);
        let mut run = |precision| {
            every_op.b.precision = precision;
            let program = Program::new(&every_op.b);
            replay(program, &every_op.store, &every_op.inputs, &numbers)
        };
        let full = run(Precision::F32);
        let (Some((_, full)), Some((_, rounded))) = (full, run(Precision::Bf16)) else {
            return;
        };
        // Some forty roundings lie between an embedding and its gradient, each by up to 2^-8 of its
        // element, half of that in the root mean square, and independent: 7 units of 2^-9, which
        // norms and softmaxes amplify, and hard sigmoids that a rounding moves across 0 or 1: at most
        // 25 on the emulated GPU. The gradients of additive attention's parameters are sums that
        // cancel: the roundings of what it attends to change them by 25 to 2800 units, with other
        // tokens and whichever kernels round. `bf16_roundings` checks its ops one by one.
        for ((name, full), (_, rounded)) in full.iter().zip(&rounded) {
            let off = distance(rounded, full);
            let amplified = (38..45).any(|leaf| *name == format!("gradient {leaf}"));
            assert!(
                off < 50.0 / 512.0 || amplified,
                "{name} is off by {off:.1e}"
            );
        }
    }
}
