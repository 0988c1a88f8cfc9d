//! One series of event files, the last of which is appended to.
//!
//! TensorBoard reads the files of a directory in the order of their names, each to its end, and
//! never again. So if a file has another end than it should, a new one begins, whose head voids
//! older files. That also holds for a TensorBoard that has read them already.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use spd_files::atomic;
use spd_tracker::now;

use super::event;
use crate::sink::{Refusal, Taken};

/// Prefix of the names of all event files.
const PREFIX: &str = "events.out.tfevents.";

/// The acknowledged part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Written {
    /// Name of the last file.
    file: String,
    /// Bytes of the last file.
    bytes: u64,
}

#[cfg(test)]
impl Written {
    /// Acknowledged bytes of a file.
    pub(super) fn kept_of(&self, path: &Path) -> u64 {
        if path.ends_with(&self.file) {
            self.bytes
        } else {
            0
        }
    }
}

/// The files of a directory.
#[derive(Debug)]
pub(super) struct Segment {
    dir: PathBuf,
    /// Host name of the writer.
    host: String,
    /// The last file, if its end is known to be right.
    file: Option<File>,
    /// A file whose head did not fit on the disk. It is used as the next file, so there is at most
    /// one.
    empty: Option<String>,
}

impl Segment {
    pub(super) fn new(dir: PathBuf, host: &str) -> Self {
        let host = host.chars().map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '-'
            }
        });
        Self {
            dir,
            host: host.collect(),
            file: None,
            empty: None,
        }
    }

    /// Opens the last file at its acknowledged end, or begins a new one. Returns whether it is the
    /// first one.
    ///
    /// # Errors
    ///
    /// [`Refusal::Gone`] if the file is missing, or has another end.
    pub(super) fn open(&mut self, written: &mut Written) -> Result<bool, Refusal> {
        self.file = None;
        let names = self.names().map_err(|found| self.later(&found))?;
        let mut kept = names.iter().filter(|name| **name <= written.file);
        let last = kept.next_back();
        if last != Some(&written.file).filter(|name| !name.is_empty()) {
            let why = format!("{} is gone", self.dir.join(&written.file).display());
            return Err(Refusal::Gone { why });
        }
        // No cursor lists these.
        let unknown = names.iter().filter(|name| **name > written.file);
        let unknown: Vec<String> = unknown.cloned().collect();
        if last.is_some() {
            self.file = Some(self.reopen(written, unknown.is_empty())?);
            return Ok(false);
        }
        // The new one first, so that its name comes after theirs: a reader of one of them continues
        // with it.
        self.begin(written)?;
        for name in unknown.iter().filter(|name| **name != written.file) {
            let removed = atomic::remove(&self.dir.join(name));
            removed.map_err(|found| self.later(&found))?;
        }
        Ok(true)
    }

    /// The last file, if its end is right.
    fn reopen(&self, written: &Written, is_last: bool) -> Result<File, Refusal> {
        let path = self.dir.join(&written.file);
        let mut options = OpenOptions::new();
        options.read(true).append(true);
        let file = spd_files::open_with(&mut options, &path).map_err(|found| self.later(&found))?;
        let found = file.metadata().map_err(|found| self.later(&found))?.len();
        if found == written.bytes && is_last {
            return Ok(file);
        }
        let (path, bytes) = (path.display(), written.bytes);
        let why = format!("{path} has {found} bytes, {bytes} were written");
        Err(Refusal::Gone { why })
    }

    /// Begins a new file, which voids older ones.
    fn begin(&mut self, written: &mut Written) -> Taken {
        self.file = None;
        let time = now();
        let head = event::head(time);
        let (name, file) = self
            .create(time, &head)
            .map_err(|found| self.later(&found))?;
        *written = Written {
            file: name,
            bytes: head.len() as u64,
        };
        self.file = Some(file);
        Ok(())
    }

    /// Appends records, and syncs.
    pub(super) fn append(&mut self, written: &mut Written, records: &[u8]) -> Taken {
        if self.file.is_none() {
            self.open(written)?;
        }
        // A file with a partial record is abandoned.
        let Some(mut file) = self.file.take() else {
            return Err(self.later(&ErrorKind::NotFound.into()));
        };
        let done = file.write_all(records).and_then(|()| file.sync_data());
        done.map_err(|found| self.later(&found))?;
        self.file = Some(file);
        written.bytes += records.len() as u64;
        Ok(())
    }

    fn create(&mut self, time: f64, head: &[u8]) -> io::Result<(String, File)> {
        std::fs::create_dir_all(&self.dir)?;
        let mut options = OpenOptions::new();
        options.append(true);
        let name = if let Some(name) = self.empty.take() {
            name
        } else {
            options.create_new(true);
            self.next_name(time)?
        };
        let path = self.dir.join(&name);
        let mut file = spd_files::open_with(&mut options, &path)?;
        let done = file.write_all(head).and_then(|()| file.sync_data());
        if let Err(found) = done.and_then(|()| atomic::sync_name(&path)) {
            file.set_len(0)?;
            self.empty = Some(name);
            return Err(found);
        }
        Ok((name, file))
    }

    /// A name that sorts after all others.
    fn next_name(&self, time: f64) -> io::Result<String> {
        let names = self.names()?;
        // Names sort as numbers of ten digits. A clock that went back must not make a name that
        // sorts earlier.
        let last = names
            .last()
            .and_then(|name| name.get(PREFIX.len()..)?.get(..10)?.parse().ok());
        let seconds = std::time::Duration::try_from_secs_f64(time).unwrap_or_default();
        let seconds = seconds.as_secs().max(last.map_or(0, |last: u64| last + 1));
        let (host, process) = (&self.host, std::process::id());
        Ok(format!("{PREFIX}{seconds:010}.{host}.{process}"))
    }

    /// The names of the files, in reading order.
    fn names(&self) -> io::Result<Vec<String>> {
        let names = atomic::names(&self.dir)?;
        let names = names.into_iter().filter_map(|name| name.into_string().ok());
        Ok(names.filter(|name| name.starts_with(PREFIX)).collect())
    }

    fn later(&self, found: &io::Error) -> Refusal {
        let dir: &Path = &self.dir;
        let why = format!("{}: {found}", dir.display());
        Refusal::Later { why, after: None }
    }
}
