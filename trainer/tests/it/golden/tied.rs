//! Proper tying: one parameter for `linear1` and, transposed, `linear2`.
//!
//! The reference updates the shared memory twice, so only its first losses can be compared; for the gradient, a run with
//! parameters of their own, whose gradient norms are the reference's, tells what to expect: the sum of both.

use std::collections::BTreeMap;

use super::compare::Comparison;
use super::numbers::Numbers;
use super::replica::Replica;
use super::run_file::{self, list, number};
use super::trajectory::{feed, text};
use crate::harness::Outcome;

pub(super) fn check(name: &str) -> Outcome {
    let (case, numbers) = (
        Numbers::open(name)?,
        Numbers::open(&format!("{name}.traj"))?,
    );
    // Without clipping: the moments are to tell the gradients.
    let separate: Vec<String> = text(&case, &numbers)
        .lines()
        .filter(|line| !line.starts_with("clip_"))
        .map(str::to_owned)
        .collect();
    let separate = separate.join("\n");
    let tied = separate.replace("tied = false", "tied = true");
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
        let columns = numbers.get(&format!("warm.{other}")).dims[1];
        let other = expected.remove(other).expect("a gradient");
        let own = expected.get_mut(own).expect("a gradient");
        let rows = other.len() / columns;
        for (at, own) in own.iter_mut().enumerate() {
            *own += other[at % rows * columns + at / rows];
        }
    }
    assert!(
        gradients.keys().eq(expected.keys()),
        "the second of each pair is no parameter"
    );
    for (name, gradient) in gradients {
        let expected = expected[&name].iter().map(|&value| value.into());
        comparison.tensor(&name, &gradient, &expected.collect::<Vec<f64>>());
    }
    Ok(comparison.finish())
}

/// Loss and gradients of the first step after the warm-up.
fn first_step(text: &str, numbers: &Numbers) -> (f64, BTreeMap<String, Vec<f32>>) {
    let run = run_file::read(text);
    let mut replica = Replica::new(&run, numbers, "warm.");
    let mut replay = replica.replay();
    feed(&replica, numbers, replay.program(), 0);
    let batch = replica.batch(numbers.get("batch.0"));
    replay
        .step(&mut replica.store, &batch, 0)
        .expect("a processor that works");
    let loss = replay.program().scalar_output("loss/total", &replica.store);
    (loss.into(), replica.gradients())
}
