//! The metrics spool: rows appended by one rank, read back by offset.
//!
//! ```text
//! Row -> Spool::append -> metrics.jsonl -> Reader -> whoever ships or draws it
//!                         system.jsonl
//! ```
//!
//! The file is the queue. Rank 0 appends rows to it and does nothing else for a tracker; another process
//! follows it with a [`Reader`], may be slow or dead for days, and goes on at its [`Mark`]. On resume
//! [`Spool::roll_back`] cuts the rows past the checkpoint, so a curve never runs twice over one step.
//! `FORMAT.md` describes the files.
//!
//! ```
//! use spd_tracker::{Kind, Mark, Read, Reader, Row, Spool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let run = folder.path();
//! let mut spool = Spool::create_or_open(run)?;
//! let row = Row::new(1200, Kind::Train).with("loss/total", 0.034);
//! spool.append(&row);
//! let mark = spool.mark(); // goes into the checkpoint
//! spool.append(&Row::new(1201, Kind::Train).with("loss/total", 0.033));
//! drop(spool);
//!
//! let mut reader = Reader::open(&run.join("metrics.jsonl"), &Mark::default())?;
//! assert_eq!(reader.next()?, Some(Read::Row(row)));
//!
//! Spool::roll_back(run, &mark)?; // resumed from that checkpoint
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: `value`, `row`, `mark`, `lines`, `spool`, `reader`.

mod error;
mod lines;
mod mark;
mod reader;
mod row;
mod spool;
mod value;

pub use error::{ReadError, SpoolError};
pub use mark::Mark;
pub use reader::{Read, Reader};
pub use row::{Kind, Row};
pub use spool::{METRICS, SYSTEM, Spool};
pub use value::{Histogram, Value};
