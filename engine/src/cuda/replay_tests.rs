//! Replays on the emulated device: its calls, their order, and results in any order of streams.

use std::sync::Arc;

use super::driver::Stream;
use super::emulated::{Call, Direction, Emulated, Ignored, Order, is_there};
use super::tests::{Alone, on, replay_on, same_bits};
use super::{Arena, Device};
use crate::cpu::{self, Pool};
use crate::cuda::Result;
use crate::op::Builder;
use crate::ops::oracle::{close, random};
use crate::ops::{AdamW, AdamWOperands};
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::Type;

/// An update of `w` on the squares of `x w`, and its store.
pub(super) fn training() -> (Builder, Store) {
    let (mut b, mut store) = (Builder::new(), Store::new());
    let start = random(&[6, 4], 1);
    let w = store.add("w", &start.dims, start.values);
    let [first, second] = ["m", "v"].map(|name| store.zeros(name, &[6, 4]));
    let [w, first, second] = [w, first, second].map(|slot| b.persistent(&store, slot));
    let x = b.input("x", &Type::f32(&[8, 6])).unwrap();
    let y = b.matmul(x, w).unwrap();
    let loss = b.sum_squares(y).unwrap();
    let gradient = b.gradients(loss, &[w]).unwrap()[0].unwrap();
    let group = b.gradient_norm(&[gradient]).unwrap();
    b.output("loss", loss);
    b.output("y", y);
    b.output("w", w);
    let op = AdamW::new(&mut b);
    let operands = AdamWOperands {
        parameter: w,
        first,
        second,
        gradient,
    };
    b.adamw(op, &[operands], group, &[]).unwrap();
    (b, store)
}

/// Numbers and input of a step, different for each step.
fn step(number: u8) -> (StepParameters, Vec<u32>) {
    let t = i32::from(number) + 1;
    let parameters = StepParameters {
        step: number.into(),
        scalars: vec![
            0.1 / f32::from(number + 1),
            1.0 - 0.9f32.powi(t),
            1.0 - 0.999f32.powi(t),
        ],
        ..StepParameters::default()
    };
    let x = random(&[8, 6], 10 + u64::from(number)).values;
    (parameters, x.into_iter().map(f32::to_bits).collect())
}

pub(super) fn ask(executor: &mut Alone, store: &mut Store, number: u8) -> Result<()> {
    let (parameters, x) = step(number);
    executor.parameters = parameters;
    executor.input_words("x").copy_from_slice(&x);
    executor.run(store)
}

/// Losses, `y`, and the tensors of the store after these steps, on the CPU.
fn expected(steps: std::ops::Range<u8>) -> Vec<Vec<f32>> {
    let (b, mut store) = training();
    let mut executor = cpu::Alone::new(&b, Arc::new(Pool::single()));
    for number in steps {
        let (parameters, x) = step(number);
        executor.parameters = parameters;
        executor.input_words("x").copy_from_slice(&x);
        executor.run(&mut store);
    }
    let outputs = ["loss", "y"].map(|name| executor.output(name, &store).to_vec());
    let tensors = store.slots().map(|slot| store.get(slot).to_vec());
    outputs.into_iter().chain(tensors).collect()
}

/// Losses, `y`, and the tensors of the store of an executor on a device, after its steps.
pub(super) fn found(executor: &mut Alone, store: &mut Store) -> Result<Vec<Vec<f32>>> {
    executor.fetch(store)?;
    store.fetch()?;
    let outputs = ["loss", "y"].map(|name| executor.output(name, store).to_vec());
    let tensors = store.slots().map(|slot| store.get(slot).to_vec());
    Ok(outputs.into_iter().chain(tensors).collect())
}

// Sums of 8 products of numbers below 4, in other orders; the root of a second moment after a few
// steps.
const TOLERANCE: f32 = 3e-5;

fn near(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    for (tensor, (found, expected)) in found.iter().zip(expected).enumerate() {
        close(&format!("tensor {tensor}"), found, expected, TOLERANCE);
    }
}

