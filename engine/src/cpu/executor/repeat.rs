//! Repeats replays on another device and compares the results.

use super::super::arena::Arena;
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
        let (repeat, given) = (self.repeat.as_mut()?, &self.given);
        repeat.run(given.inputs().collect(), &given.parameters, store)
    }

    /// Compares them with those of the executor's replay.
    pub(super) fn compare(&self, found: Option<Found>, store: &Store, arena: &Arena) {
        let outputs = self
            .output_names()
            .map(|name| self.output(name, store, arena));
        let tensors: Vec<_> = store.slots().map(|slot| store.read(slot)).collect();
        if let (Some(found), Some(repeat)) = (found, &self.repeat) {
            let tensors = tensors.iter().map(|values| &**values);
            repeat.compare(&found, outputs.chain(tensors).collect());
        }
    }
}
