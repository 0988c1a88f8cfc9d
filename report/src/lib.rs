//! A run on one page, with its curves, figures, components and settings, as a file or live; and the
//! states of runs as a list.
//!
//! ```text
//! source     a path on the command line: a run, or a sweep of runs
//! status     the state of a run: running, stopped, its step -> listing: all runs under a directory
//! run        the rows of a run, read while they are written
//! series     -> curve: the points of them that a screen can show
//!            -> histograms: those of rows
//! figures, settings; components with their labels; probes, which are prompts
//! verdict    one sentence on a run, and what to turn
//! book       all of that of several runs, as JSON
//! page       -> report.html, which is self-contained; or the live page, which polls its server
//! ```
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let run = tempfile::tempdir()?;
//! # let run = run.path();
//! # spd_files::atomic::write_file(&run.join("config.toml"), &[b"name = \"x\""])?;
//! let mut book = spd_report::Book::open(&[run.to_path_buf()])?;
//! book.write(&run.join(spd_report::PAGE))?; // makes report.html in the run directory
//! let page = book.page();
//! book.poll(); // some time later
//! let json = book.news("");
//! # assert!(page.contains("<html") && json.starts_with('{'));
//! # Ok(())
//! # }
//! ```
//!
//! Charts are drawn by uPlot 1.6.32 (MIT, <https://github.com/leeoniya/uPlot>), from the npm
//! package `uplot`; a copy lies in `vendor/`.

mod book;
mod components;
mod curve;
mod error;
mod figures;
mod histograms;
mod labels;
mod listing;
mod page;
mod probes;
mod run;
mod series;
mod settings;
mod source;
mod status;
mod verdict;

pub use book::Book;
pub use components::newest_harvest;
pub use error::ReportError;
pub use listing::{Listed, Listing, Sweep};
pub use probes::PROBES;
pub use status::{LastWord, State, Status, lasting};

/// Name of the page in a run directory, or in the directory of a sweep.
pub const PAGE: &str = "report.html";
