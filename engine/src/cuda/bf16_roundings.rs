//! Checks that a bf16 program rounds where it stores in bf16 and nowhere else, op by op.
//!
//! All values of the device are fetched ([`watched`]), and each op is repeated on the CPU from the
//! operands that the device had ([`check`]): results may differ by one rounding. The bound is per
//! op, because whole programs cannot be compared as tightly: one rounding in the other direction
//! changes later ones. At an edge of an importance's sigmoid, in the slope of a small power near
//! zero, or in the sign that an adversary takes, the last bit of a value decides a whole gradient.
//!
//! Relative errors on the reference's small models (`golden`), against f32, measured when importances
//! and their logits were stored in f32:
//!
//! | relative error | here | PyTorch under autocast |
//! |---|---|---|
//! | logits of importances, the worst site of a model | 0.0006 to 0.016 | 0.0013 to 0.026 |
//! | gradients of components, median of a model | 0.005 to 0.031 | 0.008 to 0.035 |
//! | gradients of importance functions, median | 0.006 to 0.046 | 0.009 to 0.038 |
//! | gradients of importance functions, worst | 0.07 to 5.5 | 0.05 to 2.6 |
//!
//! A single rounding before the logits (of weights, an embedding, a norm) causes such a worst case;
//! all roundings after the logits together rarely do. Random numbers of the size of these roundings
//! cause the same, and a residual stream in f32, as under autocast, improves nothing.

use std::sync::Arc;

use half::bf16;

use crate::cpu::{Arena, Executor, Pool};
use crate::cuda::casts::cast;
use crate::cuda::routed_rows::on_cpu::{self, Known, RoutedMask};
use crate::op::{Builder, Home, Node};
use crate::schedule;
use crate::step_parameters::StepParameters;
use crate::store::Store;
use crate::value::{DType, Value};

/// Bound of `|found - expected| / |expected|` in the 2-norm for a bf16 result: rounding changes
/// each element by at most half of its last bit, 2^-8 of it. Measured: 2^-9, at most 2^-8.2.
const STORED: f64 = 1.0 / 256.0;

/// Bound for an f32 result, whose sums have another order. Measured: 3e-7.
const SUMMED: f64 = 1e-5;

/// Bound for the results of attention, which rounds weights and their slopes before it adds them
/// up, and rotated queries and keys before it multiplies them. Measured: 2^-8.
const ATTENDED: f64 = 2.0 * STORED;

/// Bound for a divergence, a sum of numbers that nearly cancel.
const CANCELLED: f64 = 2e-3;

/// The program with all computed values as further outputs, in f32, and these values.
pub(super) fn watched(stored: &Builder) -> (Builder, Vec<Value>) {
    let mut to = stored.with_nodes(stored.nodes.clone());
    let nodes = schedule::order(stored);
    let nodes = nodes.iter().map(|&node| &stored.nodes[node]);
    let values: Vec<Value> = nodes.flat_map(|node| node.outputs.clone()).collect();
    for &value in &values {
        let wide = match to.ty(value).dtype {
            DType::Bf16 => cast(&mut to, value, DType::F32, ""),
            DType::F32 | DType::U32 => value,
        };
        to.output(format!("{value:?}"), wide);
    }
    (to, values)
}

/// Repeats each op of a program from the device's values `made` and its inputs; returns a line
/// about the first op whose results differ by more than one rounding.
pub(super) fn check(
    stored: &Builder,
    inputs: &[(&str, &[u32])],
    made: Known,
    parameters: &StepParameters,
    store: &Store,
) -> Result<(), String> {
    let mut known = made;
    for (value, home) in (0..).map(Value).zip(&stored.homes) {
        let values = match home {
            Home::Persistent(slot) => match stored.ty(value).dtype {
                DType::Bf16 => rounded(&store.read(*slot)),
                DType::F32 | DType::U32 => store.read(*slot).into_owned(),
            },
            Home::Input => {
                let name = stored.inputs.iter().find(|(_, input)| **input == value);
                let given = name.and_then(|(name, _)| inputs.iter().find(|(n, _)| n == name));
                let Some((_, words)) = given else { continue };
                bytemuck::cast_slice(words).to_vec()
            }
            Home::Node(_) => continue,
        };
        known.insert(value, values);
    }
    for node in &stored.nodes {
        // Ops that write to the store have no result; results that no op reads were not computed.
        let is_known = node
            .outputs
            .first()
            .is_some_and(|output| known.contains_key(output));
        if is_known {
            check_one(stored, node, &known, parameters)?;
        }
    }
    Ok(())
}

fn rounded(values: &[f32]) -> Vec<f32> {
    let values = values.iter();
    values.map(|&x| bf16::from_f32(x).to_f32()).collect()
}

