//! The loop: warm-up, step, evaluate, save. A run that was stopped goes on to the same bits.

use spd_dataloader::Loader;
use spd_engine::Store;

use crate::data::AHEAD;
use crate::fault::{Fault, Interrupt};
use crate::progress::Stop;
use crate::saver::{At, Place, TRAINING_GOES_ON};
use crate::task::{Measured, Task};
use crate::training::{Training, is_due};

/// Trains to the last step, from the newest good checkpoint if there is one. A request to stop is
/// heard between steps, updates of the warm-up, batches of an evaluation and figures; the state is
/// then saved, and the same call goes on from there to the same bits. Returns the last evaluation.
pub(crate) fn train(
    task: &mut dyn Task,
    store: &mut Store,
    place: &Place<'_>,
    stop: Stop<'_>,
) -> Result<Measured, Interrupt> {
    let mut training = Training::open(task, store, place, stop)?;
    let mut ended = until_end(&mut training);
    if matches!(ended, Err(Interrupt::Stop))
        && let Err(fault) = training.leave()
    {
        ended = Err(fault.into());
    }
    if let Err(Interrupt::Fault(fault)) = &ended {
        if matches!(fault, Fault::NotFinite(_)) {
            training.save_before_refused();
        }
        // Failure reports use the last heartbeat.
        training.show(true);
    }
    ended
}

fn until_end(training: &mut Training<'_>) -> Result<Measured, Interrupt> {
    if training.is_new {
        training.begin()?;
    }
    if let At::WarmUp(made) = training.at {
        training.warm_up(made)?;
    }
    let first = training.at.step();
    let sources = training.task.sources().into_iter();
    let loaders = sources.map(|(source, feed)| {
        let position = first * feed.rows as u64;
        Loader::spawn(source, feed, position, AHEAD)
    });
    let mut loaders = loaders.collect::<Result<Vec<_>, _>>()?;
    training.show(true);
    for step in first..training.task.steps() {
        training.poll_writer(TRAINING_GOES_ON);
        training.show(false);
        measure(training, step)?;
        training.step(step, &mut loaders)?;
        if is_due(step + 1, training.place.checkpoint.every) {
            training.save()?;
        }
    }
    training.finish()
}

/// Work that is due before a step: figures and an evaluation.
fn measure(training: &mut Training<'_>, step: u64) -> Result<(), Interrupt> {
    training.check_stop()?;
    let (eval_every, slow_every) = (training.task.eval_every(), training.task.slow_every());
    let is_slow = step > 0 && is_due(step, slow_every);
    training.beside_steps(|training| {
        if is_slow {
            training.draw()?;
        }
        // Last of all: a run that stops here is continued before the evaluation, and must have no
        // row of it.
        if is_slow || step == 0 || is_due(step, eval_every) {
            training.evaluate(is_slow)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests;
