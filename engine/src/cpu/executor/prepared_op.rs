//! An op with the addresses of its operands.
#![expect(
    unsafe_code,
    reason = "operands are pieces of one arena, placed by the plan"
)]

use std::ops::Range;
use std::sync::Arc;

use super::super::arena::{Factors, RightFactor};
use super::super::frame::{Frame, Operands, View};
use super::super::pool::{Pool, Rows};
use crate::given::Given;
use crate::op::{Builder, Op};
use crate::ops::GRAIN;
use crate::plan::{Place, widened};
use crate::precision::Precision;
use crate::store::{Slot, Store, Values};
use crate::value::{DType, Type};

/// An op of a program, with the addresses of its operands.
pub(super) struct PreparedOp {
    pub(super) op: Arc<dyn Op>,
    pub(super) types: Vec<Type>,
    pub(super) inputs: Vec<View>,
    /// Inputs that the program is given, each with its place among these.
    pub(super) given: Vec<(usize, usize)>,
    /// Inputs in the store, whose addresses are looked up at each replay.
    pub(super) stored: Vec<(usize, Slot)>,
    /// Inputs that the store holds in bf16, and the memory that each replay widens them to.
    pub(super) widened: Vec<(Slot, View)>,
    /// Inputs that it writes to.
    pub(super) writes: Range<usize>,
    pub(super) outputs: Vec<View>,
    pub(super) accumulate: Vec<bool>,
    pub(super) copies: Vec<(View, usize)>,
    pub(super) given_copies: Vec<(usize, usize)>,
    pub(super) stored_copies: Vec<(Slot, usize)>,
    pub(super) scratch: View,
    /// Which operands the kernel has taken from its frame.
    pub(super) taken: Vec<bool>,
    pub(super) precision: Precision,
    /// Frozen right factors of its bf16 products.
    pub(super) packed: Vec<RightFactor>,
}

impl PreparedOp {
    /// All views into the arena.
    pub(super) fn views(&mut self) -> impl Iterator<Item = &mut View> {
        let stored = self.stored.iter().map(|&(index, _)| index);
        let given = self.given.iter().map(|&(index, _)| index);
        let elsewhere: Vec<usize> = stored.chain(given).collect();
        let inputs = self.inputs.iter_mut().enumerate();
        inputs
            .filter(move |(index, _)| !elsewhere.contains(index))
            .map(|(_, view)| view)
            .chain(&mut self.outputs)
            .chain(self.copies.iter_mut().map(|(from, _)| from))
            .chain(self.widened.iter_mut().map(|(_, to)| to))
            .chain([&mut self.scratch])
    }

    pub(super) fn run(&mut self, store: &mut Store, given: &Given, pool: &Pool, factors: &Factors) {
        for &(index, offset) in &self.given {
            let view = &mut self.inputs[index];
            let values = given.f32s(offset, view.len);
            view.start = values.as_ptr().cast_mut().cast();
        }
        for &(index, slot) in &self.stored {
            // Only tensors that are written count as changed, on the host or a device.
            let (start, len, dtype): (*mut u8, _, _) = if self.writes.contains(&index) {
                let values = store.get_mut(slot);
                (values.as_mut_ptr().cast(), values.len(), DType::F32)
            } else {
                match store.named(slot).values {
                    Values::F32(values) => {
                        (values.as_ptr().cast_mut().cast(), values.len(), DType::F32)
                    }
                    Values::Bf16(values) => {
                        (values.as_ptr().cast_mut().cast(), values.len(), DType::Bf16)
                    }
                }
            };
            self.inputs[index] = View { start, len, dtype };
        }
        for &(slot, to) in &self.widened {
            // SAFETY: the plan gives it memory of its own, as long as the tensor, beside the op's
            // scratch.
            let to = unsafe { std::slice::from_raw_parts_mut(to.start.cast(), to.len) };
            widen(pool, store.named(slot).values, to);
        }
        for &(from, output) in &self.copies {
            let to = self.outputs[output];
            // SAFETY: the plan gives an output that is not in place a buffer of its own, as long as
            // `from`.
            unsafe { std::ptr::copy_nonoverlapping(from.start, to.start, 4 * to.len) };
        }
        let copy = |from: &[f32], to: View| {
            assert_eq!(from.len(), to.len, "an accumulation keeps its shape");
            // SAFETY: neither the inputs of the program nor the store overlap with the arena.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.start.cast(), to.len) };
        };
        for &(offset, output) in &self.given_copies {
            let to = self.outputs[output];
            copy(given.f32s(offset, to.len), to);
        }
        for &(slot, output) in &self.stored_copies {
            copy(&store.read(slot), self.outputs[output]);
        }
        let operands = Operands {
            op: self.op.name(),
            types: &self.types,
            inputs: &self.inputs,
            writes: self.writes.clone(),
            outputs: &self.outputs,
            accumulate: &self.accumulate,
            scratch: self.scratch,
            taken: &mut self.taken,
            precision: self.precision,
            packed: &self.packed,
            factors,
        };
        // SAFETY: the plan keeps an op's inputs, outputs and scratch in places that do not overlap
        // while it runs (`plan::tests::live_values_do_not_overlap`), aligned to 64 bytes, inside
        // the arena or the inputs of the program, which are borrowed. Tensors of the store are held
        // mutably, and a tensor that an op writes to is one of its inputs once (`Builder::op`).
        let mut frame = unsafe { Frame::new(operands, &given.parameters, pool) };
        self.op.run(&mut frame);
    }
}

