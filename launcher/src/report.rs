//! `spd-launch report RUN...`: a page about runs that needs neither network nor server.

use std::path::{Path, PathBuf};

use spd_report::{Book, PAGE, ReportError};
use spd_trainer::Fault;

use crate::bench::unwritable;
use crate::cli::ReportArgs;
use crate::exit::Exit;
use crate::profile::try_to_write;
use crate::screen;

/// Writes the page of each run and sweep to its directory, or a single page of all of them to
/// `--out`.
///
/// # Errors
///
/// Bad input when one is neither a run nor a sweep, or `--out` cannot be written, before anything
/// is written. A disk that refuses.
pub(crate) fn report(asked: &ReportArgs) -> Result<Exit, Fault> {
    let pages: Vec<(PathBuf, &[PathBuf])> = match &asked.out {
        Some(out) => vec![(out.clone(), &asked.runs)],
        None => asked
            .runs
            .chunks(1)
            .map(|run| (run[0].join(PAGE), run))
            .collect(),
    };
    let books: Result<Vec<Book>, Fault> = pages.iter().map(|(_, runs)| open(runs)).collect();
    let books = books?;
    if let Some(out) = &asked.out {
        try_to_write(out).map_err(|error| unwritable("--out", out, &error))?;
    }
    for ((path, _), mut book) in pages.iter().zip(books) {
        book.write(path).map_err(|error| fault(&error))?;
        screen::result(&format!("the page is {}\n", shown(path)));
    }
    Ok(Exit::Done)
}

/// Opens runs for a page.
///
/// # Errors
///
/// Bad input when one of them is not a run.
pub(crate) fn open(runs: &[PathBuf]) -> Result<Book, Fault> {
    Book::open(runs).map_err(|error| fault(&error))
}

/// The fault for an error of a report: bad input, or a failure of this machine.
pub(crate) fn fault(error: &ReportError) -> Fault {
    match error {
        ReportError::NoRun { .. } | ReportError::NoDirectory { .. } => {
            Fault::BadInput(error.to_string())
        }
        ReportError::Write { .. } => Fault::Failed(anyhow::anyhow!("{error}")),
    }
}

/// An absolute path, which a browser can open.
fn shown(path: &Path) -> String {
    let whole = std::path::absolute(path);
    whole
        .unwrap_or_else(|_| path.to_path_buf())
        .display()
        .to_string()
}