pub(super) fn emulated(order: Order) -> (Arc<Emulated>, Arc<Device>) {
    let emulated = Emulated::new(order);
    let device = Device::of(Arc::<Emulated>::clone(&emulated));
    (emulated, device)
}

#[test]
fn each_replay_has_its_own_inputs_and_numbers_in_any_order_of_streams() {
    if !is_there() {
        return;
    }
    let expected = expected(0..7);
    let mut all = Vec::new();
    for order in Order::ALL {
        let (_, device) = emulated(order);
        let (b, mut store) = training();
        let mut executor = on(&device, &b).unwrap();
        for number in 0..7 {
            ask(&mut executor, &mut store, number).unwrap();
        }
        let found = found(&mut executor, &mut store).unwrap();
        near(&found, &expected);
        all.push(found);
    }
    assert!(all.iter().all(|found| *found == all[0]));
}

// Control of the test above: each wait is needed in one of the orders.
#[test]
fn a_missing_wait_gives_wrong_values() {
    if !is_there() {
        return;
    }
    let expected = expected(0..7);
    for ignored in [
        Ignored::StreamWait(Stream::Inputs),
        Ignored::StreamWait(Stream::Programs),
        Ignored::Wait,
    ] {
        let wrong = Order::ALL.iter().any(|&order| {
            let (emulated, device) = emulated(order);
            let (b, mut store) = training();
            let mut executor = on(&device, &b).unwrap();
            ask(&mut executor, &mut store, 0).unwrap();
            emulated.ignore(ignored);
            for number in 1..7 {
                ask(&mut executor, &mut store, number).unwrap();
            }
            !is_near(&mut executor, &mut store, &expected)
        });
        assert!(wrong, "{ignored:?}");
    }
}

fn is_near(executor: &mut Alone, store: &mut Store, expected: &[Vec<f32>]) -> bool {
    let found = found(executor, store).unwrap();
    let mut pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.all(|(a, b)| (a - b).abs() <= TOLERANCE)
}

#[test]
fn a_replay_allocates_nothing_and_waits_for_nothing() {
    if !is_there() {
        return;
    }
    let (emulated, device) = emulated(Order::new(false, false));
    let (b, mut store) = training();
    let mut executor = on(&device, &b).unwrap();
    ask(&mut executor, &mut store, 0).unwrap();
    executor.fetch(&mut store).unwrap();
    let waits = device.waits();
    emulated.calls();
    // Numbers and `x` are copied to the device and taken; the rest of the step is one graph.
    let travels = [Call::Copy(Stream::Inputs, Direction::ToDevice); 2];
    let taken = [Call::Copy(Stream::Programs, Direction::OnDevice); 2];
    let replay = [&travels[..], &taken, &[Call::Graph]].concat();
    for number in 1..8 {
        ask(&mut executor, &mut store, number).unwrap();
        // From the third replay on, its buffer was used before.
        let held = if number > 1 { &[Call::Wait][..] } else { &[] };
        assert_eq!(emulated.calls(), [held, &replay].concat(), "{number}");
    }
    assert_eq!(device.waits(), waits);
    // Fetching waits, once.
    executor.fetch(&mut store).unwrap();
    executor.fetch(&mut store).unwrap();
    assert_eq!(
        device.waits(),
        waits + 2,
        "`w` of the store, and the outputs of the arena"
    );
}

#[test]
fn an_input_keeps_its_values() {
    if !is_there() {
        return;
    }
    let (_, device) = emulated(Order::new(false, true));
    let (b, store) = training();
    let run = |fills: usize| {
        let mut store = store.copy();
        let mut executor = on(&device, &b).unwrap();
        let (parameters, x) = step(0);
        executor.parameters = parameters;
        for replay in 0..4 {
            if replay < fills {
                executor.input_words("x").copy_from_slice(&x);
            }
            if replay == 2 {
                executor.arena = Arena::new(&device, executor.arena.bytes()).unwrap();
            }
            executor.run(&mut store).unwrap();
        }
        found(&mut executor, &mut store).unwrap()
    };
    assert_eq!(run(1), run(4));
}