/// Widens bf16 values to f32, which is exact.
fn widen(pool: &Pool, held: Values<'_>, to: &mut [f32]) {
    let Values::Bf16(from) = held else {
        unreachable!("a program runs with the store that it was built for");
    };
    pool.run(to.len(), GRAIN, Rows(to, 1), |range, to| {
        for (to, from) in to.0.iter_mut().zip(&from[range]) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    });
}

pub(super) fn prepare(
    builder: &Builder,
    planned: &crate::plan::PlannedNode,
    precision: Precision,
    view: &dyn Fn(usize, &Type) -> View,
) -> PreparedOp {
    let node = &builder.nodes[planned.node];
    let types: Vec<&Type> = node.inputs.iter().map(|&input| builder.ty(input)).collect();
    let nowhere = |ty: &Type| View {
        start: std::ptr::null_mut(),
        len: ty.len(),
        dtype: ty.dtype,
    };
    let scratch_of = |place: &Range<usize>| View {
        len: place.len() / 4,
        ..view(planned.scratch + place.start, &Type::scalar())
    };
    let widened: Vec<_> = widened(builder, node, precision).collect();
    let (mut given, mut stored) = (Vec::new(), Vec::new());
    let inputs = planned
        .inputs
        .iter()
        .zip(&types)
        .enumerate()
        .map(|(index, (place, ty))| match *place {
            Place::Input(offset) => {
                given.push((index, offset));
                nowhere(ty)
            }
            Place::Arena(offset) => view(offset, ty),
            Place::Store(slot) => {
                match widened.iter().find(|&&(input, ..)| input == index) {
                    Some((.., place)) => return scratch_of(place),
                    None => stored.push((index, slot)),
                }
                nowhere(ty)
            }
        })
        .collect();
    let output_types = || node.outputs.iter().map(|&output| builder.ty(output));
    let outputs: Vec<View> = planned
        .outputs
        .iter()
        .zip(output_types())
        .map(|(&offset, ty)| view(offset, ty))
        .collect();
    let (mut copies, mut given_copies, mut stored_copies) = (Vec::new(), Vec::new(), Vec::new());
    for &(place, output) in &planned.copies {
        match place {
            Place::Input(offset) => given_copies.push((offset, output)),
            Place::Arena(offset) => {
                copies.push((view(offset, builder.ty(node.outputs[output])), output));
            }
            Place::Store(slot) => stored_copies.push((slot, output)),
        }
    }
    let scratch = Type::f32(&[node.op.scratch_bytes(&types) / 4]);
    let writes = node.op.writes(types.len());
    let of_frozen = |(input, transposed)| match planned.inputs[input] {
        Place::Store(slot) if builder.frozen.contains(&slot) => Some(RightFactor {
            input,
            slot,
            transposed,
        }),
        _ => None,
    };
    let packed = if precision == Precision::Bf16 {
        let factors = node.op.right_factors(&types).into_iter();
        factors.filter_map(of_frozen).collect()
    } else {
        Vec::new()
    };
    PreparedOp {
        op: Arc::clone(&node.op),
        types: types.iter().map(|&ty| ty.clone()).collect(),
        inputs,
        given,
        stored,
        widened: widened
            .iter()
            .map(|(_, slot, place)| (*slot, scratch_of(place)))
            .collect(),
        // Every output, every tensor that is written to, and the scratch.
        taken: vec![false; outputs.len() + writes.len() + 1],
        writes,
        outputs,
        accumulate: node.into.iter().map(Option::is_some).collect(),
        copies,
        given_copies,
        stored_copies,
        scratch: view(planned.scratch, &scratch),
        precision,
        packed,
    }
}
