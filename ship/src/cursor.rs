//! `RUN/sinks/NAME.json`: the progress of a sink, and its state.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use spd_tracker::{Cursor, Mark};

/// The directory of all sinks in a run directory.
const SINKS: &str = "sinks";

/// The progress of a sink. It is written after the server has accepted rows, and before more are
/// sent.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(bound(deserialize = "S: Default + Deserialize<'de>"), default)]
pub(crate) struct Place<S> {
    /// The metrics rows that the server has.
    pub(crate) metrics: Cursor,
    /// The metrics rows that it may have: they were sent, with an unknown outcome.
    pub(crate) tried: Cursor,
    /// The system rows that it has, by the name of their file.
    pub(crate) system: BTreeMap<String, Mark>,
    /// Metrics rows that it refused.
    pub(crate) refused: u64,
    /// System rows that it refused.
    pub(crate) refused_system: u64,
    /// The sink's state.
    pub(crate) state: S,
}

/// The files of one sink of a run.
#[derive(Debug)]
pub(crate) struct Files {
    dir: PathBuf,
    name: &'static str,
    /// Held while this process sends for the sink.
    _lock: File,
}

impl Files {
    /// Locks the files of a sink. The directory of the run must exist.
    ///
    /// # Errors
    ///
    /// One line, if another process holds them, or the disk refuses.
    pub(crate) fn hold(run: &Path, name: &'static str) -> Result<Self, String> {
        let dir = run.join(SINKS);
        let refused = |found: std::io::Error| format!("{}: {found}", dir.display());
        spd_files::atomic::make_dir(&dir).map_err(refused)?;
        let path = dir.join(format!("{name}.lock"));
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        let lock = spd_files::open_with(&mut options, &path).map_err(refused)?;
        match spd_files::lock_within(spd_files::PATIENCE, || lock.try_lock()) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(format!(
                    "{}: another process ships this run",
                    path.display()
                ));
            }
            Err(TryLockError::Error(found)) => return Err(refused(found)),
        }
        Ok(Self {
            dir,
            name,
            _lock: lock,
        })
    }

    /// Whether a process sends for a sink of a run now.
    pub(crate) fn is_held(run: &Path, name: &str) -> bool {
        let path = run.join(SINKS).join(format!("{name}.lock"));
        let lock = spd_files::open(&path);
        lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// The progress of the sink; the beginning if there is no file, or a damaged one.
    pub(crate) fn read<S: Default + for<'de> Deserialize<'de>>(&self) -> Place<S> {
        let bytes = spd_files::read(&self.path()).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Writes the progress.
    ///
    /// # Errors
    ///
    /// One line, if the disk refuses.
    pub(crate) fn write<S: Serialize>(&self, place: &Place<S>) -> Result<(), String> {
        let path = self.path();
        let text = serde_json::to_vec(place).map_err(|found| found.to_string())?;
        let written = spd_files::atomic::write_file(&path, &[&text, b"\n"]);
        written.map_err(|found| format!("{}: {found}", path.display()))
    }

    /// Appends rows that the server refused to a file of their own.
    ///
    /// # Errors
    ///
    /// One line, if the disk refuses.
    pub(crate) fn refuse(&self, lines: &str) -> Result<(), String> {
        let path = self.dir.join(format!("{}.refused.jsonl", self.name));
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        let written = spd_files::open_with(&mut options, &path)
            .and_then(|mut file| std::io::Write::write_all(&mut file, lines.as_bytes()));
        written.map_err(|found| format!("{}: {found}", path.display()))
    }

    fn path(&self) -> PathBuf {
        self.dir.join(format!("{}.json", self.name))
    }
}
