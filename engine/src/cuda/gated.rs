//! Masks that compute importances from logits, so that a step neither stores importances nor reads
//! their gradient again.
//!
//! ```text
//! z -> importance_gates -> g, sums, l0
//! a, g -> masked -> h                            becomes   a, z -> masked -> h, sums, l0
//! gh, a, g -> masked_grad -> ga, gg              becomes   gh, a, z, gsums -> masked_logits_grad -> ga, gz
//! z, gg, gsums -> importance_gates_grad -> gz
//! ```
//!
//! Importances qualify if they have no noise, are stored as their logits are, and only masks read
//! them. The first mask gives the sums, if nothing else that it reads is computed from sums. The last
//! mask whose gradient reaches them gives the gradient of the logits, because the rule of the lower
//! sigmoid reads the sum of all.

use std::sync::Arc;

use super::readers::Readers;
use crate::op::{Builder, Node, Op, op};
use crate::ops::importance::gates::ImportanceGatesGrad;
use crate::ops::site::masked::{self, MaskedGrad};
use crate::ops::{Gates, ImportanceGates, LogitNoise, Masked};
use crate::schedule;
use crate::value::Value;

/// A mask of logits, with their penalty sums and L0.
#[derive(Debug, PartialEq)]
struct MaskedWithSums(Masked, ImportanceGates);

impl Op for MaskedWithSums {
    op! {
        name "masked_with_sums"; of_devices;
        cuda(self) masked::cuda::with_sums(&self.0, &self.1);
        flops(self, inputs) self.1.flops(&inputs[1..]);
        expensive_ops(self, inputs) self.0.expensive_ops(inputs);
    }
}

/// A mask, or its gradients, with logits in the place of importances.
#[derive(Debug, PartialEq)]
struct OfLogits<O>(O, Gates);

impl Op for OfLogits<Masked> {
    op! {
        name "masked"; of_devices;
        cuda(self) masked::cuda::value(&self.0, Some(self.1));
        untouched_bytes(self, inputs, _outputs, _adds) self.0.unlisted_bytes(inputs);
        expensive_ops(self, inputs) self.0.expensive_ops(inputs);
    }
}

impl Op for OfLogits<MaskedGrad> {
    op! {
        name "masked_grad"; of_devices;
        cuda(self) masked::cuda::gradient(&self.0, Some(self.1));
        expensive_ops(self, inputs) self.0.expensive_ops(inputs);
    }
}

/// Gradients of a mask with respect to activations and logits.
#[derive(Debug, PartialEq)]
pub(super) struct LogitsGrad {
    of: MaskedGrad,
    gates: ImportanceGates,
    /// Whether importances have a gradient from other masks, and the sums have one.
    others: [bool; 2],
}

impl Op for LogitsGrad {
    op! {
        name "masked_logits_grad"; of_devices;
        cuda(self) masked::cuda::to_logits(&self.of, &self.gates, self.others);
        flops(self, inputs) 8 * inputs[0].len() as u64;
        expensive_ops(self, inputs) self.of.expensive_ops(inputs);
    }
}

/// Computes importances where masks read them, wherever that is possible; values keep their
/// numbers.
pub(super) fn gated(from: &Builder) -> Builder {
    let readers = Readers::new(from);
    let of_sums = of_sums(from);
    let mut nodes: Vec<Option<Node>> = from.nodes.iter().cloned().map(Some).collect();
    for (index, node) in from.nodes.iter().enumerate() {
        let Some(of) = node.op.get::<ImportanceGates>() else {
            continue;
        };
        let (z, g) = (node.inputs[0], node.outputs[0]);
        let masks = &readers.of[g.index()];
        let qualifies = of.noise == LogitNoise::None
            && from.ty(z).dtype == from.ty(g).dtype
            && !readers.keep(g)
            && masks.iter().all(|&mask| reads_at(&from.nodes[mask], g));
        let Some(&at) = masks.first().filter(|_| qualifies) else {
            continue;
        };
        let first = &from.nodes[at];
        let Some(mask) = first.op.get::<Masked>() else {
            continue;
        };
        let mut others = first.inputs.iter().filter(|&&input| input != g);
        if others.any(|input| of_sums[input.index()]) {
            continue;
        }
        for &mask in masks {
            nodes[mask] = Some(of_logits(&from.nodes[mask], of.gates, [g, z]));
        }
        nodes[index] = None;
        nodes[at] = Some(Node {
            op: Arc::new(MaskedWithSums(*mask, *of)),
            inputs: with(&first.inputs, [g, z]),
            outputs: [&first.outputs[..], &node.outputs[1..]].concat(),
            ..first.clone()
        });
        for &last in &readers.of[z.index()] {
            if let Some((mask, both)) = with_gates(&readers, from, last, [g, z]) {
                nodes[mask] = Some(both);
                nodes[last] = None;
            }
        }
    }
    from.with_nodes(nodes.into_iter().flatten().collect())
}

