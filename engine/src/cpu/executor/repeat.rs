//! Replays that are repeated elsewhere and compared.
#![expect(unsafe_code, reason = "inputs are pieces of the arena")]

use super::Executor;
use crate::step_parameters::StepParameters;
use crate::store::Store;

/// Names and values of outputs, then of the tensors of the store.
pub(crate) type Found = Vec<(String, Vec<f32>)>;

/// Repeats replays of a program elsewhere.
pub(crate) trait Repeat: Send {
    /// Repeats what the executor is about to do, and says what it found, where that is to be compared.
    ///
    /// - `inputs`: names and words
    fn run(
        &mut self,
        inputs: Vec<(&str, &[u32])>,
        parameters: &StepParameters,
        store: &Store,
    ) -> Option<Found>;

    /// Compares what it found with what the executor did.
    ///
    /// # Panics
    ///
    /// When it differs.
    fn compare(&self, found: &Found, expected: Vec<&[f32]>);
}

impl Executor {
    /// Has replays repeated elsewhere, and compared.
    pub(crate) fn repeat(&mut self, repeat: impl Repeat + 'static) {
        self.repeat = Some(Box::new(repeat));
    }

    /// What the next replay finds elsewhere.
    pub(super) fn repeated(&mut self, store: &Store) -> Option<Found> {
        let inputs = self.inputs.iter().map(|(name, view)| {
            // SAFETY: as for `input`; both types of inputs have elements of four bytes.
            let words = unsafe { std::slice::from_raw_parts(view.start.cast::<u32>(), view.len) };
            (name.as_str(), words)
        });
        let inputs = inputs.collect();
        self.repeat.as_mut()?.run(inputs, &self.parameters, store)
    }

    /// Compares it with the replay that has been made.
    pub(super) fn compare(&self, found: Option<Found>, store: &Store) {
        let outputs = self.output_names().map(|name| self.output(name, store));
        let tensors: Vec<_> = store.slots().map(|slot| store.read(slot)).collect();
        if let (Some(found), Some(repeat)) = (found, &self.repeat) {
            let tensors = tensors.iter().map(|values| &**values);
            repeat.compare(&found, outputs.chain(tensors).collect());
        }
    }
}
