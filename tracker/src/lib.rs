//! The metrics spool: rows of one rank, appended by a thread of its own, read back by offset.
//!
//! ```text
//! Row -> Spool::append -> thread -> metrics.jsonl, metrics.times -> Reader -> trackers, report
//!                                   system.jsonl
//!        Spool::start            -> starts.jsonl
//! ```
//!
//! The file is the queue. Rank 0 appends rows and does nothing else for a tracker. Another process
//! follows the file with a [`Reader`], may be slow or dead for days, and continues at its
//! [`Cursor`]. On resume [`Spool::start`] cuts the rows past the checkpoint and records the cut, so
//! a curve has every step once. `FORMAT.md` describes the files.
//!
//! ```
//! use spd_tracker::{Cursor, Kind, Mark, Read, Reader, Row, Spool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let run = folder.path();
//! let spool = Spool::start(run, &Mark::default(), 0)?;
//! let row = Row::new(1200, Kind::Train).with("loss/total", 0.034);
//! spool.append(row.clone());
//! let mark = spool.mark().wait()?; // goes into the checkpoint
//! spool.append(Row::new(1201, Kind::Train).with("loss/total", 0.033));
//! drop(spool);
//!
//! let mut reader = Reader::of_metrics(run, &Cursor::default())?;
//! assert!(matches!(reader.next()?, Some(Read::Row { row: read, .. }) if read == row));
//!
//! Spool::start(run, &mark, 1201)?; // resumed from that checkpoint
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: `value`, `row`, `mark`, `lines`, `times`, `version`, `starts`, `mend`, `files`,
//! `queue`, `spool`, `reader`, `tail`.

mod error;
mod files;
mod lines;
mod mark;
mod mend;
mod queue;
mod reader;
mod row;
mod spool;
mod starts;
mod tail;
mod times;
mod value;
mod version;

pub use error::{ReadError, SpoolError};
pub use files::{METRICS, SYSTEM, machine_file, system_files};
pub use mark::Mark;
pub use reader::{Cursor, Read, Reader};
pub use row::{Kind, Row};
pub use spool::{PendingMark, Spool};
pub use starts::{Mended, STARTS, Start, now};
pub use tail::LastRows;
pub use times::TIMES;
pub use value::{Histogram, Value};
pub use version::{set_version, version};