/// Whether each value is computed from penalty sums or L0.
fn of_sums(from: &Builder) -> Vec<bool> {
    let mut found = vec![false; from.types.len()];
    for index in schedule::order(from) {
        let node = &from.nodes[index];
        let mut read = node.inputs.iter().chain(node.into.iter().flatten());
        let reads = read.any(|value| found[value.index()]);
        let makes = usize::from(!reads && node.op.is::<ImportanceGates>());
        for output in &node.outputs[makes..] {
            found[output.index()] = reads || makes == 1;
        }
    }
    found
}

/// Whether a node is a mask, or its gradients, that reads `g` as importances alone.
fn reads_at(node: &Node, g: Value) -> bool {
    let at = match (node.op.get::<Masked>(), node.op.get::<MaskedGrad>()) {
        (Some(masked), _) => masked.importance(0),
        (_, Some(grad)) => grad.of.importance(1),
        _ => None,
    };
    let read = (0..node.inputs.len()).filter(|&index| node.inputs[index] == g);
    read.eq(at)
}

/// The same values with another in the place of one.
fn with(values: &[Value], [old, new]: [Value; 2]) -> Vec<Value> {
    let values = values.iter();
    values
        .map(|&value| if value == old { new } else { value })
        .collect()
}

fn of_logits(node: &Node, gates: Gates, of: [Value; 2]) -> Node {
    let op: Arc<dyn Op> = match (node.op.get::<Masked>(), node.op.get::<MaskedGrad>()) {
        (Some(masked), _) => Arc::new(OfLogits(*masked, gates)),
        (_, Some(grad)) => Arc::new(OfLogits(*grad, gates)),
        _ => unreachable!("a mask or its gradients"),
    };
    Node {
        op,
        inputs: with(&node.inputs, of),
        ..node.clone()
    }
}

/// The index of the last mask whose gradient reaches importances, and the node that gives the
/// gradient of their logits in the place of it and of the node `last`.
fn with_gates(
    readers: &Readers,
    from: &Builder,
    last: usize,
    [g, z]: [Value; 2],
) -> Option<(usize, Node)> {
    let node = &from.nodes[last];
    let &ImportanceGatesGrad {
        forward,
        of_importance,
        of_sums,
    } = node.op.get()?;
    let gg = *node.inputs.get(1).filter(|_| of_importance)?;
    let mask = from.maker(gg)?;
    let grad = &from.nodes[mask];
    let of = *grad.op.get::<MaskedGrad>()?;
    let at = usize::from(of.of_importance_alone()?);
    let sums = node.inputs.get(2).copied().filter(|_| of_sums);
    let qualifies = reads_at(grad, g)
        && grad.outputs.get(at) == Some(&gg)
        && readers.only(gg) == Some(last)
        && node.into.iter().all(Option::is_none)
        && sums.is_none_or(|sums| !needs(from, sums, mask));
    if !qualifies {
        return None;
    }
    let mut into = grad.into.clone();
    let before = into.get_mut(at).and_then(Option::take);
    let mut inputs = with(&grad.inputs, [g, z]);
    inputs.extend(before.into_iter().chain(sums));
    let op = LogitsGrad {
        of,
        gates: forward,
        others: [before.is_some(), sums.is_some()],
    };
    let both = Node {
        op: Arc::new(op),
        inputs,
        outputs: with(&grad.outputs, [gg, node.outputs[0]]),
        into,
        ..grad.clone()
    };
    Some((mask, both))
}

/// Whether a value is computed from a result of a node.
fn needs(from: &Builder, value: Value, node: usize) -> bool {
    let mut seen = vec![false; from.nodes.len()];
    let mut left = vec![value];
    while let Some(value) = left.pop() {
        if let Some(maker) = from.maker(value)
            && !std::mem::replace(&mut seen[maker], true)
        {
            let made = &from.nodes[maker];
            left.extend(made.inputs.iter().chain(made.into.iter().flatten()));
        }
    }
    seen[node]
}

#[cfg(test)]
pub(super) mod tests {
    use spd_draws::{Purpose, Stream};

    use super::*;
    use crate::cuda::routed_rows::on_device;
    use crate::cuda::tests::agree;
    use crate::op::Builder;
    use crate::ops::oracle::random;
    use crate::ops::{Draw, Mask, MaskValues, Penalty};
    use crate::step_parameters::StepParameters;
    use crate::store::Store;

