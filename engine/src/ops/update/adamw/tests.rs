use std::sync::Arc;

use super::*;
use crate::cpu::{Alone, Pool};
use crate::cuda::program::Program;
use crate::cuda::tests::{agree, compiles_within_its_budget};
use crate::ops::oracle::{close, random};
use crate::step_parameters::StepParameters;
use crate::{Store, Type};

struct Bench {
    store: Store,
    executor: Alone,
}

fn bench(clip: Option<f32>, decay: f32) -> Bench {
    let mut store = Store::new();
    let start = random(&[5, 7], 1);
    let w = store.add("w", &start.dims, start.values);
    let m = store.zeros("m", &[5, 7]);
    let v = store.zeros("v", &[5, 7]);
    let mut b = Builder::new();
    let gradient = b.input("gradient", &Type::f32(&[5, 7])).unwrap();
    let group = b.gradient_norm(&[gradient]).unwrap();
    let op = AdamW {
        decay,
        clip,
        ..AdamW::new(&mut b)
    };
    let [parameter, first, second] = [w, m, v].map(|slot| b.persistent(&store, slot));
    b.adamw(
        op,
        &[AdamWOperands {
            parameter,
            first,
            second,
            gradient,
        }],
        group,
        &[],
    )
    .unwrap();
    let executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
    Bench { store, executor }
}

fn step(bench: &mut Bench, t: i32, gradient: &[f32]) {
    bench.executor.set_scalar("lr", 0.1);
    bench
        .executor
        .set_scalar("correction1", 1.0 - 0.9f32.powi(t));
    bench
        .executor
        .set_scalar("correction2", 1.0 - 0.999f32.powi(t));
    bench.executor.input("gradient").copy_from_slice(gradient);
    bench.executor.run(&mut bench.store);
}

// The formula above, in f64.
#[test]
#[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
fn three_updates_follow_the_formula() {
    for (clip, decay) in [(None, 0.0), (Some(0.5), 0.1), (Some(100.0), 0.0)] {
        let mut bench = bench(clip, decay);
        let mut w: Vec<f64> = random(&[5, 7], 1)
            .values
            .iter()
            .map(|&w| f64::from(w))
            .collect();
        let (mut m, mut v) = (vec![0.0; 35], vec![0.0; 35]);
        for t in 1..=3i32 {
            let gradient = random(&[5, 7], 10 + u64::from(t.unsigned_abs())).values;
            step(&mut bench, t, &gradient);
            let norm = gradient
                .iter()
                .map(|&g| f64::from(g).powi(2))
                .sum::<f64>()
                .sqrt();
            let factor = clip.map_or(1.0, |clip| (f64::from(clip) / (norm + 1e-6)).min(1.0));
            for i in 0..35 {
                let g = factor * f64::from(gradient[i]);
                w[i] *= 1.0 - 0.1 * f64::from(decay);
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.999 * v[i] + 0.001 * g * g;
                let (m, v) = (
                    m[i] / (1.0 - 0.9f64.powi(t)),
                    v[i] / (1.0 - 0.999f64.powi(t)),
                );
                w[i] -= 0.1 * m / (v.sqrt() + 1e-8);
            }
        }
        let expected: Vec<f32> = w.iter().map(|&w| w as f32).collect();
        let found = bench.store.get(bench.store.slot("w").unwrap());
        // f32 moments and corrections: 1 - 0.999 in f32 has a relative error of 3e-5.
        close("weights", found, &expected, 2e-5);
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut bench = bench(None, 0.1);
        step(&mut bench, 1, &random(&[5, 7], 3).values);
        let before: Vec<Vec<f32>> = bench
            .store
            .slots()
            .map(|slot| bench.store.get(slot).to_vec())
            .collect();
        let mut gradient = random(&[5, 7], 4).values;
        gradient[17] = bad;
        step(&mut bench, 2, &gradient);
        for (slot, before) in bench.store.slots().zip(&before) {
            assert_eq!(bench.store.get(slot), before);
        }
    }
}

