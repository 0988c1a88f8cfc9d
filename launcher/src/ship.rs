//! `spd-launch ship RUN...`: sends rows that trackers have not received, from any machine.

use std::time::Duration;

use spd_ship::{About, Shipper};
use spd_trainer::Fault;
use spd_trainer::run_file::Run;

use crate::cli::ShipArgs;
use crate::exit::Exit;
use crate::launched::ended;
use crate::run_dir::RunDir;
use crate::screen;
use crate::sweep::rows;

/// Ships runs one after the other, until every tracker has everything; waits for servers without a
/// limit. Of a sweep, the sweep is shipped first, then its runs that have begun.
///
/// # Errors
///
/// Bad input, when one of them is not a run, or names no tracker.
pub(crate) fn ship(asked: &ShipArgs) -> Result<Exit, Fault> {
    let mut all = Vec::new();
    for path in &asked.runs {
        let dir = RunDir::at(path.clone());
        if dir.sweep().is_file() && !dir.config().is_file() {
            all.extend(rows::all_of(&dir, &asked.tracker).map_err(Fault::BadInput)?);
            continue;
        }
        let mut run = Run::load_resolved(&dir.config())?;
        if !asked.tracker.is_empty() {
            run.tracker.to.clone_from(&asked.tracker);
        }
        let exit = ended(dir.path()).unwrap_or(Exit::Stopped);
        let about = About::run(dir.path(), &run.name, &run.tracker, &run);
        all.push((dir, about, exit));
    }
    // A sweep has the trackers of its runs' files.
    let names_none = |(dir, about, _): &&(RunDir, About, Exit)| {
        about.tracker.to.is_empty() && dir.config().is_file()
    };
    if let Some((dir, ..)) = all.iter().find(names_none) {
        return Err(Fault::BadInput(format!(
            "{}: its config.toml names no tracker under [tracker]; name one: --tracker wandb, mlflow or tensorboard",
            dir.path().display()
        )));
    }
    let (mut is_done, is_one) = (true, all.len() == 1);
    for (dir, about, exit) in all {
        let shipper = Shipper::start(dir.path(), about, screen::note);
        let shipper = shipper.map_err(|error| Fault::Failed(error.into()))?;
        let Some(shipper) = shipper else { continue };
        for told in shipper.finish(exit.code(), Duration::MAX) {
            is_done &= told.is_done;
            screen::note(&if is_one {
                told.line
            } else {
                format!("{}: {}", dir.path().display(), told.line)
            });
        }
    }
    Ok(if is_done { Exit::Done } else { Exit::Failed })
}
