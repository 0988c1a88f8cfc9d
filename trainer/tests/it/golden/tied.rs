//! One summed update of what `linear1` and, transposed, `linear2` share.
//!
//! The reference makes two, so only its first losses can be compared; for the gradient, a run with
//! separate updates, which the trajectory compares with the reference's, tells what to expect: the
//! sum of both.

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
    let summed = separate.replace("\"separate\"", "\"summed\"");
    let (loss, mut expected) = first_step(&separate, &numbers);
    let (summed_loss, gradients) = first_step(&summed, &numbers);

    // As for single steps of a toy.
    let mut comparison = Comparison::new(&format!("{name} tied"), 1e-5);
    comparison.group("step 0");
    let log = &list(&numbers.info, "logs")[0][1];
    let theirs = number(log, "train/loss/total");
    comparison.number("loss with separate updates", loss, theirs);
    comparison.number("loss", summed_loss, theirs);
    for (own, other) in [
        ("comp.linear1.V", "comp.linear2.U"),
        ("comp.linear1.U", "comp.linear2.V"),
    ] {
        let other = expected.remove(other).expect("a gradient");
        let own = expected.get_mut(own).expect("a gradient");
        for (own, other) in own.iter_mut().zip(other) {
            *own += other;
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
    feed(&replica, numbers, replay.given(), 0);
    let batch = replica.batch(numbers.get("batch.0"));
    replay
        .step(&mut replica.store, &batch, 0)
        .expect("a processor that works");
    let loss = replay.output("loss/total", &replica.store)[0];
    (loss.into(), replica.gradients())
}
