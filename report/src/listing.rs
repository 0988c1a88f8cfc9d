//! The runs under a directory, with the state of each.

use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use spd_checkpoint::{Holder, Lock};

use crate::error::ReportError;
use crate::source::Source;
use crate::status::{LastWord, State, Status};

/// Depth of the search for runs: `runs/today/lr/x` is three below `runs`.
const DEEPEST: usize = 4;

/// The result of a search.
#[derive(Debug, Default)]
pub struct Listing {
    /// Runs and sweeps, in the order of their paths.
    pub found: Vec<Listed>,
    /// A line for each directory that could not be read.
    pub problems: Vec<String>,
}

/// A run, or a sweep of runs.
#[derive(Debug)]
pub enum Listed {
    /// A run.
    Run(Box<Status>),
    /// Several runs, started by one launcher.
    Sweep(Sweep),
}

/// A sweep.
#[derive(Debug, Default)]
pub struct Sweep {
    /// Its directory.
    pub path: PathBuf,
    /// Its state; waiting if none of its runs has begun.
    pub state: State,
    /// A remark on the state for the user.
    pub note: Option<String>,
    /// Its runs, in the order in which they are started.
    pub members: Vec<Status>,
    /// The process that has the lock of its launcher, or had it.
    pub holder: Option<Holder>,
    /// A line for each file that could not be read.
    pub problems: Vec<String>,
}

impl Listing {
    /// The run or sweep at a path, or all of them under it.
    ///
    /// # Errors
    ///
    /// When it is not a directory.
    pub fn of(path: &Path) -> Result<Self, ReportError> {
        let mut listing = Self::default();
        let no_dir = |found: String| ReportError::NoDirectory {
            path: path.to_path_buf(),
            found,
        };
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => listing.look(path, &found, 0, &mut BTreeSet::new()),
            Ok(found) => return Err(no_dir(spd_files::name(found.file_type()).to_owned())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(no_dir("nothing".to_owned()));
            }
            Err(error) => return Err(no_dir(format!("something unreadable ({error})"))),
        }
        Ok(listing)
    }

    /// Adds the run at a path, or all runs under it. `known`: directories that were visited, as
    /// links lead to them too.
    fn look(
        &mut self,
        path: &Path,
        found: &Metadata,
        depth: usize,
        known: &mut BTreeSet<(u64, u64)>,
    ) {
        if !known.insert((found.dev(), found.ino())) {
            return;
        }
        match Source::at(path) {
            Ok(Source::Run(path)) => self.found.push(Listed::Run(Box::new(Status::of(&path)))),
            Ok(sweep) => self.found.push(Listed::Sweep(Sweep::of(&sweep))),
            Err(_) => self.look_under(path, depth, known),
        }
    }

    fn look_under(&mut self, path: &Path, depth: usize, known: &mut BTreeSet<(u64, u64)>) {
        let names = match spd_files::atomic::names(path) {
            Ok(names) => names,
            Err(error) => {
                let line = format!("{}: cannot be listed: {error}", path.display());
                self.problems.push(line);
                return;
            }
        };
        let mut inside: Vec<(bool, PathBuf)> = names
            .into_iter()
            .filter(|name| !name.as_encoded_bytes().starts_with(b"."))
            .map(|name| path.join(name))
            .map(|path| (path.is_symlink(), path))
            .collect();
        // The target of a link is listed at its own place.
        inside.sort();
        for (_, path) in inside {
            match fs::metadata(&path) {
                Ok(found) if found.is_dir() && depth < DEEPEST => {
                    self.look(&path, &found, depth + 1, known);
                }
                _ => {}
            }
        }
    }
}

impl Sweep {
    /// The state of a sweep.
    fn of(source: &Source) -> Self {
        let mut sweep = Self {
            path: source.path().to_path_buf(),
            ..Self::default()
        };
        match source.sweep() {
            Some(about) => {
                let members = about.get("runs").and_then(Value::as_array);
                let members = members.into_iter().flatten();
                sweep.members = members.filter_map(|member| sweep.member(member)).collect();
            }
            None => sweep.problems.push(format!(
                "{}: is not a readable list of runs; the command of the sweep writes it again",
                sweep.path.join("sweep.json").display()
            )),
        }
        match Lock::holder(&sweep.path.join("logs")) {
            Ok(holder) => sweep.holder = holder,
            Err(error) => sweep.problems.push(error.to_string()),
        }
        sweep.decide();
        sweep
    }

    fn member(&self, member: &Value) -> Option<Status> {
        let text = |key: &str| member.get(key).and_then(Value::as_str);
        let dir = Source::member(&self.path, text("directory")?)?;
        if dir.join("config.toml").is_file() {
            let mut status = Status::of(&dir);
            // A launcher that failed to start left nothing in the directory.
            if let (State::Waiting | State::Killed, Some("failed")) = (status.state, text("state"))
            {
                status.state = State::Failed;
                status.note = text("cause").map(str::to_owned);
            }
            return Some(status);
        }
        Some(Status::waiting(&dir))
    }

    fn decide(&mut self) {
        use State::{Done, Failed, Killed, Running, Stopped, Waiting};
        let all = |state: State| self.members.iter().all(|member| member.state == state);
        let any = |state: State| self.members.iter().any(|member| member.state == state);
        let holder = self.holder.clone().unwrap_or_default();
        let word = LastWord::of(&holder);
        self.state = if holder.is_held && word.is_none() {
            Running
        } else if !self.members.is_empty() && all(Done) {
            Done
        } else if let Some(word) = word {
            self.note = Some(word.note).filter(|note| !note.is_empty());
            word.state
        } else if all(Waiting) {
            Waiting
        } else if any(Running) {
            // One of them was started outside of the sweep.
            Stopped
        } else {
            let note = "its launcher exited without a message: it was killed, or its machine went down; the same command goes on";
            self.note = Some(note.to_owned());
            Killed
        };
        let counted = [Done, Running, Failed, Stopped, Killed, Waiting];
        let counts = counted.into_iter().filter_map(|state| {
            let members = self.members.iter();
            let count = members.filter(|member| member.state == state).count();
            (count > 0).then(|| format!("{count} {}", state.name()))
        });
        let counts: Vec<String> = counts.collect();
        let note = self.note.take();
        let all = (!counts.is_empty()).then(|| counts.join(", "));
        let notes: Vec<String> = all.into_iter().chain(note).collect();
        self.note = (!notes.is_empty()).then(|| notes.join("; "));
    }
}
