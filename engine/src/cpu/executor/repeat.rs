//! Repeats replays on another device and compares the results.
#![expect(unsafe_code, reason = "inputs are pieces of the arena")]

use super::Executor;
use crate::step_parameters::StepParameters;
use crate::store::Store;

/// Names and values of outputs, then of the tensors of the store.
pub(crate) type Found = Vec<(String, Vec<f32>)>;

/// Another device that repeats replays of a program.
pub(crate) trait Repeat: Send {
    /// Repeats the replay that the executor is about to run. Returns its results, if they are to be
    /// compared.
    ///
    /// - `inputs`: names and words
    fn run(
        &mut self,
        inputs: Vec<(&str, &[u32])>,
        parameters: &StepParameters,
        store: &Store,
    ) -> Option<Found>;

    /// Compares the repeated replay with the executor's.
    ///
    /// # Panics
    ///
    /// When they differ.
    fn compare(&self, found: &Found, expected: Vec<&[f32]>);
}

impl Executor {
    /// Has replays repeated and compared.
    pub(crate) fn repeat(&mut self, repeat: impl Repeat + 'static) {
        self.repeat = Some(Box::new(repeat));
    }

    /// Results of the next replay on the other device.
    pub(super) fn repeated(&mut self, store: &Store) -> Option<Found> {
        let inputs = self.inputs.iter().map(|(name, view)| {
            // SAFETY: as for `input`; both types of inputs have elements of four bytes.
            let words = unsafe { std::slice::from_raw_parts(view.start.cast::<u32>(), view.len) };
            (name.as_str(), words)
        });
        let inputs = inputs.collect();
        self.repeat.as_mut()?.run(inputs, &self.parameters, store)
    }

    /// Compares them with those of the executor's replay.
    pub(super) fn compare(&self, found: Option<Found>, store: &Store) {
        let outputs = self.output_names().map(|name| self.output(name, store));
        let tensors: Vec<_> = store.slots().map(|slot| store.read(slot)).collect();
        if let (Some(found), Some(repeat)) = (found, &self.repeat) {
            let tensors = tensors.iter().map(|values| &**values);
            repeat.compare(&found, outputs.chain(tensors).collect());
        }
    }
}
