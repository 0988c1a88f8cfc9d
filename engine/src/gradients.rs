//! Gradients, made once as more ops of the program.
//!
//! Reverse mode over the nodes: each op that the loss depends on, latest first, is asked to emit the ops of its
//! gradient. Only values on a path from a wanted value to the loss get one: frozen weights cost nothing, and an
//! adversary that asks for its source alone gets the source's alone. A second contribution to a gradient is
//! added in place by the kernel that makes it ([`Op::accumulates`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::builder::{Builder, Home};
use crate::op::{BuildError, Op, Result};
use crate::ops::{Add, Constant};
use crate::value::Value;

/// The state of one reverse pass.
pub struct Gradients<'a> {
    builder: &'a mut Builder,
    of: BTreeMap<Value, Value>,
    wanted: Vec<bool>,
}

impl Builder {
    /// Gradients of the scalar `loss` with respect to each of `wrt`; `None` where the loss does not depend on it.
    ///
    /// # Errors
    ///
    /// When `loss` is no scalar, or an op on the way has no gradient.
    pub fn gradients(&mut self, loss: Value, wrt: &[Value]) -> Result<Vec<Option<Value>>> {
        if !self.ty(loss).dims.is_empty() {
            let reason = format!("the loss must be a scalar, found {}", self.ty(loss));
            return Err(BuildError::new("gradients", reason));
        }
        let before = std::mem::replace(&mut self.eager, true);
        let one = self.op1(Constant { value: 1.0 }, &[])?;
        self.eager = before;
        self.gradients_from(loss, one, wrt)
    }

    /// Gradients of `sum(value * upstream)`.
    pub(crate) fn gradients_from(
        &mut self,
        value: Value,
        upstream: Value,
        wrt: &[Value],
    ) -> Result<Vec<Option<Value>>> {
        let mut wanted = vec![false; self.types.len()];
        for value in wrt {
            wanted[value.index()] = true;
        }
        for node in &self.nodes {
            if node
                .inputs
                .iter()
                .chain(node.into.iter().flatten())
                .any(|v| wanted[v.index()])
            {
                for output in &node.outputs {
                    wanted[output.index()] = true;
                }
            }
        }
        let last = match self.homes[value.index()] {
            Home::Node(last) if wanted[value.index()] => last,
            _ => return Ok(vec![None; wrt.len()]),
        };
        let before = std::mem::replace(&mut self.eager, true);
        let of = BTreeMap::from([(value, upstream)]);
        let mut gradients = Gradients {
            builder: self,
            of,
            wanted,
        };
        for index in (0..=last).rev() {
            gradients.visit(index)?;
        }
        let of = gradients.of;
        self.eager = before;
        Ok(wrt.iter().map(|value| of.get(value).copied()).collect())
    }
}

impl Gradients<'_> {
    fn visit(&mut self, index: usize) -> Result<()> {
        let node = self.builder.nodes[index].clone();
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
        for (&output, into) in node.outputs.iter().zip(&node.into) {
            if let Some(into) = *into
                && let Some(gradient) = self.of(output)
            {
                self.pass(into, gradient)?;
            }
        }
        let view = crate::op::NodeView {
            inputs: &node.inputs,
            outputs: &node.outputs,
        };
        node.op.gradient(&view, self)
    }

    /// The program under construction, for ops that help a gradient along.
    pub fn builder(&mut self) -> &mut Builder {
        self.builder
    }

    /// Gradient of a result; `None` when the loss does not depend on it.
    pub fn of(&self, output: Value) -> Option<Value> {
        self.of.get(&output).copied()
    }

    /// Whether someone waits for the gradient of an input.
    pub fn wants(&self, input: Value) -> bool {
        self.wanted[input.index()]
    }

    /// Contributes a value that exists already.
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
                self.builder
                    .node(Arc::new(Add), &[contribution], vec![Some(before)])?[0]
            }
        };
        self.of.insert(input, total);
        Ok(())
    }

    /// Emits an op whose output `k` contributes to the gradient of `targets[k]`, in place where there are
    /// contributions already. Nothing is emitted when none is wanted.
    ///
    /// # Errors
    ///
    /// When the op refuses its inputs.
    pub fn emit(
        &mut self,
        op: impl Op + 'static,
        inputs: &[Value],
        targets: &[Option<Value>],
    ) -> Result<()> {
        if !targets.iter().flatten().any(|&target| self.wants(target)) {
            return Ok(());
        }
        let before = |target: &Option<Value>| target.and_then(|target| self.of(target));
        let into: Vec<Option<Value>> = if op.accumulates() {
            targets.iter().map(before).collect()
        } else {
            Vec::new()
        };
        let in_place = !into.is_empty();
        let outputs = self.builder.node(Arc::new(op), inputs, into)?;
        for (&target, &output) in targets.iter().zip(&outputs) {
            let Some(target) = target.filter(|&target| self.wants(target)) else {
                continue;
            };
            if in_place {
                self.of.insert(target, output);
            } else {
                self.pass(target, output)?;
            }
        }
        Ok(())
    }
}
