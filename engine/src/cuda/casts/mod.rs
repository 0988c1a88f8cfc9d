//! How a device stores what a program computes: in f32, or in bf16 what can be.
//!
//! A program is written down once, in f32, gradients and all. [`stored`] makes of it the program of a device that computes in
//! bf16: it looks at who reads each value, stores in bf16 what all of them [take](crate::Op::formats), and puts a [`Cast`]
//! before products that would read something else. Arithmetic is f32 everywhere; what is bf16 is what crosses memory and what
//! tensor cores multiply.
//!
//! - **What depends on the batch** may be stored in bf16: activations and masked activations, norms, attention, logits over
//!   a vocabulary, and the gradients of all of them. What is made of parameters alone is computed as they are kept: the weight
//!   deltas of faithfulness, their products and their gradients are f32.
//! - **What an update, a norm, an importance or the host reads** is f32: gradients of parameters and of an adversary's sources,
//!   logits of importances, whatever is said of a whole row, and the outputs of the program. So are vectors and scalars.
//! - **A weight** that products read is rounded once a replay, whoever reads it; one that is frozen ([`Store::freeze`]) lies
//!   on the device in bf16 too, and costs a replay nothing.
//!
//! Values that are added to each other in place are of one type, and what is added up to an f32 is f32.
//!
//! On a processor everything is stored in f32, and products that depend on the batch round their factors as they lay them out
//! ([`rounding`](crate::rounding)), a frozen right one once for all replays: what would be saved of its memory traffic is the
//! smaller part there, and every op but those products is as exact as in f32.
//!
//! [`Store::freeze`]: crate::Store::freeze

mod cast;

use std::collections::BTreeMap;
use std::sync::Arc;

use cast::Cast;

use crate::cuda::device_op::{DeviceGraph, DeviceNode, DeviceOp};
use crate::graph::Home;
use crate::op::Builder;
use crate::precision::Format::{AsResult, Either, Factor, Full};
use crate::precision::{Format, Precision};
use crate::rounding::{at, of_batch, operands};
use crate::value::{DType, Type, Value};

/// Of each value whether it has to be stored as it is; `depends` says which may be rounded at all.
fn exact(from: &Builder, depends: &[bool], read: impl Iterator<Item = Value>) -> Vec<bool> {
    let mut exact = vec![true; from.types.len()];
    for node in &from.nodes {
        let [_, given] = node.op.formats();
        for (index, &output) in node.outputs.iter().enumerate() {
            let ty = from.ty(output);
            let may = ty.dtype == DType::F32 && ty.dims.len() > 1 && depends[output.index()];
            exact[output.index()] = at(given, index) == Full || !may;
        }
    }
    for node in &from.nodes {
        for (value, _) in operands(node).filter(|&(_, format)| format == Full) {
            exact[value.index()] = true;
        }
    }
    for value in read.chain(from.all_reduced.iter().copied()) {
        exact[value.index()] = true;
    }
    // What has to be equal spreads until nothing changes.
    let mut changed = true;
    while changed {
        changed = false;
        let mut set = |value: Value, exact: &mut Vec<bool>| {
            changed |= !std::mem::replace(&mut exact[value.index()], true);
        };
        for node in from.nodes.iter().rev() {
            for (&output, into) in node.outputs.iter().zip(&node.into) {
                let Some(into) = *into else { continue };
                if exact[output.index()] || exact[into.index()] {
                    set(output, &mut exact);
                    set(into, &mut exact);
                }
            }
            if node.op.carries() && exact[node.outputs[0].index()] {
                for &value in &node.inputs {
                    set(value, &mut exact);
                }
            }
        }
    }
    exact
}

/// The program of a device that stores in bf16 what can be; values keep their numbers.
pub(crate) fn stored(from: &Builder) -> DeviceGraph {
    let depends = of_batch(from);
    let outputs = from.outputs.iter().map(|&(_, output)| output);
    let exact = exact(from, &depends, outputs);
    rewrite(from, &exact, |value, format| {
        format == Factor && depends[value.index()]
    })
}

/// The program with everything in bf16 that a kernel takes or gives in it, for tests of kernels: leaves are rounded
/// wherever that is so, and outputs are widened behind the end.
#[cfg(test)]
pub(crate) fn rounded_wherever_possible(from: &Builder) -> DeviceGraph {
    let exact = exact(from, &vec![true; from.types.len()], std::iter::empty());
    let mut to = rewrite(from, &exact, |_, format| matches!(format, Factor | Either));
    for index in 0..to.outputs.len() {
        let value = to.outputs[index].1;
        if to.ty(value).dtype == DType::Bf16 {
            to.outputs[index].1 = cast(&mut to, value, DType::F32, "");
        }
    }
    to
}

/// The program with what is not `exact` in bf16. A node that `rounds` any of its operands by their formats takes all of those in
/// bf16.
fn rewrite(from: &Builder, exact: &[bool], rounds: impl Fn(Value, Format) -> bool) -> DeviceGraph {
    let mut to: DeviceGraph = from.with_nodes(Vec::new());
    // What is to be rounded is, once.
    to.precision = Precision::F32;
    for (ty, _) in to.types.iter_mut().zip(exact).filter(|(_, exact)| !**exact) {
        ty.dtype = DType::Bf16;
    }
    let mut rounded: BTreeMap<Value, Value> = BTreeMap::new();
    for node in &from.nodes {
        let product =
            operands(node).any(|(value, format)| format == Factor && rounds(value, format));
        let inputs = operands(node).map(|(value, format)| {
            let wanted = match format {
                Full => false,
                // Labels are none, where they stand.
                Factor => product && from.ty(value).dtype != DType::U32,
                // A leaf; what a node gives is of the type it should be.
                Either => {
                    let leaf = !matches!(from.homes[value.index()], Home::Node(_));
                    leaf && from.ty(value).dtype == DType::F32 && rounds(value, format)
                }
                AsResult => !exact[node.outputs[0].index()],
            };
            if !wanted || !exact[value.index()] {
                return value;
            }
            *rounded
                .entry(value)
                .or_insert_with(|| round(&mut to, value, node.part))
        });
        let inputs = inputs.collect();
        to.append(DeviceNode {
            inputs,
            ..node.by(DeviceOp::Op(Arc::clone(&node.op)))
        });
    }
    to
}

/// A value in bf16: where it lies already, or by a [`Cast`].
fn round(to: &mut DeviceGraph, value: Value, part: &'static str) -> Value {
    match to.homes[value.index()] {
        Home::Persistent(slot) if to.frozen.contains(&slot) => {
            let ty = Type {
                dtype: DType::Bf16,
                dims: to.ty(value).dims.clone(),
            };
            to.value(ty, Home::Persistent(slot))
        }
        _ => cast(to, value, DType::Bf16, part),
    }
}

pub(crate) fn cast(to: &mut DeviceGraph, value: Value, dtype: DType, part: &'static str) -> Value {
    let dims = to.ty(value).dims.clone();
    let cast = to.value(Type { dtype, dims }, Home::Node(to.nodes.len()));
    to.append(DeviceNode {
        op: DeviceOp::rewritten(Cast),
        inputs: vec![value],
        into: Vec::new(),
        outputs: vec![cast],
        eager: false,
        part,
    });
    cast
}

#[cfg(test)]
mod tests;
