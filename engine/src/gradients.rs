//! Reverse-mode gradients, appended once as ops of the program.
//!
//! Each op that the loss depends on, latest first, emits the ops of its gradient. Only values on a
//! path from a wanted value to the loss get one: frozen weights cost nothing, and an adversary that
//! asks for the gradient of its source gets that alone. The kernel that makes a second contribution
//! to a gradient adds it in place ([`Op::accumulates`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::op::{Builder, Gradients, NodeView, Op, Result, refuse};
use crate::ops::Elementwise;
use crate::value::Value;

impl Builder {
    /// Gradients of the scalar `loss` with respect to each of `wrt`; `None` where the loss does not
    /// depend on it.
    ///
    /// # Errors
    ///
    /// When `loss` is no scalar, an op on the way has no gradient, or
    /// [`associate`](Self::associate) has bypassed one of `wrt`.
    pub fn gradients(&mut self, loss: Value, wrt: &[Value]) -> Result<Vec<Option<Value>>> {
        self.gradients_of(loss, &[], wrt, &BTreeSet::new())
    }

    /// As [`gradients`](Self::gradients), with the others of `wrt` held fixed: paths from one of
    /// `wrt` through another are left out.
    ///
    /// # Errors
    ///
    /// As `gradients`.
    pub fn partial_gradients(&mut self, loss: Value, wrt: &[Value]) -> Result<Vec<Option<Value>>> {
        self.seeded_gradients(loss, &[], wrt)
    }

    /// As [`partial_gradients`](Self::partial_gradients), of `loss` plus the sum of
    /// `value * upstream` for each pair of `seeds`, whose `upstream` is a constant: what another
    /// pass has found for a value goes on from there.
    ///
    /// # Errors
    ///
    /// As `gradients`.
    pub fn seeded_gradients(
        &mut self,
        loss: Value,
        seeds: &[(Value, Value)],
        wrt: &[Value],
    ) -> Result<Vec<Option<Value>>> {
        self.gradients_of(loss, seeds, wrt, &wrt.iter().copied().collect())
    }

    fn gradients_of(
        &mut self,
        loss: Value,
        seeds: &[(Value, Value)],
        wrt: &[Value],
        fixed: &BTreeSet<Value>,
    ) -> Result<Vec<Option<Value>>> {
        if !self.ty(loss).dims.is_empty() {
            return refuse!(
                "gradients",
                "the loss must be a scalar, found {}",
                self.ty(loss)
            );
        }
        let before = std::mem::replace(&mut self.eager, true);
        let one = self.constant(1.0, &[])?;
        self.eager = before;
        self.passed_back(&[&[(loss, one)], seeds].concat(), wrt, fixed)
    }

    /// Gradients of `sum(value * upstream)`.
    pub(crate) fn gradients_from(
        &mut self,
        value: Value,
        upstream: Value,
        wrt: &[Value],
    ) -> Result<Vec<Option<Value>>> {
        self.passed_back(&[(value, upstream)], wrt, &BTreeSet::new())
    }

    /// Gradients of the sum of `value * upstream` over all seeds; none passes through `fixed`.
    fn passed_back(
        &mut self,
        seeds: &[(Value, Value)],
        wrt: &[Value],
        fixed: &BTreeSet<Value>,
    ) -> Result<Vec<Option<Value>>> {
        let bypassed = |wanted: &&Value| seeds.iter().any(|seed| self.bypasses(**wanted, seed.0));
        if let Some(&unmade) = wrt.iter().find(bypassed) {
            let node = self.maker(unmade);
            let node = node.expect("only results of ops are bypassed");
            let made_by = self.nodes[node].op.name();
            return refuse!(
                "gradients",
                "{} of {made_by} is multiplied without being made, so it has no gradient; ask for the gradients of its operands",
                self.ty(unmade)
            );
        }
        // No node before the first of them depends on any: an adversary's hundredth step visits
        // only its own nodes.
        let first = wrt.iter().map(|&of| self.maker(of).unwrap_or(0)).min();
        let first = first.unwrap_or(self.nodes.len());
        let wanted = self.dependants(wrt.iter().copied(), first);
        let seeds = seeds.iter().filter(|(value, _)| wanted[value.index()]);
        let seeds: Vec<(Value, Value)> = seeds.copied().collect();
        let last = seeds.iter().filter_map(|seed| self.maker(seed.0)).max();
        let before = std::mem::replace(&mut self.eager, true);
        let mut gradients = Gradients {
            builder: self,
            of: BTreeMap::new(),
            wanted,
        };
        for (value, upstream) in seeds {
            gradients.pass(value, upstream)?;
        }
        let mut complete = BTreeMap::new();
        let end = last.map_or(first, |last| last + 1);
        for index in (first..end).rev() {
            // All uses of this node's outputs were visited: their gradients are complete.
            for output in &gradients.builder.nodes[index].outputs {
                if fixed.contains(output) {
                    complete.extend(gradients.of.remove_entry(output));
                }
            }
            gradients.visit(index)?;
        }
        complete.append(&mut gradients.of);
        self.eager = before;
        let of = |value| complete.get(value).copied();
        Ok(wrt.iter().map(of).collect())
    }
}

