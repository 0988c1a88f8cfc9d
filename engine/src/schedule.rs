//! In which order the ops run.
//!
//! Gradient ops run in the order of their emission; every other op runs when it is first needed. A step with
//! many losses therefore holds the activations of one loss at a time, although all losses were written down
//! before the first gradient. No gradient needs the loss itself, but what it is computed from cannot go before: a
//! scalar is computed as soon as its operands are there. Ops that nothing needs are left out; ops that change
//! the store run last.

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
    let scalars: Vec<usize> = all
        .clone()
        .filter(|&n| needed[n] && !changes(n) && is_scalar(builder, n))
        .collect();
    for node in all
        .clone()
        .filter(|&n| needed[n] && builder.nodes[n].eager && !changes(n))
    {
        place(builder, node, &mut placed, &mut order);
        for &scalar in &scalars {
            if !placed[scalar] && is_ready(builder, scalar, &placed) {
                place(builder, scalar, &mut placed, &mut order);
            }
        }
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

fn is_scalar(builder: &Builder, node: usize) -> bool {
    let outputs = &builder.nodes[node].outputs;
    outputs.iter().all(|&value| builder.ty(value).len() == 1)
}

/// Whether all operands are computed, or need not be.
fn is_ready(builder: &Builder, node: usize, placed: &[bool]) -> bool {
    let node = &builder.nodes[node];
    let mut operands = node.inputs.iter().chain(node.into.iter().flatten());
    operands.all(|value| match builder.homes[value.index()] {
        Home::Node(earlier) => placed[earlier],
        _ => true,
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{AdamW, AdamWOperands};
    use crate::{Builder, Plan, Store, Type, Value};

    fn names(b: &Builder) -> Vec<&'static str> {
        order(b)
            .into_iter()
            .map(|node| b.nodes[node].op.name())
            .collect()
    }

    /// A network of `depth` layers with a loss, all of f32 `[rows, 8]`.
    fn network(b: &mut Builder, x: Value, w: Value, depth: usize) -> Value {
        let deep = (0..depth).fold(x, |x, _| {
            let y = b.matmul(x, w).unwrap();
            b.relu(y).unwrap()
        });
        b.sum_squares(deep).unwrap()
    }

    /// Live bytes of a step with `losses` losses, whose gradients are taken when all are written down.
    fn live_bytes(losses: usize) -> usize {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let slot = store.zeros("w", &[8, 8]);
        let w = b.persistent(&store, slot);
        let losses: Vec<Value> = (0..losses)
            .map(|index| {
                let x = b.input(&index.to_string(), &Type::f32(&[1000, 8])).unwrap();
                network(&mut b, x, w, 6)
            })
            .collect();
        for (index, &loss) in losses.iter().enumerate() {
            let gradient = b.gradients(loss, &[w]).unwrap()[0].unwrap();
            b.output(format!("gradient {index}"), gradient);
            b.output(format!("loss {index}"), loss);
        }
        Plan::new(&b).live_bytes()
    }

    #[test]
    fn activations_of_one_loss_live_at_a_time() {
        let [one, two] = [1, 2].map(live_bytes);
        // A loss keeps at least one activation of this size a layer. The input of the other loss is there whatever the
        // order, and so are the first loss and its gradient: less than an activation.
        let activation = 32_000;
        assert!(one > 6 * activation, "{one}");
        assert!(two < one + 2 * activation, "{one} {two}");
    }

    #[test]
    fn ops_that_nobody_needs_are_left_out() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[4, 4])).unwrap();
        let unused = b.relu(x).unwrap();
        b.transpose(unused).unwrap();
        let y = b.matmul(x, x).unwrap();
        b.output("y", y);
        assert_eq!(names(&b), ["matmul"]);
    }

    #[test]
    fn ops_that_change_the_store_are_last() {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let [parameter, first, second] = ["w", "m", "v"].map(|name| {
            let slot = store.zeros(name, &[3, 3]);
            b.persistent(&store, slot)
        });
        let loss = b.sum_squares(parameter).unwrap();
        let gradient = b.gradients(loss, &[parameter]).unwrap()[0].unwrap();
        let group = b.gradient_norm(&[gradient]).unwrap();
        let scalar = b.step_scalar("any");
        let op = AdamW {
            lr: scalar,
            correction1: scalar,
            correction2: scalar,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            decay: 0.0,
            clip: None,
        };
        let on = AdamWOperands {
            parameter,
            first,
            second,
            gradient,
            group,
        };
        b.adamw(op, &on, &[]).unwrap();
        // Written down after the update, and still sees the parameter as it was before.
        let late = b.transpose(parameter).unwrap();
        b.output("late", late);
        let names = names(&b);
        assert_eq!(names.last(), Some(&"adamw"));
        assert!(names.contains(&"transpose"));
    }

    #[test]
    fn deep_programs_do_not_overflow_the_stack() {
        let mut b = Builder::new();
        let mut x = b.input("x", &Type::f32(&[1])).unwrap();
        for _ in 0..50_000 {
            x = b.add(x, x).unwrap();
        }
        b.output("x", x);
        assert_eq!(order(&b).len(), 50_000);
    }
}
