//! In which order the ops run.
//!
//! Gradient ops run in the order of their emission; every other op runs when it is first needed. A step with
//! many losses therefore holds the activations of one loss at a time, although all losses were written down
//! before the first gradient. Ops that nothing needs are left out; ops that change the store run last.

use crate::builder::{Builder, Home};
use crate::value::Value;

/// Indices of the nodes to run, in order.
pub(crate) fn order(builder: &Builder) -> Vec<usize> {
    let changes = |node: usize| {
        let node = &builder.nodes[node];
        !node.op.writes(node.inputs.len()).is_empty()
    };
    let needed = needed(builder, &changes);
    let mut order = Vec::with_capacity(builder.nodes.len());
    let mut placed = vec![false; builder.nodes.len()];
    let all = 0..builder.nodes.len();
    for node in all
        .clone()
        .filter(|&n| needed[n] && builder.nodes[n].eager && !changes(n))
    {
        place(builder, node, &mut placed, &mut order);
    }
    for &(_, value) in &builder.outputs {
        if let Home::Node(node) = builder.homes[value.index()] {
            place(builder, node, &mut placed, &mut order);
        }
    }
    for node in all.clone().filter(|&n| needed[n] && !changes(n)) {
        place(builder, node, &mut placed, &mut order);
    }
    order.extend(all.filter(|&node| changes(node)));
    order
}

fn needed(builder: &Builder, changes: &dyn Fn(usize) -> bool) -> Vec<bool> {
    let mut needed: Vec<bool> = (0..builder.nodes.len()).map(changes).collect();
    let require = |value: Value, needed: &mut Vec<bool>| {
        if let Home::Node(node) = builder.homes[value.index()] {
            needed[node] = true;
        }
    };
    for &(_, value) in &builder.outputs {
        require(value, &mut needed);
    }
    for index in (0..builder.nodes.len()).rev().collect::<Vec<_>>() {
        if needed[index] {
            let node = &builder.nodes[index];
            for &value in node.inputs.iter().chain(node.into.iter().flatten()) {
                require(value, &mut needed);
            }
        }
    }
    needed
}

/// Appends `node` after everything it needs, without recursion: a deep network must not overflow the stack.
fn place(builder: &Builder, node: usize, placed: &mut [bool], order: &mut Vec<usize>) {
    let mut stack = vec![(node, false)];
    while let Some((node, ready)) = stack.pop() {
        if placed[node] {
            continue;
        }
        if ready {
            placed[node] = true;
            order.push(node);
            continue;
        }
        stack.push((node, true));
        let operands = &builder.nodes[node];
        for &value in operands
            .inputs
            .iter()
            .chain(operands.into.iter().flatten())
            .rev()
        {
            if let Home::Node(earlier) = builder.homes[value.index()]
                && !placed[earlier]
            {
                stack.push((earlier, false));
            }
        }
    }
}