/// A group of tensors, with its norms as output: more than one launch takes, of uneven lengths,
/// some in several shares.
fn many() -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let lengths = (0..131).map(|index| match index {
        7 => 20_001,
        40 => 16_384,
        130 => 8193,
        _ => 1 + 37 * index % 101,
    });
    let slots: Vec<[_; 4]> = (0u64..)
        .zip(lengths)
        .map(|(index, len)| {
            let mut seed = 4 * index;
            ["w", "m", "v", "gradient"].map(|kind| {
                seed += 1;
                store.add(
                    format!("{kind} {index}"),
                    &[len],
                    random(&[len], seed).values,
                )
            })
        })
        .collect();
    // Second moments are squares.
    for [_, _, second, _] in &slots {
        let values = store.get_mut(*second);
        values.iter_mut().for_each(|v| *v = 0.1 + *v * *v);
    }
    let on = slots.iter().map(|slots| {
        let [parameter, first, second, gradient] = slots.map(|slot| b.persistent(&store, slot));
        AdamWOperands {
            parameter,
            first,
            second,
            gradient,
        }
    });
    let on: Vec<AdamWOperands> = on.collect();
    let gradients: Vec<Value> = on.iter().map(|on| on.gradient).collect();
    let norms = b.gradient_norm(&gradients).unwrap();
    b.output("norms", norms);
    let op = AdamW {
        decay: 0.1,
        clip: Some(3.0),
        ..AdamW::new(&mut b)
    };
    b.adamw(op, &on, norms, &[]).unwrap();
    (b, store)
}

#[test]
fn a_group_is_updated_in_few_launches() {
    let (b, store) = many();
    let parameters = StepParameters {
        scalars: vec![0.01, 0.1, 0.2],
        ..StepParameters::default()
    };
    // A sum of 20 001 squares in another order.
    agree(&b, &store, &[], &parameters, 1e-5);
    let program = Program::new(&b);
    // The norms: squares and sums; the update: 127 tensors and 4.
    assert_eq!(program.steps.len(), 2 + 2);
    compiles_within_its_budget(&program);
}

#[test]
fn an_update_takes_each_tensor_once() {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let [w, m, v, other_w, other_m, other_v] = ["w", "m", "v", "w2", "m2", "v2"].map(|name| {
        let slot = store.zeros(name, &[3]);
        b.persistent(&store, slot)
    });
    let gradient = b.input("gradient", &Type::f32(&[3])).unwrap();
    let norms = b.gradient_norm(&[gradient]).unwrap();
    let op = AdamW::new(&mut b);
    let of = |parameter, first, second| AdamWOperands {
        parameter,
        first,
        second,
        gradient,
    };
    for on in [
        vec![of(w, m, m)],
        vec![of(w, m, v), of(w, other_m, other_v)],
        vec![of(w, m, v), of(other_w, other_m, v)],
        vec![AdamWOperands {
            gradient: w,
            ..of(w, m, v)
        }],
    ] {
        let refused = b.adamw(op, &on, norms, &[]).map_err(|e| e.to_string());
        let reason = "adamw: writes to f32 [3], which it is given twice";
        assert_eq!(refused, Err(reason.to_owned()), "{on:?}");
    }
    b.adamw(
        op,
        &[of(w, m, v), of(other_w, other_m, other_v)],
        norms,
        &[],
    )
    .unwrap();
}

#[test]
fn tensors_of_an_update_are_of_one_type() {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let mut value = |name, len| {
        let slot = store.zeros(name, &[len]);
        b.persistent(&store, slot)
    };
    let (of_two, of_three) = (value("two", 2), value("three", 3));
    let norms = b.gradient_norm(&[of_two]).unwrap();
    let op = AdamW::new(&mut b);
    let whole = AdamWOperands {
        parameter: of_two,
        first: of_two,
        second: of_two,
        gradient: of_two,
    };
    let bad = AdamWOperands {
        second: of_three,
        ..whole
    };
    let mut refused = |on: &[AdamWOperands]| b.adamw(op, on, norms, &[]).unwrap_err().to_string();
    assert_eq!(refused(&[]), "adamw: there are no tensors");
    assert_eq!(
        refused(&[whole, bad]),
        "adamw: f32 [2], f32 [2], f32 [3], f32 [2] differ"
    );
}