fn check_one(
    stored: &Builder,
    node: &Node,
    known: &Known,
    parameters: &StepParameters,
) -> Result<(), String> {
    let results = match node.op.name() {
        "cast" => {
            let operands = node.inputs.iter();
            operands.map(|input| rounded(&known[input])).collect()
        }
        "head_divergence" => head_divergence(stored, node, known),
        _ => on_cpu::repeated(stored, node, known)
            .unwrap_or_else(|| repeated(stored, node, known, parameters)),
    };
    assert_eq!(results.len(), node.outputs.len(), "{:?}", node.op);
    for (output, expected) in node.outputs.iter().zip(results) {
        let off = distance(&known[output], &expected);
        let bound = match (node.op.name(), stored.ty(*output).dtype) {
            ("head_divergence", DType::F32) => CANCELLED,
            ("attention" | "attention_grad", _) => ATTENDED,
            (_, DType::Bf16) => STORED,
            (_, DType::F32 | DType::U32) => SUMMED,
        };
        // NaN fails too.
        if off.is_nan() || off > bound {
            let (op, ty) = (&node.op, stored.ty(*output));
            return Err(format!(
                "{op:?} makes {ty} that is off by {off:.1e}, more than {bound:.1e}, of what the CPU makes of the same"
            ));
        }
    }
    Ok(())
}

/// The product and its divergence with a device's roundings: logits are stored, then replaced by
/// their gradient. Near the target's logits, these two roundings far exceed one of the result.
fn head_divergence(stored: &Builder, node: &Node, known: &Known) -> Vec<Vec<f32>> {
    let of = |settings: &str| format!("{:?}", node.op).contains(settings);
    let input = |index: usize| &*known[&node.inputs[index]];
    // The index of `H`, which `W` and labels follow.
    let at_h = if of("streamed: true") { 1 } else { 2 };
    let [h, w] = [at_h, at_h + 1].map(input);
    let labels = of("labels: true").then(|| input(at_h + 2));
    let bias = of("bias: true").then(|| &*known[node.inputs.last().expect("a bias")]);
    let is_bf16 = stored.ty(node.inputs[at_h]).dtype == DType::Bf16;
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    let stored_as = |x: f64| match is_bf16 {
        true => bf16::from_f32(x as f32).to_f64(),
        false => f64::from(x as f32),
    };
    let rows = stored.ty(node.inputs[at_h]).rows();
    let d = h.len() / rows;
    let columns = w.len() / d;
    let at = |k: usize, column: usize| match of("transposed: true") {
        true => f64::from(w[column * d + k]),
        false => f64::from(w[k * columns + column]),
    };
    let (mut loss, mut entropy, mut counted) = (0.0, 0.0, 0.0);
    let mut gradient = Vec::with_capacity(h.len());
    // Stored logits of a row of hidden values, and their log-sum-exp.
    let made = |hidden: &[f32], row: usize| {
        let hidden = &hidden[row * d..][..d];
        let logit = |column: usize| {
            let sum: f64 = (0..d).map(|k| f64::from(hidden[k]) * at(k, column)).sum();
            stored_as(sum + bias.map_or(0.0, |bias| f64::from(bias[column])))
        };
        let logits: Vec<f64> = (0..columns).map(logit).collect();
        let most = logits
            .iter()
            .fold(f64::NEG_INFINITY, |most, &x| most.max(x));
        let lse = most + logits.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
        (logits, lse)
    };
    for row in 0..rows {
        let (logits, lse) = made(h, row);
        let (target, of_target) = match at_h {
            1 => made(input(0), row),
            _ => {
                let target = &input(0)[row * columns..][..columns];
                let target = target.iter().map(|&t| f64::from(t)).collect();
                (target, f64::from(input(1)[row]))
            }
        };
        let mut slopes = Vec::with_capacity(columns);
        for (&t, &x) in target.iter().zip(&logits) {
            let p = (t - of_target).exp();
            loss += p * (t - x - (of_target - lse)) / rows as f64;
            slopes.push(stored_as((x - lse).exp() - p));
        }
        if let Some(labels) = labels
            && labels[row].to_bits() != u32::MAX
        {
            entropy += lse - logits[labels[row].to_bits() as usize];
            counted += 1.0;
        }
        gradient.extend((0..d).map(|k| {
            let sum: f64 = (0..columns)
                .map(|column| slopes[column] * at(k, column))
                .sum();
            sum / rows as f64
        }));
    }
    let entropy = labels.map(|_| vec![entropy / f64::max(counted, 1.0)]);
    let gradient = of("gradient: true").then_some(gradient);
    let results = [Some(vec![loss]), entropy, gradient].into_iter().flatten();
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    let results = results.map(|values| values.into_iter().map(|x| x as f32).collect());
    results.collect()
}

