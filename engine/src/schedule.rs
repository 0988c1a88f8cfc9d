//! The order in which ops run.
//!
//! Gradient ops run in the order of their emission; every other op runs when it is first needed. A
//! step with many losses therefore holds the activations of one loss at a time, although all losses
//! were built before the first gradient. No gradient needs the loss itself, but the loss keeps its
//! operands alive: so a scalar is computed as soon as its operands are, and so is an adversary's
//! next source, which takes the place of the last source and its gradient. An all-reduce starts as
//! soon as its operands are computed, and readers of the sum run when they are needed. Ops whose
//! results nothing needs are left out; ops that change the store run last.

use std::collections::BTreeSet;

use crate::op::Builder;
use crate::value::Value;

/// Indices of the nodes to run, in order.
pub(crate) fn order(builder: &Builder) -> Vec<usize> {
    let changes = |node: usize| {
        let node = &builder.nodes[node];
        !node.op.writes(node.inputs.len()).is_empty()
    };
    let needed = needed(builder, &changes);
    let all = 0..builder.nodes.len();
    let mut run = Run::new(builder, &|n| needed[n] && !changes(n));
    for node in all
        .clone()
        .filter(|&n| needed[n] && builder.nodes[n].eager && !changes(n))
    {
        run.place(node);
        run.place_prompt();
    }
    for &(_, value) in &builder.outputs {
        if let Some(node) = builder.maker(value) {
            run.place(node);
        }
    }
    for node in all.clone().filter(|&n| needed[n] && !changes(n)) {
        run.place(node);
    }
    let mut order = run.order;
    order.extend(all.filter(|&node| changes(node)));
    order
}

fn needed(builder: &Builder, changes: &dyn Fn(usize) -> bool) -> Vec<bool> {
    let mut needed = vec![false; builder.nodes.len()];
    let mut left: Vec<usize> = (0..builder.nodes.len()).filter(|&n| changes(n)).collect();
    let outputs = builder.outputs.iter();
    left.extend(outputs.filter_map(|&(_, value)| builder.maker(value)));
    while let Some(node) = left.pop() {
        if !std::mem::replace(&mut needed[node], true) {
            left.extend(operands(builder, node));
        }
    }
    needed
}

/// Whether an op runs as soon as it can: its results are no larger than the operands that it frees,
/// or other ranks wait for it. Readers of an all-reduced sum do not, as they would wait for other
/// ranks.
fn is_prompt(builder: &Builder, node: usize, parts: &BTreeSet<Value>) -> bool {
    let node = &builder.nodes[node];
    let is_sum = |value: &Value| builder.all_reduced.contains(value);
    if node.inputs.iter().any(is_sum) {
        return false;
    }
    let is_part = |value: &Value| !node.eager && parts.contains(value);
    if node
        .outputs
        .iter()
        .any(|value| is_sum(value) || is_part(value))
    {
        return true;
    }
    let scalar = |&value: &Value| builder.ty(value).len() == 1;
    let replaces = node.op.is_constant() && !node.inputs.is_empty();
    replaces || node.outputs.iter().all(scalar)
}

/// The order so far.
struct Run<'a> {
    builder: &'a Builder,
    order: Vec<usize>,
    placed: Vec<bool>,
    /// Prompt ops by each of the ops they need.
    waiting: Vec<Vec<usize>>,
    /// Number of those that have not run yet, for each prompt op.
    missing: Vec<usize>,
    /// Ops without any such need.
    ready: Vec<usize>,
    /// End of the part of `order` whose waiting prompt ops were looked at.
    seen: usize,
}

impl<'a> Run<'a> {
    fn new(builder: &'a Builder, runs: &dyn Fn(usize) -> bool) -> Self {
        let nodes = builder.nodes.len();
        let mut run = Self {
            builder,
            order: Vec::with_capacity(nodes),
            placed: vec![false; nodes],
            waiting: vec![Vec::new(); nodes],
            missing: vec![0; nodes],
            ready: Vec::new(),
            seen: 0,
        };
        let parts = builder.all_reduces().map(|(part, _)| part).collect();
        for node in (0..nodes).filter(|&n| runs(n) && is_prompt(builder, n, &parts)) {
            for earlier in operands(builder, node) {
                run.waiting[earlier].push(node);
                run.missing[node] += 1;
            }
            if run.missing[node] == 0 {
                run.ready.push(node);
            }
        }
        run
    }

