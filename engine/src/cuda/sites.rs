//! Finds masked sites in a bf16 program, and fuses those that are chosen into one op each.
//!
//! ```text
//! x V  ->  masked  ->  times U                          becomes   Site
//! G U^T  ->  gradient of the mask  ->  times V^T        becomes   SiteGrad
//! masked^T G,  x^T (gradient of the masked)             become    SiteSums
//! ```
//!
//! A site qualifies only if no other op reads its intermediates: passes with the same input share
//! `x V`, so a shared one stays. Forward and backward of a site are chosen together, because
//! intermediates that forward does not write cannot be read in backward.

use crate::cuda::device_op::{DeviceGraph, DeviceNode, DeviceOp};
use crate::cuda::site::{Site, SiteGrad, SiteSums};
use crate::derivation::SiteInputs;
use crate::graph::Home;
use crate::ops::site::masked::MaskedGrad;
use crate::ops::site::routed_matmul::Kind;
use crate::ops::{Masked, MatMul, RoutedMatMul, SiteOutput};
use crate::schedule;
use crate::value::{DType, Type, Value};

/// Role of an op in a site.
#[derive(Debug, Clone, Copy)]
pub(super) enum SitePart {
    /// `A W`: a product over rows. `W` may be stored transposed, and a route may follow the
    /// factors.
    Rows {
        /// Whether `W` is stored `[n, k]`.
        transposed: bool,
        /// Whether a route selects the rows of the result.
        routed: bool,
    },
    /// `A^T B`.
    Sums,
    /// The mask's application.
    Masked(Masked),
    /// Gradients of the mask: whether those of activations, importances and given draws are
    /// computed, each per position.
    MaskedGrad(Masked, [bool; 3]),
    /// The product after the mask, with a share of the clean output.
    Output(SiteOutput),
}

/// The role of an op in a site, if it can have one.
pub(super) fn part(op: &DeviceOp, inputs: &[&Type]) -> Option<SitePart> {
    if let Some(op) = op.get::<MatMul>() {
        let transposed = op.b_transposed;
        let rows = SitePart::Rows {
            transposed,
            routed: false,
        };
        let part = match (op.a_transposed, transposed) {
            (false, _) => Some(rows),
            (true, false) => Some(SitePart::Sums),
            (true, true) => None,
        };
        return part.filter(|_| op.alpha.to_bits() == 1f32.to_bits());
    }
    if let Some(op) = op.get::<RoutedMatMul>() {
        // Routed rows of a single matrix are compacted; on a device they become rows of zeros,
        // which the mask produces too.
        return (op.first != op.second).then_some(match op.kind {
            Kind::Rows { transposed } => SitePart::Rows {
                transposed,
                routed: op.second,
            },
            Kind::Sums => SitePart::Sums,
        });
    }
    if let Some(op) = op.get::<MaskedGrad>() {
        return op
            .each(inputs)
            .map(|wants| SitePart::MaskedGrad(op.of, wants));
    }
    let masked = op.get().copied().map(SitePart::Masked);
    masked.or_else(|| op.get().copied().map(SitePart::Output))
}

/// A site of a program: the nodes that compute it, in order, and the fused nodes that can replace
/// them.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// Indices of nodes in the program.
    pub(crate) products: Vec<usize>,
    /// Fused nodes, each with the index that it takes.
    pub(crate) fused: Vec<(usize, DeviceNode)>,
}

/// A program, and the readers of each value.
pub(super) struct Readers<'a> {
    from: &'a DeviceGraph,
    /// Nodes that run and read each value.
    pub(super) of: Vec<Vec<usize>>,
    /// Whether a value is read after the end, or added to.
    pub(super) kept: Vec<bool>,
}

