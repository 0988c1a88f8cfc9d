//! Pads dimensions of a bf16 program that are no multiple of 8 with zeros, where this makes a
//! product faster.
//!
//! cublasLt's kernels for bf16 read and write 16 bytes at a time. If the contiguous dimension of a
//! result, or the dimension of the sums, is no multiple of 8, it takes others, which run four to six
//! times slower whatever the distance of the rows is (on an H200: 140 us for 341 columns, 33 us for
//! 344). So these dimensions themselves become multiples of 8 on the device, and what is computed
//! beyond their ends is zero:
//!
//! ```text
//! x [16384, 128] W^T [344, 128]  ->  [16384, 344], of which 3 columns are zeros
//! ```
//!
//! Ops say which dimensions of their operands they can take longer ([`Op::alike`]), and [`padded`]
//! joins these into classes. A class is padded if all bf16 values in it are made and read by such
//! ops, and one of these is a product large enough to gain by it. That is a rule of shapes alone, so
//! a run has the same bits wherever it is planned. All else keeps its shape: the store, inputs,
//! outputs, and values in f32, but for copies of vectors. A weight is padded as it is
//! [cast](super::casts), a frozen one as the device gets it, and the gradient of a weight is trimmed
//! as it is added up ([`Lowering::trimmed_product`]).
//!
//! [`Op::alike`]: crate::Op::alike
//! [`Lowering::trimmed_product`]: super::lowering::Lowering::trimmed_product

use std::collections::BTreeMap;

use super::casts::cast_to;
use crate::alike::{Alike, LEAST, Of, Side};
use crate::op::{Builder, Home, Node};
use crate::schedule;
use crate::value::{DType, Type, Value};

/// Padded dimensions are multiples of this many bf16s: 16 bytes.
const MULTIPLE: usize = 8;

const SIDES: [Side; 2] = [Side::Rows, Side::Columns];

/// A dimension of a value.
type Dimension = (Value, Side);

/// The dimensions of a program's values in classes, of which each is padded as a whole.
struct Classes<'a> {
    from: &'a Builder,
    /// Another dimension of the same class; the last one of a chain stands for the class.
    next: Vec<usize>,
    /// Whether a class keeps its length.
    stays: Vec<bool>,
    /// Whether a product gains by it.
    gains: Vec<bool>,
}

impl<'a> Classes<'a> {
    /// The classes of a program of which only `running` nodes run.
    fn new(from: &'a Builder, running: &[usize]) -> Self {
        let dimensions = 2 * from.types.len();
        let mut classes = Self {
            from,
            next: (0..dimensions).collect(),
            stays: vec![false; dimensions],
            gains: vec![false; dimensions],
        };
        for &index in running {
            classes.read(&from.nodes[index]);
        }
        for &(_, output) in &from.outputs {
            for side in SIDES {
                classes.keep((output, side));
            }
        }
        classes
    }

    /// Joins the dimensions that a node takes alike. All others keep their length.
    fn read(&mut self, node: &Node) {
        let groups = alike(self.from, node);
        for group in &groups {
            let own = self.own(node, group);
            let Some(&first) = own.first() else { continue };
            for other in own {
                self.join(first, other);
            }
            let class = self.class(first);
            self.gains[class] |= group.of_product;
            self.stays[class] |= !self.may_grow(node, group);
        }
        let inputs = (0..node.inputs.len()).map(Of::Input);
        for of in inputs.chain((0..node.outputs.len()).map(Of::Output)) {
            for side in SIDES {
                let is_said = |group: &Alike| group.dimensions.contains(&(of, side));
                if !groups.iter().any(is_said) {
                    self.keep((value(node, of), side));
                }
            }
        }
        for (&output, into) in node.outputs.iter().zip(&node.into) {
            for (into, side) in into.iter().flat_map(|&into| SIDES.map(|side| (into, side))) {
                self.join((output, side), (into, side));
                if !self.is_own(into) {
                    self.keep((into, side));
                }
            }
        }
    }

    /// Whether all operands of a group are padded in place, or are inputs whose padded copies cost
    /// little: vectors, and frozen tensors in bf16.
    fn may_grow(&self, node: &Node, group: &Alike) -> bool {
        group.dimensions.iter().all(|&(of, _)| {
            let ty = self.from.ty(value(node, of));
            let is_cheap = ty.dtype == DType::Bf16 || ty.dims.len() < 2;
            self.is_own(value(node, of)) || matches!(of, Of::Input(_)) && is_cheap
        })
    }

    /// Dimensions of a group that are padded in place.
    fn own(&self, node: &Node, group: &Alike) -> Vec<Dimension> {
        let all = group.dimensions.iter();
        let all = all.map(|&(of, side)| (value(node, of), side));
        let own = all.filter(|&(value, side)| {
            self.is_own(value) && place(self.from.ty(value), side).is_some()
        });
        own.collect()
    }

