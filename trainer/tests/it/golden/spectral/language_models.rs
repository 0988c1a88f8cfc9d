//! Language models: logits, loss and gradients, and which positions a change of the last token
//! reaches.

use spd_engine::Type;

use super::{GRADIENTS, Subject, VALUES};
use crate::golden::compare::Comparison;
use crate::golden::numbers::Numbers;
use crate::harness::Outcome;

pub(super) const CASES: [&str; 10] = [
    "nmgpt",
    "nmgpt_plain",
    "byte_embedding_causal",
    "byte_embedding_circular",
    "byte_loop",
    "byte_loop_causal_mixing",
    "byte_spectral_causal",
    "byte_spectral_circular",
    "byte_enhanced",
    "byte_traditional",
];

/// Logits, loss, and gradients of all parameters.
pub(super) fn check(case: &str) -> Outcome {
    let numbers = Numbers::open(&format!("spectral/{case}"))?;
    let mut subject = Subject::new(&numbers, "param");
    let tokens = numbers.get("in.tokens");
    let input = subject.b.input("tokens", &Type::u32(&tokens.dims));
    let input = input.expect("new");
    let (logits, penalty) = subject.forward(input);
    let network = subject.network.clone();
    let ce = network.loss(&mut subject.b, input, logits);
    let ce = ce.expect("shapes fit");
    let loss = subject.b.weighted_sum(&[(1.0, ce), (1.0, penalty)]);
    let loss = loss.expect("scalars");
    subject.differentiate(&numbers, loss, None);
    for (name, value) in [("logits", logits), ("ce", ce), ("loss", loss)] {
        subject.b.output(name, value);
    }
    let mut executor = subject.executor();
    executor.input_u32("tokens").copy_from_slice(&tokens.u32());
    let targets = numbers.get("in.targets").u32();
    executor.input_u32("labels").copy_from_slice(&targets);
    subject.replay(&mut executor);

    let mut comparison = Comparison::new(case, VALUES);
    comparison.group("values");
    for name in ["logits", "ce", "loss"] {
        // Without a penalty the cross-entropy is the loss.
        if let Some(theirs) = numbers.find(&format!("out.{name}")) {
            comparison.tensor(name, executor.output(name, &subject.store), &theirs.values);
        }
    }
    // A bias whose gradient nearly cancels.
    let tolerance = if case == "nmgpt_plain" {
        2e-4
    } else {
        GRADIENTS
    };
    subject.compare_gradients(&executor, &numbers, (tolerance, &mut comparison));
    Ok(comparison.finish())
}

/// The probe: a change of the last token changes no bit before it, unless the network leaks (N2,
/// B14).
pub(super) fn suffix(case: &str) -> Outcome {
    let numbers = Numbers::open(&format!("spectral/{case}"))?;
    let leak = Numbers::open("spectral/leak")?;
    let mut subject = Subject::new(&numbers, "param");
    let tokens = leak.get(&format!("in.{case}.tokens"));
    let changed = leak.get(&format!("in.{case}.changed"));
    let input = subject.b.input("tokens", &Type::u32(&tokens.dims));
    let (logits, _) = subject.forward(input.expect("new"));
    subject.b.output("logits", logits);
    let mut executor = subject.executor();
    let mut logits = |tokens: &[u32]| {
        executor.input_u32("tokens").copy_from_slice(tokens);
        subject.replay(&mut executor);
        executor.output("logits", &subject.store).to_vec()
    };
    let (before, after) = (logits(&tokens.u32()), logits(&changed.u32()));
    let theirs = &leak.get(&format!("out.{case}.change")).values;
    let vocabulary = before.len() / theirs.len();
    let changes = before.chunks(vocabulary).zip(after.chunks(vocabulary));
    let changes = changes.map(|(before, after)| {
        let changes = before.iter().zip(after).map(|(a, b)| (a - b).abs());
        changes.fold(0.0, f32::max)
    });
    let changes: Vec<f32> = changes.collect();
    let reached: Vec<bool> = changes.iter().map(|&change| change > 0.0).collect();
    let expected: Vec<bool> = theirs.iter().map(|&change| change > 0.0).collect();
    assert_eq!(
        reached, expected,
        "{case}: positions that a change of the last token reaches"
    );
    let label = &leak.info["outcomes"][case]["label"];
    assert_eq!(
        subject.network.leaks(),
        label == "LEAKY",
        "{case} is {label}"
    );
    // Differences of logits are as exact as these.
    let mut comparison = Comparison::new(&format!("{case} suffix"), 1e-4);
    comparison.group("changes");
    comparison.tensor("change", &changes, theirs);
    Ok(comparison.finish())
}
