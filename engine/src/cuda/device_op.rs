//! Programs on a device: a graph of ops, of which some replace others on a device alone. They do so
//! after gradients are added.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::Deref;
use std::sync::Arc;

use crate::graph::{self, Graph};
use crate::op::{Builder, Op};

/// Graph of a program on a device.
pub(crate) type DeviceGraph = Graph<DeviceOp>;

/// Node: a [`DeviceOp`] and its operands.
pub(crate) type DeviceNode = graph::Node<DeviceOp>;

/// Computation of a node: an op of the original program, or one that only devices have.
#[derive(Clone)]
pub(crate) struct DeviceOp(pub(super) Arc<dyn Op>);

impl DeviceOp {
    /// An op that only devices have.
    pub(super) fn new(op: impl Op) -> Self {
        Self(Arc::new(op))
    }

    /// The op, if it has type `O`.
    pub(super) fn get<O: Op>(&self) -> Option<&O> {
        let op: &dyn Any = &*self.0;
        op.downcast_ref()
    }

    /// Whether it is an op of type `O`.
    pub(super) fn is<O: Op>(&self) -> bool {
        self.get::<O>().is_some()
    }
}

impl Deref for DeviceOp {
    type Target = dyn Op;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Debug for DeviceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A program with its ops as those of a device.
pub(crate) fn of_devices(from: &Builder) -> DeviceGraph {
    let nodes = from.nodes.iter();
    let nodes = nodes.map(|node| node.by(DeviceOp(Arc::clone(&node.op))));
    from.with_nodes(nodes.collect())
}
