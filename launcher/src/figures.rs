//! `spd-launch figures RUN`: the figures of a run's newest checkpoint, drawn again.

use spd_trainer::{Fault, redraw};

use crate::cli::{self, FiguresArgs};
use crate::exit::Exit;
use crate::run_dir::RunDir;
use crate::screen;

/// Draws the figures of a run directory into it.
///
/// # Errors
///
/// Bad input when there is no run or no checkpoint of it; failures of this machine on the way.
pub(crate) fn figures(asked: &FiguresArgs) -> Result<Exit, Fault> {
    let run_dir = RunDir::at(asked.run.clone());
    if !run_dir.config().is_file() {
        return Err(Fault::BadInput(format!(
            "{}: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
            run_dir.path().display()
        )));
    }
    let drawn = redraw(run_dir.path(), cli::threads(asked.threads))?;
    for (path, reason) in &drawn.set_aside {
        screen::note(&format!(
            "checkpoint set aside as {}: {reason}",
            path.display()
        ));
    }
    screen::result(&format!(
        "the figures of step {} are in {}\n",
        drawn.step,
        drawn.directory.display()
    ));
    Ok(Exit::Done)
}