impl<'a> Readers<'a> {
    pub(super) fn new(from: &'a DeviceGraph) -> Self {
        let mut of = vec![Vec::new(); from.types.len()];
        let mut kept = vec![false; from.types.len()];
        let mut running = schedule::order(from);
        running.sort_unstable();
        for index in running {
            let node = &from.nodes[index];
            for input in &node.inputs {
                of[input.index()].push(index);
            }
            for into in node.into.iter().flatten() {
                kept[into.index()] = true;
            }
        }
        for (_, output) in &from.outputs {
            kept[output.index()] = true;
        }
        Self { from, of, kept }
    }

    /// Its part, except of an op that makes f32 of padded values: the fused ops do not trim.
    fn part(&self, index: usize) -> Option<SitePart> {
        let node = &self.from.nodes[index];
        let mut outputs = node.outputs.iter();
        let is_full = outputs.any(|&output| self.from.ty(output).dtype == DType::F32);
        let mut inputs = node.inputs.iter();
        if is_full && inputs.any(|input| self.from.unpadded.contains_key(input)) {
            return None;
        }
        part(&node.op, &types(self.from, &node.inputs))
    }

    /// The node that makes a value without adding to an existing one.
    fn maker(&self, value: Value) -> Option<usize> {
        let Home::Node(index) = self.from.homes[value.index()] else {
            return None;
        };
        let whole = self.from.nodes[index].into.iter().all(Option::is_none);
        whole.then_some(index)
    }

    /// All readers of a bf16 intermediate; `None` for values that are kept.
    fn all(&self, value: Value) -> Option<&[usize]> {
        let bf16 = self.from.ty(value).dtype == DType::Bf16;
        (bf16 && !self.kept[value.index()]).then(|| &*self.of[value.index()])
    }
}

fn types<'a>(from: &'a DeviceGraph, values: &[Value]) -> Vec<&'a Type> {
    values.iter().map(|&value| from.ty(value)).collect()
}

/// All sites of a program that have kernels.
pub(crate) fn sites(from: &DeviceGraph) -> Vec<Found> {
    let readers = Readers::new(from);
    let running = readers.of.iter().flatten();
    let mut running: Vec<usize> = running.copied().collect();
    running.sort_unstable();
    running.dedup();
    let found = running.into_iter();
    found.filter_map(|masked| site(&readers, masked)).collect()
}

/// Fuses the sites that `chosen` accepts into one op each; values keep their numbers.
pub(crate) fn fused(from: &DeviceGraph, mut chosen: impl FnMut(&Found) -> bool) -> DeviceGraph {
    let mut places: Vec<Vec<DeviceNode>> =
        from.nodes.iter().map(|node| vec![node.clone()]).collect();
    for site in sites(from).into_iter().filter(|site| chosen(site)) {
        for index in site.products {
            places[index].clear();
        }
        for (index, node) in site.fused {
            places[index].push(node);
        }
    }
    from.with_nodes(places.into_iter().flatten().collect())
}

/// Forward of a site: indices of its mask and of the product after it, and its factors.
#[derive(Debug, Clone, Copy)]
struct Forward {
    mask: Masked,
    masked: usize,
    output: usize,
    x: Value,
    v: Value,
    u: Value,
}

/// The site around a masking op, if it is one.
fn site(readers: &Readers<'_>, masked: usize) -> Option<Found> {
    let from = readers.from;
    let Some(SitePart::Masked(mask)) = readers.part(masked) else {
        return None;
    };
    let node = &from.nodes[masked];
    let (a, h) = (node.inputs[0], node.outputs[0]);
    let product = readers.maker(a)?;
    let (x, v) = product_of(readers, product, &mask, node)?;
    let mut forward = None;
    // The product after the mask, and the gradient of its factor, may read the masked activations.
    let mut of_u = None;
    for &reader in readers.all(h)? {
        let inputs = &from.nodes[reader].inputs;
        match readers.part(reader)? {
            SitePart::Rows {
                transposed: false,
                routed: false,
            } if inputs[0] == h && from.nodes[reader].op.is::<MatMul>() && forward.is_none() => {
                forward = Some(reader);
            }
            SitePart::Output(_) if inputs[0] == h && forward.is_none() => forward = Some(reader),
            SitePart::Sums if inputs[0] == h && inputs[1] != h && of_u.is_none() => {
                of_u = Some(reader);
            }
            _ => return None,
        }
    }
    let output = forward?;
    let forward = Forward {
        mask,
        masked,
        output,
        x,
        v,
        u: from.nodes[output].inputs[1],
    };
    let is_bf16 = |value: Value| from.ty(value).dtype == DType::Bf16;
    if ![x, v, forward.u].into_iter().all(is_bf16) {
        return None;
    }
    let mut found = Found {
        products: vec![product, masked, output],
        fused: vec![(output, there(from, &forward)?)],
    };
    back(readers, &forward, of_u, &mut found)?;
    found.products.sort_unstable();
    Some(found)
}

