//! A program as values and nodes, generic over the op `P` of a node.

use std::collections::{BTreeMap, BTreeSet};

use crate::precision::Precision;
use crate::reduction::Reduction;
use crate::store::Slot;
use crate::value::{Type, Value};

/// Source of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// Kept in the [`Store`](crate::Store) from step to step.
    Persistent(Slot),
    /// Written by the host before a replay.
    Input,
    /// Result of a node.
    Node(usize),
}

/// An op with its operands.
#[derive(Debug, Clone)]
pub(crate) struct Node<P> {
    pub(crate) op: P,
    pub(crate) inputs: Vec<Value>,
    /// For each output the value that it is added to, if any; empty for none at all.
    pub(crate) into: Vec<Option<Value>>,
    pub(crate) outputs: Vec<Value>,
    /// Part of a gradient: runs in the order of emission. Forward ops run when they are needed.
    pub(crate) eager: bool,
    /// The part that its time counts towards.
    pub(crate) part: &'static str,
}

/// A program under construction; its ops are of type `P`.
#[derive(Debug)]
pub struct Graph<P> {
    pub(crate) types: Vec<Type>,
    pub(crate) homes: Vec<Home>,
    pub(crate) nodes: Vec<Node<P>>,
    pub(crate) inputs: BTreeMap<String, Value>,
    pub(crate) outputs: Vec<(String, Value)>,
    pub(crate) scalars: Vec<String>,
    /// Precision in which a device stores values.
    pub(crate) precision: Precision,
    /// Whether products are written in the cheaper order.
    pub(crate) associates: bool,
    /// Causal masks that ops were made without; `None` where they keep them.
    pub(crate) removed_masks: Option<usize>,
    /// Tensors of the store that no program writes.
    pub(crate) frozen: BTreeSet<Slot>,
    /// Tensors of the store that hold the rows of a block.
    pub(crate) sharded: BTreeSet<Slot>,
    /// Frozen tensors held in bf16: on the CPU, an op that reads one widens it first.
    pub(crate) in_bf16: BTreeSet<Slot>,
    /// Number of blocks of the batch; the program computes one of them.
    pub(crate) blocks: usize,
    /// Order in which GPUs add up the blocks.
    pub(crate) reduction: Reduction,
    /// Types without padding of values that a device pads.
    pub(crate) unpadded: BTreeMap<Value, Type>,
    /// Values that are sums over all blocks.
    pub(crate) all_reduced: BTreeSet<Value>,
    /// Products of weights that stand for products with the batch.
    pub(crate) associated: BTreeSet<Value>,
    /// For each bypassed value, the products that depend on it without reading it.
    pub(crate) bypassed: BTreeMap<Value, BTreeSet<Value>>,
    pub(crate) persistent: BTreeMap<Slot, Value>,
    /// The region that the next ops belong to, and the number of regions so far.
    pub(crate) region: Option<usize>,
    pub(crate) region_count: usize,
    /// Whether divergences make the target's logits themselves.
    pub(crate) streams_target_logits: bool,
    /// The region of each node that belongs to one.
    pub(crate) regions: BTreeMap<usize, usize>,
    /// Values that are made again for the gradients, with what they repeat.
    pub(crate) copies: Vec<(Value, Value)>,
    /// Ops so far with their results, by the values that they read.
    pub(crate) known: BTreeMap<Reads, Vec<(P, Vec<Value>)>>,
    pub(crate) eager: bool,
    pub(crate) part: &'static str,
}

/// The values that an op reads.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reads {
    pub(crate) inputs: Vec<Value>,
    /// The value that its result is added to.
    pub(crate) into: Option<Value>,
}

impl<P> Default for Graph<P> {
    fn default() -> Self {
        Self {
            types: Vec::new(),
            homes: Vec::new(),
            nodes: Vec::new(),
            inputs: BTreeMap::new(),
            outputs: Vec::new(),
            scalars: Vec::new(),
            precision: Precision::F32,
            associates: false,
            removed_masks: None,
            frozen: BTreeSet::new(),
            sharded: BTreeSet::new(),
            in_bf16: BTreeSet::new(),
            blocks: 1,
            reduction: Reduction::Exact,
            unpadded: BTreeMap::new(),
            all_reduced: BTreeSet::new(),
            associated: BTreeSet::new(),
            bypassed: BTreeMap::new(),
            persistent: BTreeMap::new(),
            region: None,
            region_count: 0,
            streams_target_logits: false,
            regions: BTreeMap::new(),
            copies: Vec::new(),
            known: BTreeMap::new(),
            eager: false,
            part: "",
        }
    }
}

impl<P> Graph<P> {
    /// Type of a value.
    pub fn ty(&self, value: Value) -> &Type {
        &self.types[value.index()]
    }

    /// Types of values.
    pub(crate) fn types_of(&self, values: &[Value]) -> Vec<&Type> {
        values.iter().map(|&value| self.ty(value)).collect()
    }

    /// The node that makes a value, if one does.
    pub(crate) fn maker(&self, value: Value) -> Option<usize> {
        match self.homes[value.index()] {
            Home::Node(node) => Some(node),
            Home::Persistent(_) | Home::Input => None,
        }
    }

    /// Type of a value without padding.
    pub(crate) fn unpadded(&self, value: Value) -> &Type {
        self.unpadded.get(&value).unwrap_or_else(|| self.ty(value))
    }

    /// Names a value as an output, which can be read after a replay.
    pub fn output(&mut self, name: impl Into<String>, value: Value) {
        self.outputs.push((name.into(), value));
    }

    /// The same values, made by other nodes; the homes of values follow from their outputs.
    pub(crate) fn with_nodes(&self, nodes: Vec<Node<P>>) -> Self {
        let mut to = Self {
            types: self.types.clone(),
            homes: self.homes.clone(),
            nodes: Vec::with_capacity(nodes.len()),
            inputs: self.inputs.clone(),
            outputs: self.outputs.clone(),
            scalars: self.scalars.clone(),
            frozen: self.frozen.clone(),
            sharded: self.sharded.clone(),
            in_bf16: self.in_bf16.clone(),
            blocks: self.blocks,
            reduction: self.reduction,
            unpadded: self.unpadded.clone(),
            all_reduced: self.all_reduced.clone(),
            associated: self.associated.clone(),
            precision: self.precision,
            ..Self::default()
        };
        nodes.into_iter().for_each(|node| to.append(node));
        to
    }

    /// The inputs of a node that are held in bf16.
    pub(crate) fn inputs_in_bf16(&self, node: &Node<P>) -> impl Iterator<Item = (usize, Slot)> {
        let homes = node.inputs.iter().map(|input| self.homes[input.index()]);
        homes.enumerate().filter_map(|(index, home)| match home {
            Home::Persistent(slot) if self.in_bf16.contains(&slot) => Some((index, slot)),
            _ => None,
        })
    }

    /// Adds a node whose outputs are existing values. Values in the store stay there.
    pub(crate) fn append(&mut self, node: Node<P>) {
        for output in &node.outputs {
            let home = &mut self.homes[output.index()];
            if !matches!(home, Home::Persistent(_)) {
                *home = Home::Node(self.nodes.len());
            }
        }
        self.nodes.push(node);
    }

    pub(crate) fn value(&mut self, ty: Type, home: Home) -> Value {
        let value = Value(u32::try_from(self.types.len()).expect("a program has few values"));
        self.types.push(ty);
        self.homes.push(home);
        value
    }
}