#[test]
fn a_graph_is_captured_again_for_another_store_or_arena() {
    if !is_there() {
        return;
    }
    let (emulated, device) = emulated(Order::new(false, false));
    let (b, mut store) = training();
    let mut executor = on(&device, &b).unwrap();
    let graphs = |emulated: &Emulated| {
        let calls = emulated.calls();
        calls.iter().filter(|call| **call == Call::Capture).count()
    };
    ask(&mut executor, &mut store, 0).unwrap();
    ask(&mut executor, &mut store, 1).unwrap();
    assert_eq!(graphs(&emulated), 1);
    // Another store with another layout, maybe at the same addresses, in the initial state of the
    // first.
    let mut other = training().1;
    other.zeros("more", &[100]);
    ask(&mut executor, &mut other, 0).unwrap();
    ask(&mut executor, &mut other, 1).unwrap();
    assert_eq!(graphs(&emulated), 1);
    let other = found(&mut executor, &mut other).unwrap();
    near(&other[..5], &expected(0..2));
    // The first store with another tensor.
    store.zeros("more", &[100]);
    ask(&mut executor, &mut store, 2).unwrap();
    // Another arena.
    let arena = Arena::new(&device, executor.plan().arena_bytes() + 512).unwrap();
    let old = std::mem::replace(&mut executor.arena, arena);
    ask(&mut executor, &mut store, 3).unwrap();
    drop(old);
    ask(&mut executor, &mut store, 4).unwrap();
    assert_eq!(graphs(&emulated), 2);
    let found = found(&mut executor, &mut store).unwrap();
    near(&found[..5], &expected(0..5));
}

/// Number of copies of tensors to the device since the last look at the calls.
fn sent(emulated: &Emulated) -> usize {
    let to_programs = Call::Copy(Stream::Programs, Direction::ToDevice);
    let calls = emulated.calls();
    calls.iter().filter(|call| **call == to_programs).count()
}

#[test]
fn only_tensors_that_the_host_changes_are_sent() {
    if !is_there() {
        return;
    }
    let (emulated, device) = emulated(Order::new(false, false));
    let (b, mut store) = training();
    let mut executor = on(&device, &b).unwrap();
    ask(&mut executor, &mut store, 0).unwrap();
    store.fetch().unwrap();
    emulated.calls();
    ask(&mut executor, &mut store, 1).unwrap();
    assert_eq!(sent(&emulated), 0);
    store.fetch().unwrap();
    let (w, start) = (store.slot("w").unwrap(), training().1);
    store.get_mut(w).copy_from_slice(start.get(w));
    ask(&mut executor, &mut store, 1).unwrap();
    assert_eq!(sent(&emulated), 1);
    assert!(store.bytes() > 0 && store.device_bytes() == 3 * 256);
}

// A CPU program evaluates what a GPU trains.
#[test]
fn tensors_that_a_cpu_program_reads_are_not_sent_again() {
    if !is_there() {
        return;
    }
    let (emulated, device) = emulated(Order::new(false, false));
    let (mut b, mut store) = (Builder::new(), Store::new());
    let slot = store.add("w", &[6, 4], random(&[6, 4], 1).values);
    store.freeze(slot);
    let w = b.persistent(&store, slot);
    let squares = b.sum_squares(w).unwrap();
    b.output("squares", squares);
    let mut there = on(&device, &b).unwrap();
    there.run(&mut store).unwrap();
    cpu::Alone::new(&b, Arc::new(Pool::single())).run(&mut store);
    emulated.calls();
    there.run(&mut store).unwrap();
    assert_eq!(sent(&emulated), 0);
}

