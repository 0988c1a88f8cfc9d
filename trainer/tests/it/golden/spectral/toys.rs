//! The spectral decomposition and Kaufmann attention alone: outputs, and gradients of a product of
//! these with recorded numbers, of parameters and of inputs.

use spd_engine::{Processor, Type};

use super::{GRADIENTS, Subject, VALUES, compare_sums, network, target};
use crate::golden::compare::Comparison;
use crate::golden::numbers::{Numbers, Tensor};
use crate::golden::run_file::{size, texts};
use crate::harness::Outcome;

// S11: compared with PyTorch's autograd; S7: also where the penalty alone is differentiated. K7, K11:
// the gradient of `b` is 0 with two steps, and not with three.
pub(super) const CASES: [&str; 11] = [
    "sd_softmax",
    "sd_l2",
    "sd_random",
    "sd_ortho_only",
    "sd_2x64",
    "sd_1x128",
    "kaufmann",
    "kaufmann_3",
    "kaufmann_nocoords",
    "kaufmann_2x64",
    "kaufmann_1x128",
];

/// Recorded sums, relative to the length of a tensor. Matrices that follow a rule have rank 2, and
/// their products nearly cancel: in f32, NumPy is off by up to 8e-5.
const SUMS: f64 = 1e-4;

pub(super) fn check(case: &str, processor: &Processor) -> Outcome {
    let mut numbers = Numbers::open(&format!("spectral/{case}"))?;
    fill_by_rule(&mut numbers);
    let mut subject = Subject::new(&numbers, "param");
    let [x, c] = ["x", "c"].map(|name| numbers.find(&format!("in.{name}")));
    let given = given(&numbers, x, c);
    let parts: Vec<&Tensor> = x.into_iter().chain(c).chain(&given).collect();
    let features = beside(&parts);

    let input = subject.b.input("input", &Type::f32(&features.dims));
    let input = input.expect("new");
    let (output, penalty) = subject.forward(input);
    let out = if x.is_some() { "y" } else { "phi" };
    let mut terms = Vec::new();
    let cotangent = numbers.find(&format!("cot.{out}"));
    if let Some(cotangent) = cotangent {
        let len = cotangent.values.len();
        let ty = Type::f32(&[len, 1]);
        let column = subject.b.input("cotangent", &ty).expect("new");
        let row = subject.b.reshape(output, &[1, len]).expect("as many");
        let product = subject.b.matmul(row, column).expect("shapes fit");
        terms.push((1.0, subject.b.reshape(product, &[]).expect("one number")));
    }
    if let Some(weight) = numbers.find("cot.loss") {
        terms.push((weight.values[0], penalty));
    }
    let loss = subject.b.weighted_sum(&terms).expect("scalars");
    subject.differentiate(&numbers, loss, Some(input));
    subject.b.output("output", output);
    subject.b.output("penalty", penalty);
    let mut executor = subject.executor_on(processor);
    executor.input("input").copy_from_slice(&features.f32());
    if let Some(cotangent) = cotangent {
        executor
            .input("cotangent")
            .copy_from_slice(&cotangent.f32());
    }
    subject.replay(&mut executor);

    let mut comparison = Comparison::new(case, SUMS);
    let ours = executor.output("output", &subject.store);
    let penalty = executor.output("penalty", &subject.store);
    comparison.group("values");
    compare(
        VALUES,
        &numbers,
        &format!("out.{out}"),
        ours,
        &mut comparison,
    );
    if let Some(sums) = numbers.info.get("out") {
        compare_sums(out, ours, sums, &mut comparison);
    }
    if let Some(theirs) = numbers.find("out.loss") {
        comparison.within(VALUES, "loss", penalty, &theirs.values);
    }
    let tolerance = if case == "sd_ortho_only" {
        5e-5
    } else {
        GRADIENTS
    };
    subject.compare_gradients(&executor, &numbers, (tolerance, &mut comparison));
    let mut gradients = apart(executor.output("input", &subject.store), &parts);
    if given.is_some()
        && let [of_x, of_c] = &mut gradients[..]
    {
        let [x, c] = [&parts[0], &parts[1]].map(|part| part.dims[2]);
        for (of_x, of_c) in of_x.chunks_mut(x).zip(of_c.chunks(c)) {
            of_x.iter_mut().zip(of_c).for_each(|(to, from)| *to += from);
        }
        gradients.truncate(1);
    }
    let names = x.map(|_| "grad.in.x").into_iter().chain(["grad.in.c"]);
    for (name, gradient) in names.zip(&gradients) {
        compare(tolerance, &numbers, name, gradient, &mut comparison);
    }
    Ok(comparison.finish())
}

