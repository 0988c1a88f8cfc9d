//! `spd-launch bench`: how long a training step takes.

use spd_trainer::Fault;

use crate::cli::BenchArgs;
use crate::exit::Exit;

/// Times steps of the named runs.
///
/// # Errors
///
/// Always: the trainer of this build has no bench.
pub(crate) fn bench(asked: &BenchArgs) -> Result<Exit, Fault> {
    Err(Fault::BadInput(format!(
        "bench {}: not in this build",
        asked.names.join(" ")
    )))
}
