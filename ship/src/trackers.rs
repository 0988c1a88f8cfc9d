//! The trackers that a run can be sent to. A new one is a [`Tracker`] in its own folder and a line
//! in [`TRACKERS`].

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::driver::{Link, drive};
use crate::mlflow::Mlflow;
use crate::run::RunInfo;
use crate::sink::Tracker;
use crate::tensorboard::TensorBoard;
use crate::wandb::Wandb;

const TRACKERS: [Registered; 3] = [
    Registered::of::<Wandb>(),
    Registered::of::<Mlflow>(),
    Registered::of::<TensorBoard>(),
];

type Ship = fn(Arc<RunInfo>, Link, Arc<AtomicBool>) -> Pin<Box<dyn Future<Output = ()>>>;

/// A tracker and its name.
#[derive(Clone, Copy)]
pub(crate) struct Registered {
    pub(crate) name: &'static str,
    /// Sends the rows of a run until it is over and all of them are sent; see [`drive`].
    pub(crate) ship: Ship,
}

impl Registered {
    const fn of<T: Tracker + 'static>() -> Self {
        Self {
            name: T::NAME,
            ship: |run, link, stop| Box::pin(async move { drive(T::new(stop), &run, link).await }),
        }
    }

    /// The tracker of a name.
    pub(crate) fn find(name: &str) -> Option<Self> {
        TRACKERS.into_iter().find(|tracker| tracker.name == name)
    }
}

#[cfg(test)]
mod tests {
    use spd_configs::Destination;

    use super::*;

    #[test]
    fn run_files_name_every_tracker() {
        let named = Destination::WORDS.0.iter().map(|(name, _)| *name);
        assert!(named.eq(TRACKERS.map(|tracker| tracker.name)));
    }
}
