//! `spd-launch eval RUN` and `spd-launch figures RUN`: evaluate or draw the newest checkpoint of a
//! run again, optionally with other settings.

use std::path::{Path, PathBuf};

use spd_trainer::{Again, Fault, Seen, evaluate, redraw};

use crate::cli::{self, EvalArgs, FiguresArgs};
use crate::exit::Exit;
use crate::memory;
use crate::progress::Lines;
use crate::run_dir::RunDir;
use crate::screen;
use crate::summary;

/// Draws the figures of a run directory or of an evaluation.
///
/// # Errors
///
/// Bad input when there is no run, no checkpoint, or a setting that is not of the evaluation;
/// failures of this machine.
pub(crate) fn figures(asked: &FiguresArgs) -> Result<Exit, Fault> {
    let seen = look(asked, redraw)?;
    tell_damaged(&seen.damaged, seen.step);
    screen::result(&format!(
        "the figures of step {} are in {}\n{}",
        seen.step,
        seen.figures.display(),
        page(&seen, asked)
    ));
    Ok(Exit::Done)
}

/// Evaluates a run directory, and prints the numbers as tables or as a JSON row.
///
/// # Errors
///
/// As [`figures`].
pub(crate) fn eval(asked: &EvalArgs) -> Result<Exit, Fault> {
    let (seen, row) = look(&asked.of, evaluate)?;
    tell_damaged(&seen.damaged, seen.step);
    if asked.json {
        screen::object(&row)?;
    } else {
        let (text, _) = summary::read(&seen.place.join("summary.json"))?;
        screen::result(&format!("{text}{}", page(&seen, &asked.of)));
    }
    Ok(Exit::Done)
}

/// Opens the run, if it exists, and calls `look`.
fn look<T>(
    asked: &FiguresArgs,
    look: impl FnOnce(&Again<'_>) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let run_dir = existing(&asked.run)?;
    let lines = Lines::default();
    look(&Again {
        run_dir: run_dir.path(),
        set: &asked.set,
        data: asked.data.as_deref(),
        out: asked.out.as_deref(),
        threads: cli::threads(asked.threads),
        fits: &|need| fits("evaluation", need, memory::available()),
        climbs: &|made, all| lines.say(|| format!("ladder: pass {made} of {all}")),
    })
}

/// The directory of a run that exists.
pub(crate) fn existing(run: &Path) -> Result<RunDir, Fault> {
    let run_dir = RunDir::at(run.to_owned());
    if run_dir.config().is_file() {
        return Ok(run_dir);
    }
    Err(Fault::BadInput(format!(
        "{}: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
        run_dir.path().display()
    )))
}

/// Refuses work that needs more memory than there is.
pub(crate) fn fits(work: &str, need: usize, there: Option<usize>) -> Result<(), String> {
    let words = (
        &*format!("the {work} needs"),
        "a smaller eval.batch_size needs less",
    );
    memory::fits(words, need, there)
}

/// Names newer checkpoints that do not hold.
pub(crate) fn tell_damaged(damaged: &[(PathBuf, String)], step: u64) {
    for (path, reason) in damaged {
        let path = path.display();
        screen::note(&format!(
            "{path}: {reason}; step {step} is the newest that holds"
        ));
    }
}

/// How to view an evaluation, which the page of the run does not show.
fn page(seen: &Seen, asked: &FiguresArgs) -> String {
    if seen.place == RunDir::at(asked.run.clone()).path() {
        return String::new();
    }
    format!(
        "`spd-launch report {}` makes a page of them\n",
        seen.place.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_beyond_the_available_memory_is_refused() {
        let fits = |need, there| fits("evaluation", need, there);
        assert_eq!(fits(10, Some(10)), Ok(()));
        assert_eq!(fits(10, None), Ok(()));
        assert_eq!(
            fits(3 << 20, Some(1 << 20)).unwrap_err(),
            "the evaluation needs 3.00 MiB of memory, and 1.00 MiB are available; a smaller eval.batch_size needs less"
        );
    }
}