    /// Whether a value is padded in place: a bf16 value that a node makes. An op reads a padded copy
    /// of any other value.
    fn is_own(&self, value: Value) -> bool {
        self.from.maker(value).is_some() && self.from.ty(value).dtype == DType::Bf16
    }

    fn class(&self, (value, side): Dimension) -> usize {
        let mut at = 2 * value.index() + usize::from(side == Side::Columns);
        while self.next[at] != at {
            at = self.next[at];
        }
        at
    }

    fn join(&mut self, one: Dimension, other: Dimension) {
        let [kept, joined] = [one, other].map(|dimension| self.class(dimension));
        self.stays[kept] |= self.stays[joined] || self.len(one) != self.len(other);
        self.gains[kept] |= self.gains[joined];
        self.next[joined] = kept;
    }

    fn keep(&mut self, dimension: Dimension) {
        let class = self.class(dimension);
        self.stays[class] = true;
    }

    fn len(&self, (value, side): Dimension) -> Option<usize> {
        let ty = self.from.ty(value);
        place(ty, side).map(|place| ty.dims[place])
    }

    /// Whether a class is padded, if its dimensions are long enough.
    fn grows(&self, dimension: Dimension) -> bool {
        let class = self.class(dimension);
        self.gains[class] && !self.stays[class]
    }

    /// Type of a value that is padded in place.
    fn of_own(&self, value: Value) -> Type {
        let mut ty = self.from.ty(value).clone();
        for side in SIDES {
            if self.is_own(value) && self.grows((value, side)) {
                pad(&mut ty, side);
            }
        }
        ty
    }

    /// Type in which a node reads an input that is not padded in place.
    fn of_input(&self, node: &Node, groups: &[Alike], input: usize) -> Type {
        let mut ty = self.from.ty(node.inputs[input]).clone();
        for group in groups {
            let grows = match self.own(node, group).first() {
                Some(&own) => self.grows(own),
                // Nothing but this node depends on it.
                None => group.of_product && self.may_grow(node, group),
            };
            for &(of, side) in group.dimensions.iter().filter(|_| grows) {
                if of == Of::Input(input) {
                    pad(&mut ty, side);
                }
            }
        }
        ty
    }
}

/// Dimensions that a node takes alike.
fn alike(from: &Builder, node: &Node) -> Vec<Alike> {
    let [inputs, outputs] = [&node.inputs, &node.outputs].map(|values| from.types_of(values));
    node.op.alike(&inputs, &outputs)
}

fn value(node: &Node, of: Of) -> Value {
    match of {
        Of::Input(index) => node.inputs[index],
        Of::Output(index) => node.outputs[index],
    }
}

/// Place of a dimension, if the type has it.
fn place(ty: &Type, side: Side) -> Option<usize> {
    match side {
        Side::Rows => (ty.dims.len() == 2).then_some(0),
        Side::Columns => ty.dims.len().checked_sub(1),
    }
}

fn pad(ty: &mut Type, side: Side) {
    if let Some(place) = place(ty, side) {
        let len = &mut ty.dims[place];
        if *len >= LEAST {
            *len = len.next_multiple_of(MULTIPLE);
        }
    }
}

/// The program with padded dimensions; values keep their numbers.
pub(super) fn padded(from: Builder) -> Builder {
    let mut running = schedule::order(&from);
    running.sort_unstable();
    let classes = Classes::new(&from, &running);
    let values = (0..).take(from.types.len()).map(Value);
    let types = values.map(|value| (value, classes.of_own(value)));
    let types: Vec<(Value, Type)> = types.filter(|(value, ty)| from.ty(*value) != ty).collect();
    let mut to = from.with_nodes(Vec::new());
    for (value, ty) in types {
        let unpadded = std::mem::replace(&mut to.types[value.index()], ty);
        to.unpadded.insert(value, unpadded);
    }
    let mut copies: BTreeMap<(Value, Type), Value> = BTreeMap::new();
    for index in running {
        let node = &from.nodes[index];
        let groups = alike(&from, node);
        let inputs = node.inputs.iter().enumerate().map(|(input, &value)| {
            let ty = classes.of_input(node, &groups, input);
            if classes.is_own(value) || ty == *from.ty(value) {
                return value;
            }
            let copy = copies.entry((value, ty.clone()));
            *copy.or_insert_with(|| padded_copy(&mut to, value, ty, node.part))
        });
        let inputs = inputs.collect();
        to.append(Node {
            inputs,
            ..node.clone()
        });
    }
    to
}

/// A copy of a value with zeros. A frozen tensor in bf16 has one on the device.
fn padded_copy(to: &mut Builder, value: Value, ty: Type, part: &'static str) -> Value {
    let copy = match to.homes[value.index()] {
        home @ Home::Persistent(_) if ty.dtype == DType::Bf16 => to.value(ty, home),
        _ => cast_to(to, value, ty, part),
    };
    let unpadded = to.ty(value).clone();
    to.unpadded.insert(copy, unpadded);
    copy
}