impl Gradients<'_> {
    fn visit(&mut self, index: usize) -> Result<()> {
        let node = &self.builder.nodes[index];
        let reached = node
            .outputs
            .iter()
            .any(|output| self.of.contains_key(output));
        if !reached
            || !node
                .outputs
                .iter()
                .any(|output| self.wanted[output.index()])
        {
            return Ok(());
        }
        let node = node.clone();
        for (&output, into) in node.outputs.iter().zip(&node.into) {
            if let Some(into) = *into
                && let Some(gradient) = self.of(output)
            {
                self.pass(into, gradient)?;
            }
        }
        let view = NodeView {
            inputs: &node.inputs,
            outputs: &node.outputs,
        };
        node.op.gradient(&view, self)
    }

    /// The program under construction, for ops whose gradient needs other ops.
    pub fn builder(&mut self) -> &mut Builder {
        self.builder
    }

    /// Gradient of a result; `None` if the loss does not depend on it.
    pub fn of(&self, output: Value) -> Option<Value> {
        self.of.get(&output).copied()
    }

    /// Whether the gradient of an input is needed.
    pub fn wants(&self, input: Value) -> bool {
        self.wanted[input.index()]
    }

    /// Contributes an existing value.
    ///
    /// # Errors
    ///
    /// When its type is not that of `input`.
    pub fn pass(&mut self, input: Value, contribution: Value) -> Result<()> {
        if !self.wants(input) {
            return Ok(());
        }
        let total = match self.of(input) {
            None => contribution,
            Some(before) => {
                let sum = Arc::new(Elementwise::sum(1));
                self.builder
                    .node(sum, &[contribution], vec![Some(before)])?[0]
            }
        };
        self.of.insert(input, total);
        Ok(())
    }

    /// Emits an op whose output `k` contributes to the gradient of `targets[k]`, in place where
    /// there are contributions already. Nothing is emitted when none is needed. A value may be a
    /// target more than once.
    ///
    /// # Errors
    ///
    /// When the op refuses its inputs.
    pub fn emit(
        &mut self,
        op: impl Op + 'static,
        inputs: &[Value],
        targets: &[Value],
    ) -> Result<()> {
        if !targets.iter().any(|&target| self.wants(target)) {
            return Ok(());
        }
        // One output can add to the earlier contributions; others of the same target are added to
        // it.
        let is_first = |k: usize| !targets[..k].contains(&targets[k]);
        let before = |k: usize| is_first(k).then(|| self.of(targets[k])).flatten();
        let into: Vec<Option<Value>> = if op.accumulates() {
            (0..targets.len()).map(before).collect()
        } else {
            Vec::new()
        };
        let in_place = !into.is_empty();
        let outputs = self.builder.node(Arc::new(op), inputs, into)?;
        for (k, (&target, &output)) in targets.iter().zip(&outputs).enumerate() {
            if in_place && is_first(k) && self.wants(target) {
                self.of.insert(target, output);
            } else {
                self.pass(target, output)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cpu::{Alone, Pool};
    use crate::{Store, Type};

    fn inputs<const N: usize>(b: &mut Builder) -> [Value; N] {
        std::array::from_fn(|index| b.input(&index.to_string(), &Type::f32(&[2, 2])).unwrap())
    }

    /// Ops that [`Builder::gradients`] adds.
    fn added(b: &mut Builder, loss: Value, wrt: &[Value]) -> Vec<&'static str> {
        let before = b.nodes.len();
        b.gradients(loss, wrt).unwrap();
        b.nodes[before..]
            .iter()
            .map(|node| node.op.name())
            .collect()
    }

    #[test]
    fn frozen_values_get_no_ops() {
        let mut b = Builder::new();
        let [x, w1, w2] = inputs(&mut b);
        let hidden = b.matmul(x, w1).unwrap();
        let y = b.matmul(hidden, w2).unwrap();
        let loss = b.sum_squares(y).unwrap();
        // The loss, then one product: nothing passes through `w2` to the nodes before it.
        let last = added(&mut b, loss, &[w2]);
        assert_eq!(last, ["constant", "sum_squares_grad", "matmul"]);
        // The constant exists already; through `w2`, then to the source alone.
        let source = added(&mut b, loss, &[x]);
        assert_eq!(source, ["sum_squares_grad", "matmul", "matmul"]);
        let first_layer = added(&mut b, loss, &[x, w1]);
        assert_eq!(
            first_layer,
            ["sum_squares_grad", "matmul", "matmul", "matmul"]
        );
    }

    #[test]
    fn a_value_that_the_loss_does_not_depend_on_has_no_gradient() {
        let mut b = Builder::new();
        let [x, other, later] = inputs(&mut b);
        let loss = b.sum_squares(x).unwrap();
        b.matmul(x, later).unwrap();
        let gradients = b.gradients(loss, &[x, other, later]).unwrap();
        assert!(gradients[0].is_some() && gradients[1..] == [None, None]);
        // No gradients are asked for, or the loss is an input: both give nothing.
        assert_eq!(b.gradients(loss, &[]), Ok(vec![]));
        let scalar = b.input("scalar", &Type::scalar()).unwrap();
        assert_eq!(b.gradients(scalar, &[x]), Ok(vec![None]));
    }

    #[test]
    fn every_use_of_a_value_contributes() {
        let mut b = Builder::new();
        let [x] = inputs(&mut b);
        let twice = b.add(x, x).unwrap();
        let transposed = b.transpose(x).unwrap();
        let product = b.matmul(twice, transposed).unwrap();
        let squares = [twice, product].map(|value| b.sum_squares(value).unwrap());
        let loss = b
            .weighted_sum(&[(1.0, squares[0]), (0.5, squares[1])])
            .unwrap();
        let gradient = b.gradients(loss, &[x]).unwrap()[0].unwrap();
        b.output("gradient", gradient);
        // Two values that share a gradient may not add to it in place.
        b.output("twice", twice);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.input("0").copy_from_slice(&[1.0, 0.0, 0.0, 2.0]);
        let mut store = Store::new();
        executor.run(&mut store);
        // By hand for diagonal X: 4 x^2 + (2 x^2)^2 / 2 has the slope 8 x + 8 x^3; exact.
        assert_eq!(executor.output("gradient", &store), [16.0, 0.0, 0.0, 80.0]);
    }

    #[test]
    fn partial_gradients_hold_the_other_values_fixed() {
        let mut b = Builder::new();
        let [x, y] = inputs(&mut b);
        let turned = b.transpose(x).unwrap();
        let both = b.add(x, turned).unwrap();
        let product = b.matmul(both, y).unwrap();
        let loss = b.sum_squares(product).unwrap();
        let total = b.gradients(loss, &[x]).unwrap()[0].unwrap();
        let parts = b.partial_gradients(loss, &[turned, x]).unwrap();
        let names = ["total", "of turned", "of x"];
        for (name, gradient) in names.into_iter().zip([Some(total), parts[0], parts[1]]) {
            b.output(name, gradient.unwrap());
        }
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.input("0").copy_from_slice(&[1.0, 2.0, 0.0, 1.0]);
        executor.input("1").copy_from_slice(&[1.0, 0.0, 0.0, 1.0]);
        let mut store = Store::new();
        executor.run(&mut store);
        // By hand: 2 (X + X^T) for each; the whole gradient has that of `turned` on top.
        for name in ["of turned", "of x"] {
            assert_eq!(
                executor.output(name, &store),
                [4.0, 4.0, 4.0, 4.0],
                "{name}"
            );
        }
        assert_eq!(executor.output("total", &store), [8.0, 8.0, 8.0, 8.0]);
    }

    #[test]
    fn a_seed_adds_to_the_gradient_of_its_value_and_goes_on_from_there() {
        let mut b = Builder::new();
        let [x, y, upstream] = inputs(&mut b);
        let turned = b.transpose(x).unwrap();
        let product = b.matmul(turned, y).unwrap();
        let loss = b.sum_squares(product).unwrap();
        let seeds = [(turned, upstream), (y, upstream)];
        let seeded = b.seeded_gradients(loss, &seeds, &[x, y]).unwrap();
        let plain = b.partial_gradients(loss, &[x, y]).unwrap();
        for (name, gradient) in ["x", "y", "plain x", "plain y"]
            .into_iter()
            .zip(seeded.into_iter().chain(plain))
        {
            b.output(name, gradient.unwrap());
        }
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.input("0").copy_from_slice(&[1.0, 2.0, 0.0, 1.0]);
        executor.input("1").copy_from_slice(&[1.0, 0.0, 3.0, 1.0]);
        executor.input("2").copy_from_slice(&[8.0, 4.0, 2.0, 1.0]);
        let mut store = Store::new();
        executor.run(&mut store);
        let of = |name| executor.output(name, &store).to_vec();
        let difference = |of: Vec<f32>, plain: Vec<f32>| -> Vec<f32> {
            of.iter().zip(plain).map(|(of, plain)| of - plain).collect()
        };
        // Small whole numbers: exact. That of `turned` is transposed on its way to `x`.
        assert_eq!(difference(of("x"), of("plain x")), [8.0, 2.0, 4.0, 1.0]);
        assert_eq!(difference(of("y"), of("plain y")), [8.0, 4.0, 2.0, 1.0]);
    }

    #[test]
    fn the_loss_itself_has_the_gradient_one() {
        let mut b = Builder::new();
        let [x] = inputs(&mut b);
        let loss = b.sum_squares(x).unwrap();
        let gradient = b.gradients(loss, &[loss]).unwrap()[0].unwrap();
        b.output("gradient", gradient);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        let mut store = Store::new();
        executor.run(&mut store);
        assert_eq!(executor.output("gradient", &store), [1.0]);
    }

    #[test]
    fn only_a_scalar_is_a_loss() {
        let mut b = Builder::new();
        let [x] = inputs(&mut b);
        assert_eq!(
            b.gradients(x, &[x]).map_err(|error| error.to_string()),
            Err("gradients: the loss must be a scalar, found f32 [2, 2]".to_owned())
        );
    }
}