/// Coordinates of a case without any: the first columns of `x`.
fn given(numbers: &Numbers, x: Option<&Tensor>, c: Option<&Tensor>) -> Option<Tensor> {
    let (Some(x), None) = (x, c) else {
        return None;
    };
    let width = size(&numbers.info["dims"], "M");
    let [rows, positions, d_model] = x.dims[..] else {
        panic!("vectors of positions");
    };
    let vectors = x.values.chunks(d_model);
    Some(Tensor {
        dims: vec![rows, positions, width],
        values: vectors
            .flat_map(|vector| vector[..width].to_vec())
            .collect(),
    })
}

/// Sequences of vectors as rows of features: of each row all of the first, then of the second.
pub(super) fn beside(parts: &[&Tensor]) -> Tensor {
    let rows = parts[0].dims[0];
    let row = |row| {
        parts.iter().flat_map(move |part| {
            let width = part.values.len() / rows;
            part.values[row * width..(row + 1) * width].iter().copied()
        })
    };
    let values: Vec<f64> = (0..rows).flat_map(row).collect();
    Tensor {
        dims: vec![rows, values.len() / rows],
        values,
    }
}

/// The parts of such rows.
fn apart(features: &[f32], parts: &[&Tensor]) -> Vec<Vec<f32>> {
    let rows = parts[0].dims[0];
    let mut from = 0;
    let part = |part: &&Tensor| {
        let width = part.values.len() / rows;
        let columns = from..from + width;
        from += width;
        let rows = features.chunks(features.len() / rows);
        rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
    };
    parts.iter().map(part).collect()
}

/// A tensor, or every 64th of its numbers.
fn compare(
    tolerance: f64,
    numbers: &Numbers,
    name: &str,
    ours: &[f32],
    comparison: &mut Comparison,
) {
    match numbers.find(name) {
        Some(theirs) => comparison.within(tolerance, name, ours, &theirs.values),
        None => {
            let theirs = numbers.get(&format!("{name}.every64"));
            let ours: Vec<f32> = ours.iter().step_by(64).copied().collect();
            comparison.within(tolerance, name, &ours, &theirs.values);
        }
    }
}

/// Parameters that are recorded as a rule: 0.06 sin(0.7 i + 1.3 j + 0.2) for number `i` of the
/// `j`-th.
fn fill_by_rule(numbers: &mut Numbers) {
    if numbers.info.get("parameters").is_none() {
        return;
    }
    let order = texts(&numbers.info["parameters"], "order");
    for tensor in network(&target(&numbers.info)).tensors() {
        let values = match tensor.name.as_str() {
            "a" => vec![0.7],
            "b" => vec![0.8],
            "dt" => vec![0.1],
            name => {
                let j = order
                    .iter()
                    .position(|known| known == name)
                    .expect("listed") as f64;
                let value = |i| 0.06 * (0.7 * f64::from(i) + 1.3 * j + 0.2).sin();
                let all = (0u32..).take(tensor.dims.iter().product());
                all.map(value).collect()
            }
        };
        let dims = tensor.dims.clone();
        let recorded = Tensor { dims, values };
        numbers
            .tensors
            .insert(format!("param.{}", tensor.name), recorded);
    }
}
