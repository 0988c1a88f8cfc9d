//! Three updates of Muon, on matrices and on tensors that it leaves to Adam. A stack of matrices is
//! as many matrices.

use serde_json::Value as Json;
use spd_engine::{Alone, Builder, Slot, Store};
use spd_trainer::muon::{Moved, Muon};

use super::compare::Comparison;
use super::numbers::Numbers;
use super::processor;
use super::run_file::number;
use crate::harness::Outcome;

/// A matrix, or a tensor that is none, with the part of a recorded tensor that it is.
struct Leaf {
    name: String,
    dims: Vec<usize>,
    at: std::ops::Range<usize>,
    parameter: Slot,
    momentum: Slot,
    second: Slot,
}

pub(super) fn check() -> Outcome {
    let case = Numbers::open("modern/muon")?;
    // Ours multiplies f32; theirs in bf16 rounds each product, and differs from f64 by up to 0.15.
    let bounds = [("f32", 1e-5), ("f32_wd_clip_norms", 1e-5), ("bf16", 0.2)];
    let mut comparison = Comparison::new("muon", 1e-5);
    for (config, bound) in bounds {
        comparison.group(config);
        compare(&mut comparison, &case, config, bound);
    }
    Ok(comparison.finish())
}

fn compare(comparison: &mut Comparison, case: &Numbers, config: &str, bound: f64) {
    let said = &case.info["configs"][config];
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of iterations"
    )]
    let muon = Muon {
        beta: number(said, "beta"),
        rms: said["consistent_rms"].as_f64(),
        weight_decay: number(said, "weight_decay"),
        iterations: number(said, "ns_steps") as usize,
    };
    let mut store = Store::new();
    let leaves = leaves(case, &mut store);
    let mut b = Builder::new();
    let mut gradients = Vec::new();
    for (index, leaf) in leaves.iter().enumerate() {
        let ty = spd_engine::Type::f32(&leaf.dims);
        gradients.push(b.input(&index.to_string(), &ty).expect("a new name"));
    }
    let norms = b.gradient_norm(&gradients).expect("some gradients");
    for (leaf, &gradient) in leaves.iter().zip(&gradients) {
        let on = Moved {
            parameter: b.persistent(&store, leaf.parameter),
            momentum: b.persistent(&store, leaf.momentum),
            second: b.persistent(&store, leaf.second),
            gradient,
        };
        let clip = said["grad_clip_norm"].as_f64();
        muon.update(&mut b, &on, "lr", (clip, norms), &[norms])
            .expect("types fit");
    }
    let mut executor = Alone::new(&b, &processor(1)).expect("room");
    for step in 0..3 {
        for (index, leaf) in leaves.iter().enumerate() {
            let recorded = case.get(&format!("grad.s{step}.{}", leaf.name)).f32();
            let input = executor.input(&index.to_string());
            bytemuck::cast_slice_mut(input).copy_from_slice(&recorded[leaf.at.clone()]);
        }
        #[expect(clippy::cast_possible_truncation, reason = "scalars are f32")]
        let mut set = |name: &str, value: f64| executor.set_scalar(name, value as f32);
        set("lr", case.info["lr"][step].as_f64().expect("a rate"));
        for (name, value) in muon.scalars(step as u64 + 1) {
            set(name, value);
        }
        executor.run(&mut store).expect("a processor that works");
        store.fetch().expect("a processor that works");
        for leaf in &leaves {
            let key = format!("param.{config}.s{step}.{}", leaf.name);
            let theirs = &case.get(&key).values[leaf.at.clone()];
            comparison.within(bound, &key, store.get(leaf.parameter), theirs);
        }
    }
}

fn leaves(case: &Numbers, store: &mut Store) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    for (kind, rank) in [("muon_leaves", 2), ("adam_fallback_leaves", 1)] {
        let names = case.info[kind].as_object().expect("shapes by name");
        for (name, dims) in names {
            let dims = dims.as_array().expect("a shape");
            let dims: Vec<usize> = dims
                .iter()
                .filter_map(Json::as_u64)
                .map(|dim| usize::try_from(dim).expect("a small one"))
                .collect();
            let whole: usize = dims.iter().product();
            let own = match rank {
                2 => dims[dims.len() - 2..].to_vec(),
                _ => vec![whole],
            };
            let len: usize = own.iter().product();
            let start = case.get(&format!("init.{name}")).f32();
            for part in 0..whole / len {
                let at = part * len..(part + 1) * len;
                let mut add = |kind: &str, values: Vec<f32>| {
                    store.add(format!("{kind}.{name}.{part}"), &own, values)
                };
                leaves.push(Leaf {
                    parameter: add("parameter", start[at.clone()].to_vec()),
                    momentum: add("momentum", vec![0.0; len]),
                    second: add("second", vec![0.0; len]),
                    name: name.clone(),
                    dims: own.clone(),
                    at,
                });
            }
        }
    }
    leaves
}
