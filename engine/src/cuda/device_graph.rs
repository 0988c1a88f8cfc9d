//! Programs on a device: a graph of ops, of which some replace others on a device alone. They do so
//! after gradients are added.

use crate::op::{Builder, Node};

/// Graph of a program on a device.
pub(crate) type DeviceGraph = Builder;

/// An op on a device, with its operands.
pub(crate) type DeviceNode = Node;
