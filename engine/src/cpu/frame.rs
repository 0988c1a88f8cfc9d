//! The operands of one op while its kernel runs.
#![expect(
    unsafe_code,
    reason = "the plan hands out disjoint pieces of one arena"
)]

use std::ops::Range;

use super::arena::{Factors, RightFactor};
use super::bf16::Panel;
use super::output::Output;
use super::pool::Pool;
use crate::precision::Precision;
use crate::step_parameters::StepParameters;
use crate::store::Values;
use crate::value::{DType, StepScalar, Type};

/// Address and length of an operand.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) start: *mut u8,
    pub(super) len: usize,
    pub(super) dtype: DType,
}

// SAFETY: a view is used only through a `Frame`, which reads inputs as shared slices and hands out
// each output once.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

/// The operands of an op.
pub(super) struct Operands {
    /// Its name.
    pub(super) op: &'static str,
    pub(super) types: Vec<Type>,
    pub(super) inputs: Vec<View>,
    /// The inputs that it writes to.
    pub(super) writes: Range<usize>,
    pub(super) outputs: Vec<View>,
    /// For each output, whether it holds a value to add to.
    pub(super) accumulate: Vec<bool>,
    pub(super) scratch: View,
    /// Precision to which the factors of products are rounded.
    pub(super) precision: Precision,
    /// Its frozen right factors of bf16 products, which are packed for all replays.
    pub(super) packed: Vec<RightFactor>,
}

/// The operands of a kernel: inputs, outputs, scratch, the step's parameters, and threads.
pub struct Frame<'a> {
    operands: &'a Operands,
    /// Whether the kernel has taken each output, each input that it writes to, and the scratch.
    taken: &'a mut [bool],
    factors: &'a Factors,
    /// Parameters of this step.
    pub parameters: &'a StepParameters,
    /// Threads.
    pub pool: &'a Pool,
}

impl<'a> Frame<'a> {
    /// The frame of one run.
    ///
    /// # Safety
    ///
    /// Every view points to live, aligned values of its type for `'a`. Outputs, inputs that are
    /// written to, and scratch overlap with no other view, and nothing else accesses them; nothing
    /// writes to the other inputs.
    pub(super) unsafe fn new(
        operands: &'a Operands,
        taken: &'a mut [bool],
        factors: &'a Factors,
        parameters: &'a StepParameters,
        pool: &'a Pool,
    ) -> Self {
        taken.fill(false);
        Self {
            operands,
            taken,
            factors,
            parameters,
            pool,
        }
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.operands.inputs.len()
    }

    /// Type of an input.
    pub fn ty(&self, index: usize) -> &'a Type {
        &self.operands.types[index]
    }

    /// An f32 input.
    ///
    /// # Panics
    ///
    /// When it is no f32 input, or one that the op writes to.
    pub fn input(&self, index: usize) -> &'a [f32] {
        let view = self.read(index, DType::F32);
        // SAFETY: the promise of `new`; nothing is written to it in `'a`.
        unsafe { std::slice::from_raw_parts(view.start.cast::<f32>(), view.len) }
    }

    /// An input in the precision in which it is held, f32 or bf16.
    ///
    /// # Panics
    ///
    /// When it is an input of token ids, or one that the op writes to.
    pub fn values(&self, index: usize) -> Values<'a> {
        if self.operands.inputs[index].dtype != DType::Bf16 {
            return Values::F32(self.input(index));
        }
        let view = self.read(index, DType::Bf16);
        // SAFETY: as for `input`.
        Values::Bf16(unsafe { std::slice::from_raw_parts(view.start.cast(), view.len) })
    }

    /// An f32 input, or an empty slice if it is held in bf16: then it is [packed](Self::packed).
    pub(crate) fn input_unless_packed(&self, index: usize) -> &'a [f32] {
        match self.values(index) {
            Values::F32(values) => values,
            Values::Bf16(_) => &[],
        }
    }

    /// Precision of the factors of products.
    pub(crate) fn precision(&self) -> Precision {
        self.operands.precision
    }

    /// An input as the right factor of bf16 products, stored transposed or not, if it is packed for
    /// all replays ([`Op::right_factors`](crate::op::Op::right_factors)).
    pub(crate) fn packed(&self, index: usize, transposed: bool) -> Option<&'a Panel> {
        let mut packed = self.operands.packed.iter();
        let found = packed.find(|factor| (factor.input, factor.transposed) == (index, transposed));
        found.map(|factor| self.factors.get(factor))
    }

    /// An input of token ids.
    ///
    /// # Panics
    ///
    /// When it is no input of token ids.
    pub fn input_u32(&self, index: usize) -> &'a [u32] {
        let view = self.read(index, DType::U32);
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts(view.start.cast::<u32>(), view.len) }
    }

    fn read(&self, index: usize, dtype: DType) -> View {
        let Operands { op, writes, .. } = self.operands;
        let view = self.operands.inputs[index];
        assert!(
            view.dtype == dtype,
            "{op}: input {index} is {:?}",
            view.dtype
        );
        assert!(
            !writes.contains(&index),
            "{op}: input {index} is written to"
        );
        view
    }

    /// An output.
    ///
    /// # Panics
    ///
    /// When it was taken before.
    pub fn output(&mut self, index: usize) -> Output<&'a mut [f32]> {
        let view = self.operands.outputs[index];
        let add = self.operands.accumulate.get(index).copied();
        self.take(index, || format!("output {index}"));
        Output {
            // SAFETY: the promise of `new`; it is taken once.
            values: unsafe { slice_mut(view) },
            add: add.unwrap_or(false),
        }
    }

    /// Whether the inputs from `first` on, which are guards, end in finite numbers.
    pub(crate) fn are_finite_from(&self, first: usize) -> bool {
        let mut guards = (first..self.inputs()).map(|index| self.input(index));
        guards.all(|guard| guard.last().is_none_or(|end| end.is_finite()))
    }

    /// An input of the store that the op writes to ([`Op::writes`](crate::op::Op::writes)).
    ///
    /// # Panics
    ///
    /// When the op does not write to it, or it was taken before.
    pub fn state(&mut self, index: usize) -> &'a mut [f32] {
        let Operands { op, writes, .. } = self.operands;
        assert!(
            writes.contains(&index),
            "{op}: input {index} is not written to"
        );
        let at = self.operands.outputs.len() + index - writes.start;
        let view = self.operands.inputs[index];
        self.take(at, || format!("input {index}"));
        // SAFETY: as for `output`.
        unsafe { slice_mut(view) }
    }

    /// The scratch memory of the op.
    ///
    /// # Panics
    ///
    /// When it was taken before.
    pub fn scratch(&mut self) -> &'a mut [f32] {
        let view = self.operands.scratch;
        self.take(self.taken.len() - 1, || "scratch".to_owned());
        // SAFETY: as for `output`.
        unsafe { slice_mut(view) }
    }

    /// Marks a slice as taken: a second slice of it would be a second writer.
    fn take(&mut self, at: usize, what: impl FnOnce() -> String) {
        let before = std::mem::replace(&mut self.taken[at], true);
        assert!(!before, "{}: {} is taken twice", self.operands.op, what());
    }

    /// Value of a step scalar.
    pub fn scalar(&self, scalar: StepScalar) -> f32 {
        self.parameters.scalars[scalar.0 as usize]
    }
}

