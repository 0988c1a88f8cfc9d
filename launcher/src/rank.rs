//! `spd-launch rank`: one rank of a prepared run, started by the launcher, srun or torchrun.

use spd_trainer::{Fault, Outcome};

use crate::cli::RankArgs;
use crate::exit::Exit;
use crate::run::gpu;
use crate::stop;
use crate::world::World;

/// Runs this process's rank to its end.
///
/// # Errors
///
/// What the trainer finds; bad input when the environment describes no place, or one that this build
/// cannot take.
pub(crate) fn rank(asked: &RankArgs) -> Result<Exit, Fault> {
    // First of all: a signal that comes before this ends the process, unsaved.
    let stop = stop::flag().map_err(|error| Fault::Failed(error.into()))?;
    let world = World::from_env().map_err(Fault::BadInput)?;
    if world.size > 1 {
        return Err(Fault::BadInput(format!(
            "rank {} of {}: this build runs one rank; start it with one task",
            world.rank, world.size
        )));
    }
    Ok(
        match spd_trainer::rank(&asked.run_dir, asked.threads, gpu(asked.gpus)?, &stop)? {
            Outcome::Done => Exit::Done,
            Outcome::Stopped => Exit::Stopped,
        },
    )
}
