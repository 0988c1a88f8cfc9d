//! The state of the run at the server, as the server has reported or acknowledged it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::lines::{Line, STEP};
use super::media::Media;
use crate::run::RunInfo;

/// Most bytes of a value in the summary; a histogram of 512 bins takes about half.
const LONGEST: usize = 32 << 10;

/// The state of the run at the server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct State {
    /// Its place.
    pub(super) remote: Option<Remote>,
    /// The start of the run at which the remote run began: the first, or one after a roll-back.
    pub(super) generation: u64,
    /// Number of names of deleted runs, which cannot be used again.
    pub(super) burned: u32,
    /// The remote run that this one replaces.
    pub(super) supersedes: Option<String>,
    /// Lines of the history.
    pub(super) history: Lines,
    /// Lines about the machine.
    pub(super) events: Lines,
    /// Lines of the console.
    pub(super) console: Lines,
    /// `_step` of the last line of the history.
    pub(super) last_step: Option<u64>,
    /// Whether some `_step` differs from the step of its rows.
    pub(super) is_shifted: bool,
    /// The last value of each name, encoded.
    pub(super) summary: BTreeMap<String, String>,
    /// Hash of the config at the server.
    pub(super) config: String,
    /// Hash of the name, group, tags and notes at the server.
    pub(super) labels: String,
    /// Whether the server reported that somebody pressed Stop.
    pub(super) is_stopped: bool,
    /// Files that are to be uploaded.
    pub(super) owed: Vec<Owed>,
    /// Uploaded files that the server is to be told of.
    pub(super) untold: Vec<String>,
    /// Number of files that were not uploaded: they are gone, or were refused.
    pub(super) lost: u64,
}

/// Names of a run, as the server returned them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Remote {
    pub(super) entity: String,
    pub(super) project: String,
    /// Our id of the run.
    pub(super) name: String,
    /// The server's id of the run.
    pub(super) id: Option<String>,
}

/// The number of lines of a file of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lines {
    /// Acknowledged lines.
    pub(super) sent: u64,
    /// Lines found at the server after our count was lost. They are made again from the spool, and
    /// not sent.
    pub(super) found: u64,
}

impl Lines {
    /// Number of the next `lines` that the server has already.
    pub(super) fn there(self, lines: usize) -> usize {
        let there = self.found.saturating_sub(self.sent);
        usize::try_from(there).unwrap_or(usize::MAX).min(lines)
    }

    /// Counts acknowledged lines.
    pub(super) fn add(&mut self, lines: usize) {
        self.sent += lines as u64;
    }
}

/// A file that is to be uploaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owed {
    /// Its name at the server.
    pub(super) name: String,
    /// Its path in the run directory.
    pub(super) from: String,
}

impl State {
    /// The id of the run at the server: `ID`, `ID-r2` after a roll-back, `ID-2` if that one was
    /// deleted.
    pub(super) fn name(&self, run: &RunInfo) -> String {
        let mut name = run.id.clone();
        if self.generation > 0 {
            name.push_str(&format!("-r{}", self.generation));
        }
        if self.burned > 0 {
            name.push_str(&format!("-{}", self.burned + 1));
        }
        name
    }

    /// Forgets all lines: the server has lost them.
    pub(super) fn forget(&mut self) {
        *self = Self {
            generation: self.generation,
            burned: self.burned,
            supersedes: self.supersedes.take(),
            ..Self::default()
        };
    }

    /// Records the values and files of a line.
    pub(super) fn note(&mut self, line: &Line) {
        let step = line.values.iter().find(|(name, _)| name == STEP);
        self.is_shifted |= step.is_some_and(|(_, step)| *step != line.step.to_string());
        self.last_step = Some(line.step);
        for (name, value) in &line.values {
            if value.len() <= LONGEST {
                self.summary.insert(name.clone(), value.clone());
            }
        }
        for Media { name, from, .. } in &line.media {
            self.owe(name, from);
        }
    }

    /// Duration of the run up to the last line, in whole seconds; `None` before the first.
    pub(super) fn runtime(&self) -> Option<f64> {
        let runtime: f64 = self.summary.get("_runtime")?.parse().unwrap_or(0.0);
        Some(runtime.floor())
    }

    /// Adds a file that is to be uploaded.
    pub(super) fn owe(&mut self, name: &str, from: &str) {
        if !self.owed.iter().any(|owed| owed.name == name) {
            self.owed.push(Owed {
                name: name.into(),
                from: from.into(),
            });
        }
    }
}
