//! Operands of a program whose products round them.

use crate::op::{Builder, Home, Node};
use crate::precision::{Format, Precision};
use crate::value::Value;

/// Format of an operand or result by its number.
pub(crate) fn at(formats: &[Format], index: usize) -> Format {
    formats[index.min(formats.len() - 1)]
}

/// Operands of a node, with the formats that its kernel takes.
pub(crate) fn operands(node: &Node) -> impl Iterator<Item = (Value, Format)> {
    let [taken, _] = node.op.formats();
    let inputs = node.inputs.iter().enumerate();
    inputs.map(|(index, &value)| (value, at(taken, index)))
}

/// For each value, whether it depends on inputs from the host, or is a product of weights that
/// stands for one with the batch ([`association`](crate::association)). A sum over blocks counts as
/// independent of them.
pub(crate) fn of_batch(from: &Builder) -> Vec<bool> {
    let mut depends: Vec<bool> = from.homes.iter().map(|home| *home == Home::Input).collect();
    for node in &from.nodes {
        let mut read = node.inputs.iter().chain(node.into.iter().flatten());
        if read.any(|value| depends[value.index()]) || is_associated(from, node) {
            for output in &node.outputs {
                depends[output.index()] = !from.all_reduced.contains(output);
            }
        }
    }
    depends
}

fn is_associated(from: &Builder, node: &Node) -> bool {
    let mut outputs = node.outputs.iter();
    outputs.any(|output| from.associated.contains(output))
}

/// Whether the products of a node round their factors, where `depends` is [`of_batch`].
pub(crate) fn rounds(from: &Builder, depends: &[bool], node: &Node) -> bool {
    let mut factors = operands(node).filter(|&(_, format)| format == Format::Factor);
    factors.any(|(value, _)| depends[value.index()] || is_associated(from, node))
}

/// For each node the precision to which its products round their factors, where everything is
/// stored in f32.
pub(crate) fn precision_of_products(from: &Builder) -> Vec<Precision> {
    let depends = of_batch(from);
    let of = |node| match rounds(from, &depends, node) {
        true => from.precision,
        false => Precision::F32,
    };
    from.nodes.iter().map(of).collect()
}
