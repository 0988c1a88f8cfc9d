//! Storage types on a device: f32, or bf16 where possible.
//!
//! A program is built in f32, with its gradients. [`stored`] derives the program of a bf16 device:
//! it looks at all readers of each value, stores in bf16 the values that all of them
//! [accept](crate::Op::formats), and inserts a [`Cast`] before products that would read f32.
//! Arithmetic is always f32; bf16 is only what memory traffic and tensor cores see.
//!
//! - **Values that depend on the batch** may be bf16: activations and masked activations, norms,
//!   attention, importances and their logits, logits over a vocabulary, and the gradients of all of
//!   them. A product of weights that [stands](crate::association) for products with the batch is
//!   as one of these. Other values of parameters alone stay f32: the weight deltas of faithfulness,
//!   their products and their gradients.
//! - **Values that an update, a norm or the host reads** are f32: gradients of parameters and of an
//!   adversary's sources, values for a whole row, outputs of the program. So are vectors and
//!   scalars.
//! - **A weight** that products read is rounded once in a replay for all readers, in one launch with
//!   all other weights. A frozen weight ([`Store::freeze`]) is also kept in bf16 on the device, and
//!   costs a replay nothing.
//!
//! Values that are added in place have one type; anything added to an f32 is f32.
//!
//! A CPU stores everything in f32. Its products that depend on the batch round their factors while
//! packing them ([`rounding`](crate::rounding)), a frozen right factor once for all replays: bf16
//! storage would save little of a CPU's memory traffic, and all other ops stay as exact as in f32.
//!
//! [`Store::freeze`]: crate::Store::freeze

mod cast;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cast::Cast;

use crate::cuda::routed_rows::on_device;
use crate::op::{Builder, Home, Node};
use crate::precision::Format::{AsResult, Either, Factor, Full};
use crate::precision::{Format, Precision};
use crate::rounding::{at, of_batch, operands, rounds};
use crate::schedule;
use crate::value::{DType, Type, Value};

/// Whether each value must keep its type; `depends` says which values may be rounded at all.
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
    // Equal types spread along in-place additions until nothing changes.
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
        // A value that is made again is stored as the first time.
        for &(copy, of) in &from.copies {
            if exact[copy.index()] || exact[of.index()] {
                set(copy, &mut exact);
                set(of, &mut exact);
            }
        }
    }
    exact
}

/// The program of a bf16 device; values keep their numbers.
pub(crate) fn stored(from: &Builder) -> Builder {
    let depends = of_batch(from);
    let outputs = from.outputs.iter().map(|&(_, output)| output);
    let exact = exact(from, &depends, outputs);
    rewrite(from, &exact, |node, format| {
        format == Factor && rounds(from, &depends, node)
    })
}

/// The program with bf16 for every operand and result that any kernel accepts in bf16, to test
/// kernels: leaves are rounded, and outputs are widened at the end.
#[cfg(test)]
pub(crate) fn rounded_wherever_possible(from: &Builder) -> Builder {
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

/// The program with bf16 for all values that are not `exact`. A node takes those of its operands in
/// bf16 whose format it `rounds`.
fn rewrite(from: &Builder, exact: &[bool], rounds: impl Fn(&Node, Format) -> bool) -> Builder {
    let mut to = from.with_nodes(Vec::new());
    // The rewritten program needs no further rounding.
    to.precision = Precision::F32;
    for (ty, _) in to.types.iter_mut().zip(exact).filter(|(_, exact)| !**exact) {
        ty.dtype = DType::Bf16;
    }
    // Operands of a node, and whether it takes them rounded.
    let wanted = |node: &Node| {
        let product = operands(node).any(|(_, format)| format == Factor && rounds(node, format));
        let wanted = operands(node).map(|(value, format)| {
            let wanted = match format {
                Full => false,
                // Labels are u32.
                Factor => product && from.ty(value).dtype != DType::U32,
                // Only leaves need a cast: results already have the right type.
                Either => {
                    let leaf = from.maker(value).is_none();
                    leaf && from.ty(value).dtype == DType::F32 && rounds(node, format)
                }
                AsResult => !exact[node.outputs[0].index()],
            };
            (value, wanted && exact[value.index()])
        });
        wanted.collect::<Vec<_>>()
    };
    let mut rounded = round_weights(&mut to, from, wanted);
    for node in &from.nodes {
        let inputs = wanted(node).into_iter().map(|(value, wanted)| {
            let mut round = || round(&mut to, value, node.part);
            match wanted {
                true => *rounded.entry(value).or_insert_with(&mut round),
                false => value,
            }
        });
        let inputs = inputs.collect();
        to.append(Node {
            inputs,
            ..node.clone()
        });
    }
    on_device(&to)
}

/// Rounds in one op all weights that the program reads in bf16, except frozen ones: a launch for
/// each would take longer than most weights do.
fn round_weights(
    to: &mut Builder,
    from: &Builder,
    wanted: impl Fn(&Node) -> Vec<(Value, bool)>,
) -> BTreeMap<Value, Value> {
    let results = from.nodes.iter().flat_map(|node| &node.outputs);
    // Results in the store are rounded after they are made.
    let mut seen: BTreeSet<Value> = results.copied().collect();
    let is_weight = |value: Value| match from.homes[value.index()] {
        Home::Persistent(slot) => !from.frozen.contains(&slot),
        Home::Input | Home::Node(_) => false,
    };
    let mut part = None;
    let mut weights: Vec<Value> = Vec::new();
    for node in schedule::order(from) {
        let node = &from.nodes[node];
        for (value, _) in wanted(node).into_iter().filter(|(_, wanted)| *wanted) {
            if is_weight(value) && seen.insert(value) {
                part.get_or_insert(node.part);
                weights.push(value);
            }
        }
    }
    let Some(part) = part else {
        return BTreeMap::new();
    };
    let types = weights.iter().map(|&weight| Type {
        dtype: DType::Bf16,
        dims: from.ty(weight).dims.clone(),
    });
    let rounded = casts(to, &weights, types.collect(), part);
    weights.into_iter().zip(rounded).collect()
}

/// A value in bf16: itself, or its [`Cast`].
fn round(to: &mut Builder, value: Value, part: &'static str) -> Value {
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

/// A value in another type.
pub(crate) fn cast(to: &mut Builder, value: Value, dtype: DType, part: &'static str) -> Value {
    let dims = to.ty(value).dims.clone();
    cast_to(to, value, Type { dtype, dims }, part)
}

/// A value in another type, whose dimensions may be longer.
pub(super) fn cast_to(to: &mut Builder, value: Value, ty: Type, part: &'static str) -> Value {
    casts(to, &[value], vec![ty], part)[0]
}

/// Values in other types, by one op.
fn casts(to: &mut Builder, values: &[Value], types: Vec<Type>, part: &'static str) -> Vec<Value> {
    let types = types.into_iter();
    let casts: Vec<Value> = types
        .map(|ty| to.value(ty, Home::Node(to.nodes.len())))
        .collect();
    to.append(Node {
        op: Arc::new(Cast),
        inputs: values.to_vec(),
        into: Vec::new(),
        outputs: casts.clone(),
        eager: false,
        part,
    });
    casts
}

#[cfg(test)]
mod tests;