    /// Appends the prompt ops whose operands are all computed.
    fn place_prompt(&mut self) {
        for node in std::mem::take(&mut self.ready) {
            self.place(node);
        }
        while self.seen < self.order.len() {
            let node = self.order[self.seen];
            self.seen += 1;
            for waiting in std::mem::take(&mut self.waiting[node]) {
                self.missing[waiting] -= 1;
                if self.missing[waiting] == 0 {
                    self.place(waiting);
                }
            }
        }
    }

    /// Appends `node` after everything it needs, without recursion: a deep network must not
    /// overflow the stack.
    fn place(&mut self, node: usize) {
        let mut stack = vec![(node, false)];
        while let Some((node, ready)) = stack.pop() {
            if self.placed[node] {
                continue;
            }
            if ready {
                self.placed[node] = true;
                self.order.push(node);
                continue;
            }
            stack.push((node, true));
            let first = stack.len();
            let missing = operands(self.builder, node).filter(|&earlier| !self.placed[earlier]);
            stack.extend(missing.map(|earlier| (earlier, false)));
            stack[first..].reverse();
        }
    }
}

/// The nodes that make the operands of a node, once for each use.
fn operands(builder: &Builder, node: usize) -> impl Iterator<Item = usize> {
    let node = &builder.nodes[node];
    let values = node.inputs.iter().chain(node.into.iter().flatten());
    values.filter_map(|&value| builder.maker(value))
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

    /// Live bytes of a step with `losses` losses, whose gradients are taken after all are built.
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
        // A loss keeps at least one activation of this size a layer. In any order, the input of the
        // other loss, and the first loss with its gradient, are alive too: less than an activation.
        let activation = 32_000;
        assert!(one > 6 * activation, "{one}");
        assert!(two < one + 2 * activation, "{one} {two}");
    }

    /// Live bytes of an adversary's `steps` on sources f32 `[1000, 8]` of `sites` layers.
    fn ascent_bytes(sites: usize, steps: usize) -> usize {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let slot = store.zeros("w", &[8, 8]);
        let w = b.persistent(&store, slot);
        let x = b.input("x", &Type::f32(&[1000, 8])).unwrap();
        let ty = Type::f32(&[1000, 8]);
        let mut sources: Vec<Value> = (0..sites)
            .map(|site| {
                let start = b.input(&site.to_string(), &ty).unwrap();
                b.relu(start).unwrap()
            })
            .collect();
        for _ in 0..steps {
            let deep = sources.iter().fold(x, |x, &source| {
                let y = b.matmul(x, w).unwrap();
                b.add(y, source).unwrap()
            });
            let loss = b.sum_squares(deep).unwrap();
            let gradients = b.gradients(loss, &sources).unwrap();
            for (source, gradient) in sources.iter_mut().zip(gradients) {
                *source = b.ascend(*source, gradient.unwrap(), 0.1).unwrap();
            }
        }
        for (site, source) in sources.into_iter().enumerate() {
            b.output(site.to_string(), source);
        }
        Plan::new(&b).live_bytes()
    }

    // Sources, the activation and its gradient, and the next source: no gradient for each site.
    #[test]
    fn an_adversary_keeps_one_source_for_each_site() {
        let activation = 32_000;
        for steps in [1, 2, 5] {
            let (three, nine) = (ascent_bytes(3, steps), ascent_bytes(9, steps));
            assert_eq!(nine - three, 6 * activation, "{steps} steps");
        }
    }

    #[test]
    fn ops_with_unused_results_are_left_out() {
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
        let op = AdamW::new(&mut b);
        let on = AdamWOperands {
            parameter,
            first,
            second,
            gradient,
        };
        b.adamw(op, &[on], group, &[]).unwrap();
        // Built after the update; still reads the parameter before it.
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
