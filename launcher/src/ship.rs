//! `spd-launch ship RUN...`: what trackers have not taken yet is sent now, from whatever machine.

use std::time::Duration;

use spd_configs::Run;
use spd_ship::Shipper;
use spd_trainer::Fault;

use crate::cli::ShipArgs;
use crate::exit::Exit;
use crate::run_dir::RunDir;
use crate::screen;

/// Ships runs one after the other, until every tracker has everything. Each waits for its servers as long as it takes.
///
/// # Errors
///
/// Bad input, when one of them is no run, or names no tracker.
pub(crate) fn ship(asked: &ShipArgs) -> Result<Exit, Fault> {
    let mut runs = Vec::new();
    for path in &asked.runs {
        let dir = RunDir::at(path.clone());
        let mut run = Run::load_resolved(&dir.config())
            .map_err(|faults| Fault::BadInput(faults.to_string()))?;
        if !asked.tracker.is_empty() {
            run.tracker.to.clone_from(&asked.tracker);
        }
        if run.tracker.to.is_empty() {
            return Err(Fault::BadInput(format!(
                "{}: its config.toml names no tracker under [tracker]; name one: --tracker wandb, mlflow or tensorboard",
                path.display()
            )));
        }
        runs.push((dir, run));
    }
    let mut is_done = true;
    for (dir, run) in runs {
        let shipper = Shipper::start(dir.path(), &run, screen::note);
        let shipper = shipper.map_err(|error| Fault::Failed(error.into()))?;
        let Some(shipper) = shipper else { continue };
        for told in shipper.finish(dir.end().code(), Duration::MAX) {
            is_done &= told.is_done;
            screen::note(&told.line);
        }
    }
    Ok(if is_done { Exit::Done } else { Exit::Failed })
}
