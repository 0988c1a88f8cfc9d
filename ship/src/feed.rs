//! The rows that a sink has not sent yet, in the form in which its driver takes them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use spd_tracker::{Cursor, Kind, Mark, Read, ReadError, Reader, Start, system_files};

use crate::sink::Stamped;

/// Seconds for each row of progress that is sent; the spool has two a second.
const PROGRESS_EVERY: f64 = 10.0;

/// Metrics rows of whole steps, and the place after them.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    pub(crate) rows: Vec<Stamped>,
    pub(crate) end: Cursor,
}

/// The next rows.
pub(crate) enum Fed {
    Steps(Steps),
    /// Rows that were read are void; the place at which others begin.
    RolledBack(Start, Cursor),
}

/// Follows the files of a run.
pub(crate) struct Feed {
    dir: PathBuf,
    metrics: Reader,
    /// Rows of a step that may get more rows.
    open: Vec<Stamped>,
    system: BTreeMap<String, Reader>,
    /// The last interval of which a row of progress was sent, by file.
    progress: BTreeMap<String, f64>,
}

impl Feed {
    /// The rows after a place.
    pub(crate) fn of(
        dir: &Path,
        metrics: &Cursor,
        system: &BTreeMap<String, Mark>,
    ) -> Result<Self, ReadError> {
        let mut feed = Self {
            dir: dir.to_path_buf(),
            metrics: Reader::of_metrics(dir, metrics)?,
            open: Vec::new(),
            system: BTreeMap::new(),
            progress: BTreeMap::new(),
        };
        for (name, mark) in system {
            let reader = Reader::open(&dir.join(name), mark)?;
            feed.system.insert(name.clone(), reader);
        }
        Ok(feed)
    }

    /// Whole steps of about `most` rows. A step is complete when a row of another step follows, or
    /// none can follow.
    pub(crate) fn steps(&mut self, most: usize, is_over: bool) -> Result<Fed, ReadError> {
        let mut steps = Steps::default();
        while steps.rows.len() < most {
            let before = self.metrics.cursor();
            match self.metrics.next() {
                Ok(Some(Read::Row { row, time })) => {
                    let step = self.open.last().map(|open| open.row.step);
                    if step.is_some_and(|step| step != row.step) {
                        steps.rows.append(&mut self.open);
                        steps.end = before;
                    }
                    self.open.push(Stamped { row, time });
                }
                Ok(Some(Read::RolledBack(start))) => {
                    self.open.clear();
                    return Ok(Fed::RolledBack(start, self.metrics.cursor()));
                }
                Ok(None) => {
                    if is_over && !self.open.is_empty() {
                        steps.rows.append(&mut self.open);
                        steps.end = before;
                    }
                    break;
                }
                // The report names such lines.
                Err(ReadError::Junk { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Fed::Steps(steps))
    }

    /// At most `most` system rows of one file, and the place after them.
    pub(crate) fn system(
        &mut self,
        most: usize,
    ) -> Result<Option<(String, Mark, Vec<Stamped>)>, ReadError> {
        for name in system_files(&self.dir) {
            if !self.system.contains_key(&name) {
                let reader = Reader::open(&self.dir.join(&name), &Mark::default())?;
                self.system.insert(name, reader);
            }
        }
        for (name, reader) in &mut self.system {
            let (before, mut rows) = (reader.mark(), Vec::new());
            while rows.len() < most {
                match reader.next() {
                    Ok(Some(Read::Row { row, time })) => {
                        if row.kind == Kind::System && row.number("steps").is_some() {
                            let stretch = (time / PROGRESS_EVERY).floor();
                            let last = self.progress.insert(name.clone(), stretch);
                            if last.is_some_and(|last| last >= stretch) {
                                continue;
                            }
                        }
                        rows.push(Stamped { row, time });
                    }
                    Ok(Some(Read::RolledBack(_))) | Err(ReadError::Junk { .. }) => {}
                    Ok(None) => break,
                    Err(error) => return Err(error),
                }
            }
            let mark = reader.mark();
            if mark != before {
                return Ok(Some((name.clone(), mark, rows)));
            }
        }
        Ok(None)
    }
}
