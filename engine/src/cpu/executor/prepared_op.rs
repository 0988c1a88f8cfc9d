//! An op with the addresses of its operands.
#![expect(
    unsafe_code,
    reason = "operands are pieces of one arena, placed by the plan"
)]

use std::sync::Arc;

use super::super::arena::{Arena, RightFactor};
use super::super::bf16::{PANELS, Panel};
use super::super::frame::{Frame, Operands, View};
use super::super::pool::{Pool, Rows};
use crate::given::Given;
use crate::op::{Builder, Op};
use crate::ops::grain;
use crate::plan::{Place, PlannedNode, widened};
use crate::precision::Precision;
use crate::store::{Slot, Store, Values};
use crate::value::{DType, Type};

/// The memory that a replay runs in.
pub(super) struct Memory<'a> {
    pub(super) store: &'a mut Store,
    pub(super) given: &'a Given,
    pub(super) arena: &'a Arena,
}

impl Memory<'_> {
    /// Points a view to its operand. Length and precision of a tensor are those of the store.
    fn find(&mut self, view: &mut View, place: Place, writes: bool) {
        *view = match place {
            Place::Arena(offset) => View {
                start: self.arena.start().wrapping_add(offset),
                ..*view
            },
            Place::Input(offset) => view_of(self.given.f32s(offset, view.len), view.dtype),
            // Only tensors that are written count as changed, on the host or a device.
            Place::Store(slot) if writes => {
                let values = self.store.get_mut(slot);
                View {
                    start: values.as_mut_ptr().cast(),
                    len: values.len(),
                    dtype: DType::F32,
                }
            }
            Place::Store(slot) => match self.store.named(slot).values {
                Values::F32(values) => view_of(values, DType::F32),
                Values::Bf16(values) => view_of(values, DType::Bf16),
            },
        };
    }
}

/// A view that is only read.
fn view_of<T>(values: &[T], dtype: DType) -> View {
    View {
        start: values.as_ptr().cast_mut().cast(),
        len: values.len(),
        dtype,
    }
}

/// An op of a program, whose operands each replay finds in its memory.
pub(super) struct PreparedOp {
    op: Arc<dyn Op>,
    pub(super) operands: Operands,
    /// Their places. An input that is widened has its own in the arena.
    planned: PlannedNode,
    /// Inputs that the store holds in bf16 and each replay widens, with their tensors.
    widened: Vec<(usize, Slot)>,
    /// Which operands the kernel has taken from its frame.
    taken: Vec<bool>,
}

impl PreparedOp {
    /// Most bytes that a thread holds for its packed parts of products.
    pub(super) fn packed_bytes(&self) -> usize {
        let Operands {
            precision, types, ..
        } = &self.operands;
        match precision {
            Precision::F32 | Precision::Tf32 => {
                self.op.packed_bytes(&types.iter().collect::<Vec<_>>())
            }
            Precision::Bf16 => PANELS,
        }
    }

    /// Its packed factors, with their bytes.
    pub(super) fn packed_factors(&self) -> impl Iterator<Item = ((Slot, bool), usize)> {
        self.operands.packed.iter().map(|factor| {
            let ty = &self.operands.types[factor.input];
            // The same for a matrix and its transpose.
            let bytes = Panel::bytes(ty.rows(), ty.columns());
            ((factor.slot, factor.transposed), bytes)
        })
    }

    pub(super) fn run(&mut self, memory: &mut Memory<'_>, pool: &Pool) {
        let Self {
            operands, planned, ..
        } = self;
        let inputs = operands.inputs.iter_mut().zip(&planned.inputs);
        for (index, (view, &place)) in inputs.enumerate() {
            memory.find(view, place, operands.writes.contains(&index));
        }
        let outputs = operands.outputs.iter_mut().zip(&planned.outputs);
        for (view, &offset) in outputs.chain([(&mut operands.scratch, &planned.scratch)]) {
            memory.find(view, Place::Arena(offset), true);
        }
        for &(index, slot) in &self.widened {
            let to = operands.inputs[index];
            // SAFETY: the plan gives it memory of its own, as long as the tensor, beside the op's
            // scratch.
            let to = unsafe { std::slice::from_raw_parts_mut(to.start.cast(), to.len) };
            widen(pool, memory.store.named(slot).values, to);
        }
        for &(place, output) in &planned.copies {
            let to = operands.outputs[output];
            let copy = |from: View| {
                assert_eq!(from.len, to.len, "an accumulation keeps its shape");
                // SAFETY: the plan gives an output that is not in place a buffer of its own, as
                // long as `from`, which lies elsewhere in the arena, or outside it. Both are
                // aligned, and have four bytes an element.
                let (from, to) = unsafe {
                    (
                        std::slice::from_raw_parts(from.start.cast::<u32>(), from.len),
                        std::slice::from_raw_parts_mut(to.start.cast::<u32>(), to.len),
                    )
                };
                pool.run(to.len(), grain(to.len()), Rows(to, 1), |range, to| {
                    to.0.copy_from_slice(&from[range]);
                });
            };
            if let Place::Store(slot) = place {
                copy(view_of(&memory.store.read(slot), DType::F32));
            } else {
                let mut from = to;
                memory.find(&mut from, place, false);
                copy(from);
            }
        }
        let (factors, parameters) = (&memory.arena.factors, &memory.given.parameters);
        // SAFETY: the plan keeps an op's inputs, outputs and scratch in places that do not overlap
        // while it runs (`plan::tests::live_values_do_not_overlap`), aligned to 64 bytes, inside
        // the arena or the inputs of the program, which are borrowed. Tensors of the store are held
        // mutably, and a tensor that an op writes to is one of its inputs once (`Builder::op`).
        let mut frame = unsafe { Frame::new(operands, &mut self.taken, factors, parameters, pool) };
        self.op.run(&mut frame);
    }
}

/// Widens bf16 values to f32, which is exact.
fn widen(pool: &Pool, held: Values<'_>, to: &mut [f32]) {
    let Values::Bf16(from) = held else {
        unreachable!("a program runs with the store that it was built for");
    };
    pool.run(to.len(), grain(to.len()), Rows(to, 1), |range, to| {
        for (to, from) in to.0.iter_mut().zip(&from[range]) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    });
}

pub(super) fn prepare(
    builder: &Builder,
    planned: &PlannedNode,
    precision: Precision,
) -> PreparedOp {
    let (node, mut planned) = (&builder.nodes[planned.node], planned.clone());
    let types = builder.types_of(&node.inputs);
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
    let widened = widened(builder, node, precision).map(|(input, slot, place)| {
        planned.inputs[input] = Place::Arena(planned.scratch + place.start);
        (input, slot)
    });
    let widened = widened.collect();
    let unplaced = |len, dtype| View {
        start: std::ptr::null_mut(),
        len,
        dtype,
    };
    let views = |types: &[&Type]| {
        let views = types.iter().map(|ty| unplaced(ty.len(), ty.dtype));
        views.collect()
    };
    let outputs = builder.types_of(&node.outputs);
    let writes = node.op.writes(types.len());
    PreparedOp {
        op: Arc::clone(&node.op),
        // Every output, every tensor that is written to, and the scratch.
        taken: vec![false; outputs.len() + writes.len() + 1],
        operands: Operands {
            op: node.op.name(),
            inputs: views(&types),
            writes,
            outputs: views(&outputs),
            accumulate: node.into.iter().map(Option::is_some).collect(),
            scratch: unplaced(node.op.scratch_bytes(&types) / 4, DType::F32),
            precision,
            packed,
            types: types.into_iter().cloned().collect(),
        },
        planned,
        widened,
    }
}
