//! Proper tying: one parameter for `linear1` and, transposed, `linear2`.
//!
//! The reference updates the shared memory twice, so only its first losses can be compared; for the gradient, a run with
//! parameters of their own, whose gradient norms are the reference's, tells what to expect: the sum of both.

use std::collections::BTreeMap;

use spd_configs::Run;
use spd_trainer::decomposition::Draws;

use super::compare::Comparison;
use super::numbers::{Numbers, Tensor};
use super::replica::{Replica, set_exponent};
use super::terms::{list, number};
use super::trajectory::{feed, run};

#[test]
fn golden_tms_tied() {
    check("tms");
}

#[test]
fn golden_tms_id_tied() {
    check("tms_id");
}

#[expect(clippy::print_stdout, reason = "the report of a test")]
fn check(name: &str) {
    let (Some(case), Some(numbers)) = (Numbers::open(name), Numbers::open(&format!("{name}.traj")))
    else {
        return;
    };
    let Some(separate) = run(&case, &numbers) else {
        println!("golden {name} tied: has losses that are not here, nothing is compared");
        return;
    };
    let mut tied = separate.clone();
    tied.decomposition.tied = true;
    let (loss, mut expected) = first_step(&separate, &numbers);
    let (tied_loss, gradients) = first_step(&tied, &numbers);

    // As for single steps of a toy.
    let mut comparison = Comparison::new(&format!("{name} tied"), 1e-5);
    comparison.group("step 0");
    let log = &list(&numbers.info, "logs")[0][1];
    let theirs = number(log, "train/loss/total");
    comparison.number("loss of separate parameters", loss, theirs);
    comparison.number("loss", tied_loss, theirs);
    for (own, other) in [
        ("comp.linear1.V", "comp.linear2.U"),
        ("comp.linear1.U", "comp.linear2.V"),
    ] {
        let other = expected.remove(other).expect("a gradient").transposed();
        let own = expected.get_mut(own).expect("a gradient");
        for (own, other) in own.values.iter_mut().zip(other.values) {
            *own += other;
        }
    }
    assert!(
        gradients.keys().eq(expected.keys()),
        "the second of each pair is no parameter"
    );
    for (name, gradient) in gradients {
        comparison.tensor(&name, &gradient.f32(), &expected[&name].values);
    }
    println!("{}", comparison.finish());
}

/// Loss and gradients of the first step after the warm-up.
fn first_step(run: &Run, numbers: &Numbers) -> (f64, BTreeMap<String, Tensor>) {
    let mut replica = Replica::new(run, numbers, "warm.");
    let batch = numbers.get("batch.0");
    let (mut b, front) = replica.front(batch);
    let losses = replica
        .decomposition
        .losses(&mut b, &replica.store, &front, Draws::Inputs)
        .expect("shapes fit");
    let weighted: Vec<_> = losses.iter().map(|loss| (loss.coeff, loss.value)).collect();
    let total = b.weighted_sum(&weighted).expect("scalars");
    b.output("loss", total);
    let slots = replica.slots();
    let values: Vec<_> = slots
        .iter()
        .map(|&slot| b.persistent(&replica.store, slot))
        .collect();
    let gradients = b.gradients(total, &values).expect("all ops have gradients");
    for (&slot, gradient) in slots.iter().zip(gradients) {
        b.output(
            replica.name(slot),
            gradient.expect("every parameter has one"),
        );
    }
    let mut executor = replica.executor(&b, batch);
    feed(&replica, numbers, &mut executor, 0);
    set_exponent(&mut executor, &run.losses, 0.0);
    executor
        .run_and_fetch(&mut replica.store)
        .expect("a processor that works");
    let gradients = slots.iter().map(|&slot| {
        let name = replica.name(slot);
        let values = executor.output(&name, &replica.store);
        let gradient = Tensor {
            dims: replica.store.ty(slot).dims.clone(),
            values: values.iter().map(|&value| value.into()).collect(),
        };
        (name, gradient)
    });
    let loss = executor.scalar_output("loss", &replica.store);
    (loss.into(), gradients.collect())
}