    /// The gradients of a linear layer of logits, with a bias, and of activations, for a penalty
    /// and for as many masks as there are of `masks`; the first importances are fetched if
    /// `fetched`.
    pub(crate) fn program(
        gates: Gates,
        c: usize,
        masks: &[Mask],
        fetched: bool,
    ) -> (Builder, Store) {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let mut leaf = |b: &mut Builder, name: &str, dims: &[usize]| {
            let values = random(dims, name.len() as u64).values;
            let slot = store.add(name, dims, values);
            b.persistent(&store, slot)
        };
        let x = leaf(&mut b, "x", &[70, 5]);
        let weights = [
            leaf(&mut b, "of logits", &[5, c]),
            leaf(&mut b, "bias", &[c]),
            leaf(&mut b, "of activations", &[5, c]),
        ];
        let z = b.linear_io(x, weights[0], Some(weights[1])).unwrap();
        let a = b.matmul(x, weights[2]).unwrap();
        let op = ImportanceGates {
            gates,
            noise: LogitNoise::None,
            penalty: Some((Penalty::Power, b.step_scalar("p"))),
            alive: 0.0,
        };
        let found = b.importance_gates(op, z, None).unwrap();
        let mut terms = vec![(0.1, b.sum_squares(found.penalty_sums).unwrap())];
        for &mask in masks {
            let with = MaskValues {
                mask,
                importance: Some(found.importance),
                given: (mask == Mask::Between(Draw::Given)).then_some(found.penalty_sums),
                delta: None,
                route: None,
            };
            let h = b.masked(a, &with).unwrap();
            terms.push((1.0, b.sum_squares(h).unwrap()));
        }
        let loss = b.weighted_sum(&terms).unwrap();
        let gradients = b.gradients(loss, &weights).unwrap();
        for (name, gradient) in ["of logits", "bias", "of activations"]
            .iter()
            .zip(gradients)
        {
            b.output(*name, gradient.unwrap());
        }
        b.output("active", found.active);
        if fetched {
            b.output("importance", found.importance);
        }
        (b, store)
    }

    const ONE: [Mask; 1] = [Mask::Importance];

    fn two() -> [Mask; 2] {
        let stream = |site| Stream::new(Purpose::Source, 1, site);
        [1, 2].map(|site| Mask::Between(Draw::Uniform(stream(site))))
    }

    fn names(b: &Builder, like: &str) -> Vec<&'static str> {
        let names = b.nodes.iter().map(|node| node.op.name());
        names.filter(|name| name.contains(like)).collect()
    }

    #[test]
    fn importances_that_masks_alone_read_are_not_stored() {
        for masks in [&ONE[..], &two()] {
            let (b, _) = program(Gates::LeakyHard, 132, masks, false);
            let b = gated(&on_device(&b));
            assert_eq!(names(&b, "importance_"), [""; 0]);
            // Only the last gradient reaches the logits: the rule of the sigmoid reads their sum.
            let mut made = vec!["masked_with_sums"];
            made.extend(vec!["masked_grad"; masks.len() - 1]);
            made.push("masked_logits_grad");
            assert_eq!(names(&b, "masked_"), made);
        }
    }

    #[test]
    fn importances_that_are_fetched_are_stored() {
        let (b, _) = program(Gates::LeakyHard, 36, &ONE, true);
        let b = gated(&on_device(&b));
        let names = names(&b, "importance");
        assert_eq!(names, ["importance_gates", "importance_gates_grad"]);
    }

    #[test]
    fn importances_are_stored_for_a_mask_that_reads_their_sums() {
        let (b, _) = program(Gates::LeakyHard, 36, &[Mask::Between(Draw::Given)], false);
        let b = gated(&on_device(&b));
        let names = names(&b, "importance");
        assert_eq!(names, ["importance_gates", "importance_gates_grad"]);
    }

    // Sums of 70 products in another order, and two factors with a power, each within 4e-6.
    #[test]
    fn gradients_of_logits_are_those_of_the_cpu() {
        let parameters = StepParameters {
            scalars: vec![0.7],
            ..StepParameters::default()
        };
        for gates in [Gates::LeakyHard, Gates::SwishHard] {
            // Rows of whole vectors, and others.
            for (c, masks) in [(132, &ONE[..]), (36, &two()), (37, &two())] {
                let (b, store) = program(gates, c, masks, false);
                agree(&b, &store, &[], &parameters, 3e-5);
            }
        }
    }
}
