//! Programs on a device: a graph of ops and of device-only rewrites.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

use super::lowering::Lowering;
use crate::alike::Alike;
use crate::graph::{self, Graph};
use crate::op::{Builder, Computes, ExpensiveOps, Op};
use crate::precision::Format;
use crate::value::Type;

/// Graph of a program on a device.
pub(crate) type DeviceGraph = Graph<DeviceOp>;

/// Node: a [`DeviceOp`] and its operands.
pub(crate) type DeviceNode = graph::Node<DeviceOp>;

/// Computation of a node.
#[derive(Clone)]
pub(crate) enum DeviceOp {
    /// An op of the original program.
    Op(Arc<dyn Op>),
    /// A rewrite that only devices have.
    Rewritten(Arc<dyn Rewritten>),
}

/// An op that replaces others on a device. Rewrites happen after gradients are added.
pub(crate) trait Rewritten: Debug + Send + Sync {
    /// Name in errors, profiles and traces.
    fn name(&self) -> &'static str;

    /// Lowers it.
    fn cuda(&self, to: &mut Lowering<'_>);

    /// As [`Op::alike`].
    fn alike(&self, _inputs: &[&Type], _outputs: &[&Type]) -> Vec<Alike> {
        Vec::new()
    }

    /// Multiplications and additions of one run, for rooflines.
    fn flops(&self, _inputs: &[&Type]) -> u64 {
        0
    }

    /// Expensive operations of one run, such as exponentials.
    fn expensive_ops(&self, _inputs: &[&Type]) -> ExpensiveOps {
        ExpensiveOps::default()
    }
}

impl DeviceOp {
    /// Wraps a rewrite.
    pub(super) fn rewritten(op: impl Rewritten + 'static) -> Self {
        Self::Rewritten(Arc::new(op))
    }

    /// The op, if it has type `O`.
    pub(super) fn get<O: Op>(&self) -> Option<&O> {
        match self {
            Self::Op(op) => {
                let op: &dyn Any = &**op;
                op.downcast_ref()
            }
            Self::Rewritten(_) => None,
        }
    }

    /// Whether it is an op of type `O`.
    pub(super) fn is<O: Op>(&self) -> bool {
        self.get::<O>().is_some()
    }

    /// Lowers it.
    pub(super) fn cuda(&self, to: &mut Lowering<'_>) {
        match self {
            Self::Op(op) => op.cuda(to),
            Self::Rewritten(op) => op.cuda(to),
        }
    }

    /// As [`Op::alike`].
    pub(super) fn alike(&self, inputs: &[&Type], outputs: &[&Type]) -> Vec<Alike> {
        match self {
            Self::Op(op) => op.alike(inputs, outputs),
            Self::Rewritten(op) => op.alike(inputs, outputs),
        }
    }
}

impl Debug for DeviceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(op) => op.fmt(f),
            Self::Rewritten(op) => op.fmt(f),
        }
    }
}

impl Computes for DeviceOp {
    fn name(&self) -> &'static str {
        match self {
            Self::Op(op) => op.name(),
            Self::Rewritten(op) => op.name(),
        }
    }

    fn writes(&self, inputs: usize) -> Range<usize> {
        match self {
            Self::Op(op) => op.writes(inputs),
            Self::Rewritten(_) => 0..0,
        }
    }

    fn is_constant(&self) -> bool {
        matches!(self, Self::Op(op) if op.is_constant())
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        match self {
            Self::Op(op) => op.formats(),
            Self::Rewritten(_) => [&[Format::Full], &[Format::Full]],
        }
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        match self {
            Self::Op(op) => op.flops(inputs),
            Self::Rewritten(op) => op.flops(inputs),
        }
    }

    fn expensive_ops(&self, inputs: &[&Type]) -> ExpensiveOps {
        match self {
            Self::Op(op) => op.expensive_ops(inputs),
            Self::Rewritten(op) => op.expensive_ops(inputs),
        }
    }
}

/// A program for a device, without rewrites.
pub(crate) fn on_device(from: &Builder) -> DeviceGraph {
    let nodes = from.nodes.iter();
    let nodes = nodes.map(|node| node.by(DeviceOp::Op(Arc::clone(&node.op))));
    from.with_nodes(nodes.collect())
}
