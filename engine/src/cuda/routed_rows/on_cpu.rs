//! Ops on routed rows on a CPU, from the operands that a device had.

use std::collections::BTreeMap;

use super::{Clean, Gather, RoutedRows, Spread};
use crate::op::{Builder, Node};
use crate::ops::Masked;
use crate::ops::site::masked::MaskedGrad;
use crate::value::{Type, Value};

/// Values of the device, as f32s or words.
pub(in crate::cuda) type Known = BTreeMap<Value, Vec<f32>>;

/// As in the kernels.
const NO_ROW: u32 = u32::MAX;

/// The places of rows, from a list with so much room.
fn places(list: &[f32], room: usize) -> impl Iterator<Item = Option<usize>> + '_ {
    list[room..].iter().map(|place| row(*place))
}

fn row(word: f32) -> Option<usize> {
    let row = word.to_bits();
    (row != NO_ROW).then_some(row as usize)
}

/// A mask, or its gradients, whose activations are compacted. A CPU has room for all rows.
pub(in crate::cuda) struct RoutedMask {
    list: Value,
    compacted: Vec<Value>,
    room: usize,
    /// Whether each row is routed.
    routes: Vec<bool>,
}

impl RoutedMask {
    /// `None` for all other ops.
    pub(in crate::cuda) fn of(stored: &Builder, node: &Node, known: &Known) -> Option<Self> {
        let (route, activations, result) =
            match (node.op.get::<Masked>(), node.op.get::<MaskedGrad>()) {
                (Some(mask), _) => (mask.route(0)?, 1, true),
                (_, Some(grad)) => (grad.of.route(1)?, 2, grad.is_of_activations()),
                _ => return None,
            };
        let (list, room) = (node.inputs[route], stored.ty(node.inputs[0]).rows());
        let into = node.into.first().copied().flatten();
        let results = node.outputs.first().copied().into_iter().chain(into);
        let results = results.filter(|_| result);
        let compacted = node.inputs[..activations].iter().copied().chain(results);
        Some(Self {
            list,
            compacted: compacted.collect(),
            room,
            routes: places(&known[&list], room)
                .map(|place| place.is_some())
                .collect(),
        })
    }

    /// An operand as a CPU has it.
    pub(in crate::cuda) fn operand(&self, value: Value, ty: &mut Type, values: &mut Vec<f32>) {
        let rows = self.routes.len();
        if value == self.list {
            *ty = Type::f32(&[rows]);
            let routes = self.routes.iter();
            *values = routes.map(|&routed| f32::from(u8::from(routed))).collect();
        } else if self.compacted.contains(&value) {
            ty.dims = vec![rows, ty.columns()];
            values.resize(ty.len(), 0.0);
        } else if ty.dims.len() > 1 {
            // Compacted rows have one dimension, and so have those beside them.
            ty.dims = vec![ty.rows(), ty.columns()];
        }
    }

    /// A result as a device has it: no rows beyond the room, and zeros behind the routed ones.
    pub(in crate::cuda) fn result(&self, value: Value, values: &mut Vec<f32>) {
        if self.compacted.contains(&value) {
            let columns = values.len() / self.routes.len();
            let routed = self.routes.iter().filter(|routed| **routed).count();
            values.truncate(self.room * columns);
            values[routed * columns..].fill(0.0);
        }
    }
}

/// Results of an op that only devices have, from its operands.
pub(in crate::cuda) fn repeated(
    stored: &Builder,
    node: &Node,
    known: &Known,
) -> Option<Vec<Vec<f32>>> {
    let operand = |index: usize| &*known[&node.inputs[index]];
    let rows_of = |index: usize| stored.ty(node.inputs[index]).rows();
    let columns = stored.ty(node.outputs[0]).columns();
    let row_of = |x: &[f32], row: usize| x[row * columns..][..columns].to_vec();
    let zeros = vec![0.0; columns];
    let result: Vec<f32> = if node.op.is::<RoutedRows>() {
        let room = columns - operand(0).len();
        let routed: Vec<u32> = (0u32..)
            .zip(operand(0))
            .filter(|(_, route)| **route != 0.0)
            .map(|(row, _)| row)
            .collect();
        let behind = std::iter::repeat_n(NO_ROW, room - routed.len());
        let places = (0..operand(0).len()).map(|row| {
            let place = routed.iter().position(|&routed| routed as usize == row);
            place.map_or(NO_ROW, |place| u32::try_from(place).expect("few rows"))
        });
        let words = routed.iter().copied().chain(behind).chain(places);
        words.map(f32::from_bits).collect()
    } else if node.op.is::<Gather>() {
        let room = stored.ty(node.outputs[0]).rows();
        let of_x: Option<Vec<Option<usize>>> = node
            .inputs
            .get(2)
            .map(|list| places(&known[list], rows_of(0)).collect());
        let rows = operand(1)[..room].iter().map(|word| {
            let row = row(*word)?;
            of_x.as_ref().map_or(Some(row), |places| places[row])
        });
        rows.flat_map(|row| row.map_or(zeros.clone(), |row| row_of(operand(0), row)))
            .collect()
    } else if let Some(op) = node.op.get::<Spread>() {
        let into = node.into.first().copied().flatten();
        let into = into.map(|into| &*known[&into]);
        let list = operand(node.inputs.len() - 1);
        let [read, bias, delta] = op.others().map(|index| index.map(&operand));
        let (clean, added) = match op.clean {
            Some(Clean::Replaced) => (into, None),
            _ => (read, into),
        };
        let rows = places(list, rows_of(0)).enumerate();
        let y = rows.flat_map(|(row, place)| {
            let own = place.map_or(zeros.clone(), |place| row_of(operand(0), place));
            let of_routed = || delta.map_or(0.0, |d| d[if d.len() == 1 { 0 } else { row }]);
            let s = place.map_or(1.0, |_| of_routed());
            let beside = |(column, own): (usize, f32)| {
                let at = row * columns + column;
                let b = bias.map_or(0.0, |bias| (1.0 - s) * bias[column]);
                let path = clean.map_or(0.0, |clean| s * clean[at] + b);
                own + path + added.map_or(0.0, |added| added[at])
            };
            own.into_iter().enumerate().map(beside).collect::<Vec<_>>()
        });
        y.collect()
    } else {
        return None;
    };
    Some(vec![result])
}