/// The factors `x` and `V` of the product before a mask.
fn product_of(
    readers: &Readers<'_>,
    product: usize,
    mask: &Masked,
    masked: &DeviceNode,
) -> Option<(Value, Value)> {
    let node = &readers.from.nodes[product];
    let Some(SitePart::Rows {
        transposed: false,
        routed,
    }) = readers.part(product)
    else {
        return None;
    };
    let route = mask.route().map(|index| masked.inputs[index]);
    // No bias, and no route of another site.
    let alone = if routed {
        node.inputs.len() == 3 && Some(node.inputs[2]) == route
    } else {
        node.inputs.len() == 2 && route.is_none()
    };
    alone.then(|| (node.inputs[0], node.inputs[1]))
}

/// The fused forward op.
fn there(from: &DeviceGraph, forward: &Forward) -> Option<DeviceNode> {
    let &Forward { mask, x, v, u, .. } = forward;
    let (masked, last) = (&from.nodes[forward.masked], &from.nodes[forward.output]);
    let joined = match part(&last.op, &types(from, &last.inputs))? {
        SitePart::Output(output) => output.joined(&last.inputs),
        _ => SiteInputs {
            bias: last.inputs.get(2).copied(),
            ..SiteInputs::default()
        },
    };
    // Deltas and routes must be those of the mask, or absent.
    let mut own = masked.inputs[1..].iter();
    let shared = [joined.delta, joined.route].into_iter().flatten();
    let mixes =
        joined.delta.is_some() == mask.delta() && joined.route.is_some() == mask.route().is_some();
    if joined.clean.is_some() && !mixes {
        return None;
    }
    for value in shared {
        own.find(|&&input| input == value)?;
    }
    if joined.clean.is_none() && mask.route().is_some() {
        return None;
    }
    // The kernel takes a bias in f32.
    if joined
        .bias
        .is_some_and(|bias| from.ty(bias).dtype != DType::F32)
    {
        return None;
    }
    let op = Site {
        mask,
        clean: joined.clean.is_some(),
        bias: joined.bias.is_some(),
    };
    let mut inputs = vec![x, v, u];
    inputs.extend(&masked.inputs[1..]);
    inputs.extend(joined.clean);
    inputs.extend(joined.bias);
    let fits = Site::fits(&types(from, &inputs));
    fits.then(|| DeviceNode {
        op: DeviceOp::new(op),
        inputs,
        ..last.clone()
    })
}

