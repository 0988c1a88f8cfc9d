//! Probe: a captured graph gives the results of the separate ops, and waits for a staged state.
//!
//! All numbers of the product and the update are sums of few powers of two, so the GPU and the CPU
//! have the same bits in any order of sums.

use std::sync::Arc;

use super::{Place, same};
use crate::cpu::Pool;
use crate::cuda::replacement::is_installed;
use crate::cuda::{Device, Fault, Result};
use crate::executor::{Alone, Processor};
use crate::op::Builder;
use crate::ops::{AdamW, AdamWOperands};
use crate::step_parameters::StepParameters;
use crate::store::{Named, Slot, Store, Values};
use crate::value::Type;

/// Rows and columns of the tensors: 4 MiB each, so that a copy of the state takes longer than the
/// program needs to reach its update.
pub(super) const SIDE: usize = 1024;
const EMULATED_SIDE: usize = 16;

/// Steps: the first is enqueued op by op and then captured, the others launch the graph.
const STEPS: usize = 3;

/// An update of `w` on the permuted rows of a table, and its store.
pub(super) fn program(side: usize) -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let dims = [side, side];
    // 1, -1, 2, -2, without a period along rows or columns.
    let powers =
        (0..side * side).map(|at| [1.0, -1.0, 2.0, -2.0][(at / side * 7 + at * 5) % 11 % 4]);
    let table = store.add("table", &dims, powers.collect());
    let slots = ["w", "m", "v"].map(|name| store.zeros(name, &dims));
    let table = b.persistent(&store, table);
    let [parameter, first, second] = slots.map(|slot| b.persistent(&store, slot));
    let order = b.input("order", &Type::f32(&dims)).expect("a new name");
    let gradient = b.matmul(order, table).expect("square factors");
    let norm = b.gradient_norm(&[gradient]).expect("one tensor");
    // m becomes (m + g) / 2, v becomes g^2, and w decreases by m / |g|.
    let settings = AdamW {
        beta1: 0.5,
        beta2: 0.0,
        eps: 0.0,
        ..AdamW::new(&mut b)
    };
    let operands = AdamWOperands {
        parameter,
        first,
        second,
        gradient,
    };
    b.adamw(settings, &[operands], norm, &[])
        .expect("tensors of one type");
    (b, store)
}

/// Numbers and input of a step: each step shifts the rows of the table by one more.
fn given(step: usize, side: usize) -> (StepParameters, Vec<f32>) {
    let mut order = vec![0.0; side * side];
    for row in 0..side {
        order[row * side + (row + step) % side] = 1.0;
    }
    let parameters = StepParameters {
        // Learning rate, and the two bias corrections.
        scalars: vec![1.0; 3],
        ..StepParameters::default()
    };
    (parameters, order)
}

type State = Vec<(String, Vec<f32>)>;

/// All tensors of a store, fetched to the host.
fn state(store: &Store) -> State {
    let slots = store.slots();
    slots
        .map(|slot| (store.name(slot).to_owned(), store.get(slot).to_vec()))
        .collect()
}

fn compare(how: &str, found: &[Named<'_>], expected: &State) -> Result<()> {
    let mut pairs = found.iter().zip(expected);
    pairs.try_for_each(|(found, (name, expected))| match found.values {
        Values::F32(found) => same(&format!("{name} {how}"), found, expected),
        Values::Bf16(_) => Err(Fault::new("nothing here is held in bf16")),
    })
}

pub(super) fn graph(place: &Place) -> Result<String> {
    let side = if is_installed() { EMULATED_SIDE } else { SIDE };
    replays(&place.device()?, side)
}

/// Replays the program op by op and as a graph, and compares with the CPU.
pub(super) fn replays(device: &Arc<Device>, side: usize) -> Result<String> {
    let (b, mut store) = program(side);
    let mut alone = Alone::new(&b, &Arc::new(Pool::single()).into())?;
    let mut expected = Vec::new();
    for step in 0..STEPS {
        let (parameters, order) = given(step, side);
        alone.parameters = parameters;
        alone.input("order").copy_from_slice(&order);
        alone.run(&mut store)?;
        expected.push(state(&store));
    }
    for captured in [false, true] {
        let how = if captured { "of the graph" } else { "op by op" };
        let (_, mut store) = program(side);
        let slots: Vec<Slot> = store.slots().collect();
        let mut alone = Alone::new(&b, &Processor::Gpu(Some(Arc::clone(device))))?;
        let mut left = None;
        for step in 0..STEPS {
            if !captured {
                // Profiling enqueues ops one by one.
                alone.start_profile();
            }
            let (parameters, order) = given(step, side);
            alone.parameters = parameters;
            alone.input("order").copy_from_slice(&order);
            alone.run(&mut store)?;
            if step + 2 == STEPS {
                left = store.stage(&slots)?;
            }
        }
        store.fetch()?;
        let found: Vec<Named<'_>> = slots.iter().map(|&slot| store.named(slot)).collect();
        let after = format!("after step {STEPS} {how}");
        compare(&after, &found, &expected[STEPS - 1])?;
        let left = left.ok_or_else(|| Fault::new("the store is not on the GPU"))?;
        let how = format!("as staged after step {} {how}", STEPS - 1);
        compare(&how, &left.arrived()?, &expected[STEPS - 2])?;
    }
    Ok(format!(
        "{STEPS} steps, two of them graph launches, and the state staged between those match the CPU bit for bit"
    ))
}
