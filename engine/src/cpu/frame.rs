//! The operands of one op while its kernel runs.
#![expect(
    unsafe_code,
    reason = "the plan hands out disjoint pieces of one arena"
)]

use std::marker::PhantomData;

use super::executor::StepParameters;
use super::pool::Pool;
use crate::builder::StepScalar;
use crate::precision::Precision;
use crate::value::{DType, Type};

/// Where an operand lies and how long it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

// SAFETY: a view is used through a `Frame` alone, which reads inputs as shared slices and hands out each
// output once.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

/// What a kernel sees: inputs, outputs, scratch, the step's numbers, and threads.
pub struct Frame<'a> {
    pub(crate) types: &'a [Type],
    pub(crate) inputs: &'a [View],
    pub(crate) outputs: &'a [View],
    /// Per output, whether it holds a value to add to.
    pub(crate) accumulate: &'a [bool],
    pub(crate) scratch: View,
    /// What the factors of products are rounded to.
    pub(crate) precision: Precision,
    /// Numbers of this step.
    pub parameters: &'a StepParameters,
    /// Threads.
    pub pool: &'a Pool,
    pub(crate) marker: PhantomData<&'a mut [f32]>,
}

impl<'a> Frame<'a> {
    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Type of an input.
    pub fn ty(&self, index: usize) -> &'a Type {
        &self.types[index]
    }

    /// An f32 input.
    pub fn input(&self, index: usize) -> &'a [f32] {
        let view = self.inputs[index];
        debug_assert_eq!(view.dtype, DType::F32);
        // SAFETY: the plan keeps an op's inputs, outputs and scratch in places that do not overlap while it
        // runs (`plan::tests::nothing_overlaps_while_it_lives`), aligned to 64 bytes, inside an arena or a
        // store that outlives the frame.
        unsafe { std::slice::from_raw_parts(view.start.cast::<f32>(), view.len) }
    }

    /// Threads for products, and what their factors are rounded to.
    pub(crate) fn products(&self) -> (&'a Pool, Precision) {
        (self.pool, self.precision)
    }

    /// An input of token ids.
    pub fn input_u32(&self, index: usize) -> &'a [u32] {
        let view = self.inputs[index];
        debug_assert_eq!(view.dtype, DType::U32);
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts(view.start.cast::<u32>(), view.len) }
    }

    /// An output, and whether the kernel must add to it instead of overwriting. Ask once for each.
    pub fn output(&mut self, index: usize) -> (&'a mut [f32], bool) {
        let add = self.accumulate.get(index).copied().unwrap_or(false);
        // SAFETY: as for `input`; a kernel asks for each output once, so there is one mutable slice.
        (unsafe { slice_mut(self.outputs[index]) }, add)
    }

    /// A persistent input that the op writes to ([`Op::writes`](crate::op::Op::writes)). Ask once for each, and not
    /// through `input`.
    pub fn state(&mut self, index: usize) -> &'a mut [f32] {
        // SAFETY: as for `output`; the executor holds the store mutably, and ops that write to it run last
        // and one at a time.
        unsafe { slice_mut(self.inputs[index]) }
    }

    /// The scratch that the op asked for. Ask once.
    pub fn scratch(&mut self) -> &'a mut [f32] {
        // SAFETY: as for `output`.
        unsafe { slice_mut(self.scratch) }
    }

    /// A number of this step.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        self.parameters.scalars[scalar.0 as usize]
    }
}

/// # Safety
///
/// The view must point to live, aligned f32s that nobody else reads or writes for `'a`.
unsafe fn slice_mut<'a>(view: View) -> &'a mut [f32] {
    debug_assert_eq!(view.dtype, DType::F32);
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(view.start.cast::<f32>(), view.len) }
}
