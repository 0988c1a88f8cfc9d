//! Staged tensors of the emulated device have the right values in any order of streams and waits.

use std::sync::Arc;
use std::thread;

use super::driver::Stream;
use super::emulated::{Call, Direction, Emulated, Ignored, Order, is_there};
use super::replay_tests::{ask, emulated, told_in_one_line, training};
use super::tests::{Alone, on};
use super::{Device, Result, Staged};
use crate::store::{Named, Slot, Store, Values};

/// Words of each tensor.
type State = Vec<Vec<u32>>;

fn slots(store: &Store) -> Vec<Slot> {
    store.lasting().collect()
}

fn f32s<'s>(tensor: &Named<'s>) -> &'s [f32] {
    match tensor.values {
        Values::F32(values) => values,
        Values::Bf16(_) => panic!("`{}` is held in bf16", tensor.name),
    }
}

fn words(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn brought_home(store: &mut Store) -> State {
    store.fetch().unwrap();
    let slots = slots(store).into_iter();
    slots.map(|slot| words(store.get(slot))).collect()
}

fn stage(store: &Store) -> Staged {
    let staged = store.stage(&slots(store)).unwrap();
    staged.expect("a store that is on a device")
}

fn arrived(staged: &Staged) -> State {
    let tensors = staged.arrived().unwrap().into_iter();
    tensors.map(|tensor| words(f32s(&tensor))).collect()
}

/// State after each of the first `steps` steps, each fetched before the next.
fn states(steps: u8) -> Vec<State> {
    let (_, device) = emulated(Order::new(true, true));
    let (b, mut store) = training();
    let mut executor = on(&device, &b).unwrap();
    let mut state = |number| {
        ask(&mut executor, &mut store, number).unwrap();
        brought_home(&mut store)
    };
    (0..steps).map(&mut state).collect()
}

/// A device on which the first step was enqueued.
fn started(order: Order) -> (Arc<Emulated>, Arc<Device>, Store, Alone) {
    let (emulated, device) = emulated(order);
    let (b, mut store) = training();
    let mut executor = on(&device, &b).unwrap();
    ask(&mut executor, &mut store, 0).unwrap();
    (emulated, device, store, executor)
}

/// Enqueues eight steps and stages the third and the sixth state, waiting only two or three steps
/// later. Returns whether the staged and the final states are right.
fn comes_out(order: Order, ignored: Option<Ignored>, expected: &[State]) -> bool {
    let (emulated, _, mut store, mut executor) = started(order);
    emulated.ignore(ignored);
    let mut go = |steps: std::ops::Range<u8>, store: &mut Store| {
        steps.for_each(|number| ask(&mut executor, store, number).unwrap());
    };
    go(1..3, &mut store);
    let third = stage(&store);
    go(3..6, &mut store);
    let third = arrived(&third) == expected[2];
    let sixth = stage(&store);
    go(6..8, &mut store);
    third & (arrived(&sixth) == expected[5]) & (brought_home(&mut store) == expected[7])
}

#[test]
fn staged_values_are_those_of_their_step() {
    if !is_there() {
        return;
    }
    let expected = states(8);
    for order in Order::ALL {
        assert!(comes_out(order, None, &expected), "{order:?}");
    }
}

// Control of the test above: each wait is needed in one of the orders.
#[test]
fn a_missing_wait_gives_wrong_values() {
    if !is_there() {
        return;
    }
    let expected = states(8);
    for ignored in [
        Ignored::GraphWait,
        Ignored::StreamWait(Stream::Staging),
        Ignored::Wait,
    ] {
        let mut orders = Order::ALL.into_iter();
        let wrong = orders.any(|order| !comes_out(order, Some(ignored), &expected));
        assert!(wrong, "{ignored:?}");
    }
}

// The first replay and timed replays run op by op, without a graph.
#[test]
fn a_program_that_is_enqueued_op_by_op_waits_too() {
    if !is_there() {
        return;
    }
    let expected = states(2);
    for (order, ignored) in Order::ALL.into_iter().flat_map(|order| {
        let ignored = [None, Some(Ignored::GraphWait)];
        ignored.map(|ignored| (order, ignored))
    }) {
        let staged_before = |next: &dyn Fn(&Arc<Device>, &mut Alone, &mut Store)| {
            let (emulated, device, mut store, mut executor) = started(order);
            emulated.ignore(ignored);
            let staged = stage(&store);
            next(&device, &mut executor, &mut store);
            (arrived(&staged) == expected[0]) & (brought_home(&mut store) == expected[1])
        };
        let found = [
            staged_before(&|device, _, store| {
                ask(&mut on(device, &training().0).unwrap(), store, 1).unwrap();
            }),
            staged_before(&|_, executor, store| {
                executor.start_profile();
                ask(executor, store, 1).unwrap();
            }),
        ];
        // Only programs that overtake a copy make a missing wait visible.
        let late = order == Order::new(true, order.inputs_at_once);
        if ignored.is_none() || late {
            assert_eq!(found, [ignored.is_none(); 2], "{order:?} {ignored:?}");
        }
    }
}

#[test]
fn host_changes_are_sent_after_a_staged_copy() {
    if !is_there() {
        return;
    }
    let expected = states(1);
    let comes_out = |order, ignored: Option<Ignored>| {
        let (emulated, _, mut store, mut executor) = started(order);
        emulated.ignore(ignored);
        let staged = stage(&store);
        for slot in slots(&store) {
            store.clear(slot);
        }
        ask(&mut executor, &mut store, 1).unwrap();
        arrived(&staged) == expected[0]
    };
    assert!(Order::ALL.iter().all(|&order| comes_out(order, None)));
    let ignored = Some(Ignored::StreamWait(Stream::Programs));
    assert!(Order::ALL.iter().any(|&order| !comes_out(order, ignored)));
}

#[test]
fn staging_waits_for_nothing_and_pins_once() {
    if !is_there() {
        return;
    }
    let (emulated, device) = emulated(Order::new(false, false));
    let (b, mut store) = training();
    let mut executor = on(&device, &b).unwrap();
    let mut step = |number, store: &mut Store| {
        emulated.calls();
        ask(&mut executor, store, number).unwrap();
        emulated.calls()
    };
    step(0, &mut store);
    step(1, &mut store);
    let calls = step(2, &mut store);
    let waits = device.waits();
    // Tensors are adjacent, so one copy takes all.
    let leaves = Call::Copy(Stream::Staging, Direction::ToHost);
    let staged = stage(&store);
    assert_eq!(emulated.calls(), [Call::Make, leaves]);
    assert_eq!(step(3, &mut store), calls);
    // Taking them waits, which is not counted.
    staged.arrived().unwrap();
    drop(staged);
    emulated.calls();
    let again = stage(&store);
    assert_eq!(emulated.calls(), [leaves]);
    assert_eq!(step(4, &mut store), calls);
    // The first is still held, so another needs memory of its own.
    let third = stage(&store);
    assert_eq!(emulated.calls(), [Call::Make, leaves]);
    assert_eq!(device.waits(), waits);
    let expected = states(5);
    assert_eq!(
        [arrived(&third), arrived(&again)],
        [expected[4].clone(), expected[3].clone()]
    );
}

#[test]
fn memory_pinned_beforehand_suffices() {
    if !is_there() {
        return;
    }
    let (emulated, device) = emulated(Order::new(false, false));
    let (b, mut store) = training();
    store.transient("sums", &[64]);
    store.make_room_to_stage().unwrap();
    let mut executor = on(&device, &b).unwrap();
    ask(&mut executor, &mut store, 0).unwrap();
    assert_eq!(store.staged_bytes(), 3 * 256);
    assert_eq!(store.device_bytes(), 4 * 256);
    emulated.calls();
    store.make_room_to_stage().unwrap();
    store.make_room_to_stage().unwrap();
    let staged = stage(&store);
    let leaves = Call::Copy(Stream::Staging, Direction::ToHost);
    assert_eq!(emulated.calls(), [Call::Make, leaves]);
    assert!(arrived(&staged) == states(1)[0]);
}

#[test]
fn another_thread_may_wait_during_a_capture() {
    if !is_there() {
        return;
    }
    let expected = states(9);
    for order in Order::ALL {
        let (_, device) = emulated(order);
        let (b, mut store) = training();
        let mut executor = on(&device, &b).unwrap();
        ask(&mut executor, &mut store, 0).unwrap();
        thread::scope(|scope| {
            for number in 1..9 {
                let staged = stage(&store);
                let thread = scope.spawn(move || arrived(&staged));
                let mut executor = on(&device, &b).unwrap();
                ask(&mut executor, &mut store, number).unwrap();
                let before = usize::from(number) - 1;
                assert!(thread.join().unwrap() == expected[before], "{order:?}");
            }
        });
    }
}

#[test]
fn tensors_on_the_host_are_shared_until_they_change() {
    if !is_there() {
        return;
    }
    let (_, device) = emulated(Order::new(false, false));
    let (b, mut store) = training();
    let apart = store.add("apart", &[2], vec![1.0, 2.0]);
    store.freeze(apart);
    assert!(store.stage(&[apart]).unwrap().is_none());
    let mut executor = on(&device, &b).unwrap();
    ask(&mut executor, &mut store, 0).unwrap();
    let second = store.slot("m").unwrap();
    let staged = store.stage(&[apart, second]).unwrap().unwrap();
    let tensors = staged.arrived().unwrap();
    let named: Vec<_> = tensors.iter().map(|it| (it.name, it.ty)).collect();
    assert_eq!(named, [("apart", store.ty(apart)), ("m", store.ty(second))]);
    assert_eq!(f32s(&tensors[0]).as_ptr(), store.get(apart).as_ptr());
    store.get_mut(apart)[0] = 3.0;
    assert_eq!(
        (f32s(&tensors[0]), store.get(apart)),
        (&[1.0, 2.0][..], &[3.0, 2.0][..])
    );
    assert_eq!(words(f32s(&tensors[1])), states(1)[0][1]);
}

#[test]
fn staged_values_arrive_in_any_order_of_drops_and_no_copy_writes_to_freed_memory() {
    if !is_there() {
        return;
    }
    let expected = states(2);
    for order in Order::ALL {
        for first in ["store", "executor", "both", "what travels", "nothing"] {
            let (emulated, device, mut store, mut executor) = started(order);
            ask(&mut executor, &mut store, 1).unwrap();
            let staged = stage(&store);
            let (mut store, mut executor) = (Some(store), Some(executor));
            match first {
                "store" => store = None,
                "executor" => executor = None,
                "both" => (store, executor) = (None, None),
                "what travels" => {
                    // The memory of one is held, that of the other was returned, and neither was
                    // waited for.
                    let another = stage(store.as_ref().unwrap());
                    drop((staged, another));
                    drop((store, executor, device));
                    assert!(emulated.is_empty(), "{order:?}");
                    continue;
                }
                _ => {
                    let (store, executor) = (store.as_mut().unwrap(), executor.as_mut().unwrap());
                    store.zeros("more", &[100]);
                    ask(executor, store, 2).unwrap();
                }
            }
            assert!(arrived(&staged) == expected[1], "{order:?}, {first}");
            drop((store, staged, executor, device));
            assert!(emulated.is_empty(), "{order:?}, {first}");
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
        ask(&mut executor, &mut store, 0)?;
        for number in 1..3 {
            let staged = store.stage(&slots(&store))?.expect("a device");
            ask(&mut executor, &mut store, number)?;
            staged.arrived()?;
        }
        Ok(())
    };
    told_in_one_line(work);
}
