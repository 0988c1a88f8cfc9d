//! The trackers that a run can be sent to. A new one is a [`Sink`](crate::sink::Sink) in its own
//! folder, a word of [`Destination`] and a line here.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use spd_configs::Destination;

use crate::credentials::Environment;
use crate::driver::{Link, drive};
use crate::mlflow::Mlflow;
use crate::run::RunInfo;
use crate::tensorboard::TensorBoard;
use crate::wandb::Wandb;

/// Sends the rows of a run to a tracker until it is over and all of them are sent; see [`drive`].
/// Credentials are those of the environment of the process.
///
/// - `stop`: set when somebody presses Stop on the page of the run
pub(crate) async fn ship(to: Destination, run: Arc<RunInfo>, link: Link, stop: Arc<AtomicBool>) {
    let environment = Environment::of_process();
    match to {
        Destination::Wandb => drive(Wandb::of(environment, stop), &run, link).await,
        Destination::Mlflow => drive(Mlflow::of(environment), &run, link).await,
        Destination::Tensorboard => drive(TensorBoard::default(), &run, link).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::Sink;

    #[test]
    fn run_files_name_every_tracker() {
        let named = Destination::WORDS.0.iter().map(|(name, _)| *name);
        assert!(named.eq([Wandb::NAME, Mlflow::NAME, TensorBoard::NAME]));
    }
}