/// Adds the fused backward ops, as many as there are. `None` if other ops read intermediates.
fn back(
    readers: &Readers<'_>,
    forward: &Forward,
    of_u: Option<usize>,
    found: &mut Found,
) -> Option<()> {
    let from = readers.from;
    let &Forward { mask, x, v, u, .. } = forward;
    let masked = &from.nodes[forward.masked];
    let (a, settings) = (masked.inputs[0], &masked.inputs[1..]);
    let sums = |place: usize, [a, first, z]: [Value; 3], back: bool| {
        let inputs: Vec<Value> = [a, first, z].iter().chain(settings).copied().collect();
        let bf16 = inputs[..3]
            .iter()
            .all(|&value| from.ty(value).dtype == DType::Bf16);
        let fits = bf16 && SiteSums::fits(&types(from, &inputs));
        fits.then(|| {
            let op = DeviceOp::new(SiteSums { mask, back });
            let node = from.nodes[place].clone();
            (place, DeviceNode { op, inputs, ..node })
        })
    };
    let mut g = None;
    if let Some(place) = of_u {
        let of_y = from.nodes[place].inputs[1];
        g = Some(of_y);
        found.fused.push(sums(place, [x, v, of_y], false)?);
        found.products.push(place);
    }
    let others: Vec<usize> = readers
        .all(a)?
        .iter()
        .copied()
        .filter(|&n| n != forward.masked)
        .collect();
    let [slope] = others[..] else {
        return others.is_empty().then_some(());
    };
    let grad = &from.nodes[slope];
    let Some(SitePart::MaskedGrad(of, wants)) = readers.part(slope) else {
        return None;
    };
    let same = of == mask && grad.inputs[1..] == masked.inputs[..];
    let gh = grad.inputs[0];
    let before = readers.maker(gh)?;
    let SitePart::Rows {
        transposed: true,
        routed,
    } = readers.part(before)?
    else {
        return None;
    };
    let of_y = from.nodes[before].inputs[0];
    let fits = same
        && readers.all(gh)? == [slope]
        && from.nodes[before].inputs[1] == u
        && (!routed || mask.route().is_some())
        && g.is_none_or(|g| g == of_y)
        && from.ty(of_y).dtype == DType::Bf16;
    if !fits {
        return None;
    }
    found.products.extend([before, slope]);
    // Gradients of x and V may read the gradient of the activations.
    let ga = wants[0].then(|| grad.outputs[0]);
    let (mut outputs, mut into) = (Vec::new(), Vec::new());
    let mut last = slope;
    let mut has_x = false;
    if let Some(ga) = ga {
        for &reader in readers.all(ga)? {
            let node = &from.nodes[reader];
            match readers.part(reader)? {
                SitePart::Rows {
                    transposed: true,
                    routed: false,
                } if node.inputs[..2] == [ga, v] && !has_x => {
                    has_x = true;
                    last = last.max(reader);
                    outputs.extend(&node.outputs);
                    into.push(node.into.first().copied().flatten());
                }
                SitePart::Sums if node.inputs[..2] == [x, ga] => {
                    found.fused.push(sums(reader, [of_y, u, x], true)?);
                }
                _ => return None,
            }
            found.products.push(reader);
        }
        if grad.into.first().copied().flatten().is_some() {
            return None;
        }
    }
    let rest = usize::from(ga.is_some());
    outputs.extend(&grad.outputs[rest..]);
    into.extend((rest..grad.outputs.len()).map(|k| grad.into.get(k).copied().flatten()));
    if outputs.is_empty() {
        return Some(());
    }
    // The fused op runs in the place of its last part, so no op may read an earlier result before
    // that.
    let late = |value: &Value| {
        readers.of[value.index()]
            .iter()
            .all(|&reader| reader > last)
    };
    let added_to = from.nodes[..=last].iter().flat_map(|node| &node.into);
    let mut added_to = added_to.flatten();
    if !outputs.iter().all(late) || added_to.any(|value| outputs.contains(value)) {
        return None;
    }
    let op = SiteGrad {
        mask,
        wants: [has_x, wants[1], wants[2]],
    };
    let mut inputs = vec![of_y, u, v];
    inputs.extend(settings);
    inputs.push(x);
    let fits = op.fits(&types(from, &inputs));
    let node = from.nodes[last].clone();
    found.fused.push((
        last,
        DeviceNode {
            op: DeviceOp::new(op),
            inputs,
            outputs,
            into,
            ..node
        },
    ));
    fits.then_some(())
}
