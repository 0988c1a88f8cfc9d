//! The GPUs of `--gpus`.

use spd_trainer::{Fault, cuda};

use crate::cli::RunArgs;

/// The GPU of a single rank.
const GPU: usize = 0;

/// A row of the plan about the GPUs of `--gpus` where it is made without them: on a login node, or
/// for a job elsewhere.
///
/// # Errors
///
/// As [`gpus`], if the run is to start here and now.
pub(crate) fn unseen(asked: &RunArgs, ranks: usize) -> Result<Option<String>, Fault> {
    if !asked.dry_run || asked.gpus == 0 {
        return gpus(asked.gpus, ranks).map(|_| None);
    }
    let why = match cuda::lacks(asked.gpus, ranks > 1) {
        Some(lacks) => format!("not visible here ({lacks})"),
        None if asked.slurm.is_some() => "those of the job, not of this machine".to_owned(),
        None => return Ok(None),
    };
    Ok(Some(format!(
        "{why}: their memory is checked when the run starts"
    )))
}

/// The number of GPUs of `--gpus`, after checking that they are usable.
///
/// - `ranks`: of all nodes
///
/// # Errors
///
/// One line, when there are fewer, or a library is missing.
pub(crate) fn gpus(asked: usize, ranks: usize) -> Result<usize, Fault> {
    if asked > 0
        && let Some(lacks) = cuda::lacks(asked, ranks > 1)
    {
        return Err(Fault::BadInput(format!(
            "--gpus {asked}: {lacks}; `spd-launch doctor` says what this machine has; leave it out to run on the CPU"
        )));
    }
    Ok(asked)
}

/// The GPU of `--gpus` for a command with one rank.
///
/// # Errors
///
/// One line, when there is none, or several are requested.
pub(crate) fn gpu(asked: usize) -> Result<Option<usize>, Fault> {
    if asked > 1 {
        return Err(Fault::BadInput(format!(
            "--gpus {asked}: only a run uses several GPUs; give --gpus 1"
        )));
    }
    Ok((gpus(asked, 1)? > 0).then_some(GPU))
}