#[test]
#[should_panic(expected = "`w` is newer on the device")]
fn a_tensor_that_is_newer_on_the_device_is_not_read() {
    let (_, device) = emulated(Order::new(true, true));
    let mut store = training().1;
    let slots: Vec<_> = store.slots().collect();
    store.send(&device, &slots).unwrap();
    store.changed_on_device(&slots[..1]);
    store.get(slots[1]);
    store.get(slots[0]);
}

#[test]
fn large_tensors_are_copied_whole() {
    for order in Order::ALL {
        let (_, device) = emulated(order);
        let mut store = Store::new();
        // The second starts within a piece and fills two and a half pieces.
        let lens = [3, 2_700_000, 1, 1_000_000, 5];
        let value = |tensor: usize, at: usize| (7 * tensor + at % 1_000_003) as f32;
        for (tensor, len) in lens.into_iter().enumerate() {
            let values = (0..len).map(|at| value(tensor, at)).collect();
            store.add(format!("{tensor}"), &[len], values);
        }
        let slots: Vec<_> = store.slots().collect();
        store.send(&device, &slots).unwrap();
        slots
            .iter()
            .for_each(|&slot| store.get_mut(slot).fill(-1.0));
        store.changed_on_device(&slots);
        store.fetch().unwrap();
        for (tensor, &slot) in slots.iter().enumerate() {
            let values = store.get(slot).iter().enumerate();
            let wrong = values
                .filter(|(at, found)| found.to_bits() != value(tensor, *at).to_bits())
                .count();
            assert_eq!(wrong, 0, "tensor {tensor}");
        }
    }
}

/// Asserts that a device that fails after any number of calls is reported in one line and leaks
/// nothing.
pub(super) fn told_in_one_line(work: impl Fn(&Arc<Device>) -> Result<()>) {
    for calls in 0.. {
        let (emulated, device) = emulated(Order::new(false, false));
        emulated.fail_in(calls);
        let worked = work(&device);
        drop(device);
        assert!(emulated.is_empty(), "after {calls} calls");
        match worked {
            Err(fault) => {
                let line = fault.to_string();
                assert_eq!(line.lines().count(), 1);
                assert!(line.starts_with("the GPU cannot go on"), "{line}");
            }
            Ok(()) => {
                assert!(calls > 30, "{calls}");
                break;
            }
        }
    }
}

#[test]
fn a_failing_device_is_reported_in_one_line_and_leaks_nothing() {
    if !is_there() {
        return;
    }
    let (b, store) = training();
    let work = |device: &Arc<Device>| -> Result<()> {
        let (mut executor, mut store) = (on(device, &b)?, store.copy());
        for number in 0..3 {
            ask(&mut executor, &mut store, number)?;
        }
        found(&mut executor, &mut store).map(|_| ())
    };
    told_in_one_line(work);
}

#[test]
fn an_allocation_that_fails_names_its_purpose() {
    let device = Device::of(Emulated::of_size(Order::new(true, true), 1000));
    assert_eq!(device.memory().unwrap(), (1000, 1000));
    let line = Arena::new(&device, 2000).unwrap_err().to_string();
    assert_eq!(
        line,
        "the GPU cannot allocate 2000 bytes of memory, for the programs"
    );
    let arena = Arena::new(&device, 600).unwrap();
    assert_eq!(device.memory().unwrap(), (400, 1000));
    drop(arena);
    assert_eq!(device.memory().unwrap(), (1000, 1000));
}

#[test]
fn a_replay_repeats_its_bits() {
    if !is_there() {
        return;
    }
    let (_, device) = emulated(Order::new(true, true));
    let (b, store) = training();
    let mut executor = on(&device, &b).unwrap();
    let (parameters, x) = step(0);
    let mut replay = || {
        let inputs = [("x", x.clone())];
        replay_on(&mut executor, &mut store.copy(), &inputs, &parameters).unwrap()
    };
    same_bits("changes from replay to replay", &replay(), &replay());
}