/// # Safety
///
/// The view must point to live, aligned f32s that nothing else accesses for `'a`.
unsafe fn slice_mut<'a>(view: View) -> &'a mut [f32] {
    assert_eq!(view.dtype, DType::F32, "kernels write f32");
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(view.start.cast::<f32>(), view.len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `work` on the frame of an op with an input, a tensor that it writes to, an output and
    /// scratch, of two values each.
    fn of_one_op<R>(work: impl FnOnce(&mut Frame<'_>) -> R) -> R {
        let mut values = [[1f32, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]];
        let [input, state, output, scratch] = values.each_mut().map(|values| View {
            start: values.as_mut_ptr().cast(),
            len: values.len(),
            dtype: DType::F32,
        });
        let (ty, parameters, pool) = (Type::f32(&[2]), StepParameters::default(), Pool::single());
        let operands = Operands {
            op: "test",
            types: vec![ty.clone(), ty],
            inputs: vec![input, state],
            writes: 1..2,
            outputs: vec![output],
            accumulate: vec![true],
            scratch,
            precision: Precision::F32,
            packed: Vec::new(),
        };
        let (taken, factors) = (&mut [true; 3], Factors::default());
        // SAFETY: four arrays that nothing else accesses.
        work(&mut unsafe { Frame::new(&operands, taken, &factors, &parameters, &pool) })
    }

    #[test]
    fn each_operand_is_handed_out() {
        of_one_op(|frame| {
            assert_eq!(frame.input(0), frame.input(0));
            let Output { values, add } = frame.output(0);
            let all = [frame.state(1), values, frame.scratch()];
            assert_eq!(
                (all, add),
                (
                    [&mut [3.0, 4.0][..], &mut [5.0, 6.0], &mut [7.0, 8.0]],
                    true
                )
            );
        });
    }

    #[test]
    #[should_panic(expected = "test: output 0 is taken twice")]
    fn an_output_is_taken_once() {
        of_one_op(|frame| [frame.output(0).add, frame.output(0).add]);
    }

    #[test]
    #[should_panic(expected = "test: input 1 is taken twice")]
    fn a_tensor_that_is_written_to_is_taken_once() {
        of_one_op(|frame| [frame.state(1).len(), frame.state(1).len()]);
    }

    #[test]
    #[should_panic(expected = "test: scratch is taken twice")]
    fn scratch_is_taken_once() {
        of_one_op(|frame| [frame.scratch().len(), frame.scratch().len()]);
    }

    #[test]
    #[should_panic(expected = "test: input 1 is written to")]
    fn a_written_tensor_is_not_an_input() {
        of_one_op(|frame| frame.input(1).len());
    }

    #[test]
    #[should_panic(expected = "test: input 0 is not written to")]
    fn an_input_is_not_written_to() {
        of_one_op(|frame| frame.state(0).len());
    }

    #[test]
    #[should_panic(expected = "test: input 0 is F32")]
    fn an_input_is_read_as_its_own_type() {
        of_one_op(|frame| frame.input_u32(0).len());
    }
}