/// Results of a node on the CPU from the device's operands.
fn repeated(
    stored: &Builder,
    node: &Node,
    known: &Known,
    parameters: &StepParameters,
) -> Vec<Vec<f32>> {
    let mut b = Builder::new();
    b.scalars.clone_from(&stored.scalars);
    let mut given = Vec::new();
    let mask = RoutedMask::of(stored, node, known);
    let mut operand = |value: Value| {
        let (mut ty, mut values) = (stored.ty(value).clone(), known[&value].clone());
        if ty.dtype == DType::Bf16 {
            ty.dtype = DType::F32;
        }
        if let Some(mask) = &mask {
            mask.operand(value, &mut ty, &mut values);
        }
        let name = format!("{value:?}");
        let input = b.input(&name, &ty);
        given.push((name, values));
        input.expect("a value has one type")
    };
    let inputs: Vec<Value> = node.inputs.iter().map(|&value| operand(value)).collect();
    let into = node.into.iter().map(|into| into.map(&mut operand));
    let into: Vec<Option<Value>> = into.collect();
    let outputs = b.node(Arc::clone(&node.op), &inputs, into);
    let outputs = outputs.expect("operands fit as they did");
    for (index, output) in outputs.into_iter().enumerate() {
        b.output(index.to_string(), output);
    }
    let mut executor = Executor::planned(&b, Arc::new(Pool::single()));
    let arena = Arena::new(executor.plan().arena_bytes());
    let mut arena = arena.expect("memory for an op");
    executor.parameters.clone_from(parameters);
    for (name, values) in given {
        if executor.has_input(&name) {
            let words = executor.input_words(&name);
            words.copy_from_slice(bytemuck::cast_slice(&values));
        }
    }
    let mut store = Store::new();
    executor.run(&mut store, &mut arena);
    let made = node.outputs.iter().enumerate().map(|(index, &value)| {
        let made = executor.output(&index.to_string(), &store, &arena);
        let mut made = made.to_vec();
        if let Some(mask) = &mask {
            mask.result(value, &mut made);
        }
        made
    });
    made.collect()
}

/// `|found - expected| / |expected|` in the 2-norm; 0 if both are zero, or NaN at the same places.
fn distance(found: &[f32], expected: &[f32]) -> f64 {
    let (mut off, mut size) = (0.0, 0.0);
    for (&found, &expected) in found.iter().zip(expected) {
        if found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan()) {
            off += f64::from(found - expected).powi(2);
        }
        if expected.is_finite() {
            size += f64::from(expected).powi(2);
        }
    }
    if off == 0.0 { 0.0 } else { (off / size).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::casts::stored;
    use crate::cuda::every_op::{EVEN, EveryOp, RAGGED};
    use crate::cuda::program::Program;
    use crate::cuda::tests::{numbers, replay};

    /// Rounds a number to five of bf16's eight bits.
    fn coarse(x: f32) -> f32 {
        let half = 1 << 18;
        f32::from_bits((x.to_bits() + half) & !((1 << 19) - 1))
    }

    /// Asserts that a program rounds as allowed, and that three bits less of any result are
    /// detected; returns the number of results.
    fn tried(
        program: &Builder,
        (store, inputs): (&Store, &[(&'static str, Vec<u32>)]),
        parameters: &StepParameters,
    ) -> Option<usize> {
        let (all, values) = watched(program);
        let (_, found) = replay(Program::of(&all), store, inputs, parameters)?;
        let made = found[program.outputs.len()..].iter();
        let made: Known = values
            .iter()
            .copied()
            .zip(made.map(|(_, x)| x.clone()))
            .collect();
        let inputs: Vec<(&str, &[u32])> = inputs.iter().map(|(n, words)| (*n, &**words)).collect();
        let check = |made: Known| check(program, &inputs, made, parameters, store);
        assert_eq!(check(made.clone()), Ok(()));
        let mut tried = 0;
        for node in &program.nodes {
            let results = node.outputs.iter();
            let in_bf16 = results.filter(|&&v| program.ty(v).dtype == DType::Bf16);
            for output in in_bf16.filter(|output| made.contains_key(output)) {
                let mut worse = made.clone();
                let values = worse.entry(*output).or_default();
                values.iter_mut().for_each(|x| *x = coarse(*x));
                // Ones and zeros lose no bits.
                if *values == made[output] {
                    continue;
                }
                let line = check(worse).expect_err(node.op.name());
                assert!(line.contains("that is off by"), "{line}");
                tried += 1;
            }
        }
        Some(tried)
    }

    #[test]
    fn every_op_rounds_once_and_three_lost_bits_are_detected() {
        for sizes in [EVEN, RAGGED] {
            let every_op = EveryOp::new(sizes, true);
            let program = stored(&every_op.b);
            let parameters = numbers(&every_op);
            let of = (&every_op.store, &*every_op.inputs);
            let Some(tried) = tried(&program, of, &parameters) else {
                return;
            };
            assert!(tried > 100, "{tried}");
        }
    }
}
