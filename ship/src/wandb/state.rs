//! What is known of the run at the server. All of it is what the server has said or acknowledged.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::lines::{Line, STEP};
use super::media::Media;
use crate::run::RunInfo;

/// Bytes of a value that the summary keeps at most; a histogram of 512 bins is about half of it.
const LONGEST: usize = 32 << 10;

/// What is known of the run at the server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct State {
    /// Where it is.
    pub(super) remote: Option<Remote>,
    /// The start of the run that the remote run is of: the first, or one after a roll-back.
    pub(super) generation: u64,
    /// How many names were found to be of deleted runs, which are never given again.
    pub(super) burned: u32,
    /// The remote run that this one takes the place of.
    pub(super) supersedes: Option<String>,
    /// Lines of the history.
    pub(super) history: Lines,
    /// Lines about the machine.
    pub(super) events: Lines,
    /// Lines of the console.
    pub(super) console: Lines,
    /// `_step` of the last line of the history.
    pub(super) last_step: Option<u64>,
    /// Whether some `_step` is not the step of its rows.
    pub(super) is_shifted: bool,
    /// The last value of each name, encoded.
    pub(super) summary: BTreeMap<String, String>,
    /// Hash of the config that the server has.
    pub(super) config: String,
    /// Hash of the name, group, tags and notes that it has.
    pub(super) labels: String,
    /// Whether it has said that somebody pressed Stop.
    pub(super) is_stopped: bool,
    /// Files that it is to get.
    pub(super) owed: Vec<Owed>,
    /// Files that it got and is to be told of.
    pub(super) untold: Vec<String>,
    /// How many files it does not get: they are gone, or were refused.
    pub(super) lost: u64,
}

/// Names of a run, as the server returned them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Remote {
    pub(super) entity: String,
    pub(super) project: String,
    /// What we call the id.
    pub(super) name: String,
    /// The server's own.
    pub(super) id: Option<String>,
}

/// How many lines a file of the run has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lines {
    /// Acknowledged.
    pub(super) sent: u64,
    /// Found there when our own count was lost: those are made again from the spool, and not sent.
    pub(super) found: u64,
}

impl Lines {
    /// How many of the next `lines` the server has already.
    pub(super) fn there(self, lines: usize) -> usize {
        let there = self.found.saturating_sub(self.sent);
        usize::try_from(there).unwrap_or(usize::MAX).min(lines)
    }

    /// Counts lines that the server has.
    pub(super) fn add(&mut self, lines: usize) {
        self.sent += lines as u64;
    }
}

/// A file that the server is to get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owed {
    /// Its name there.
    pub(super) name: String,
    /// Its path in the run directory.
    pub(super) from: String,
}

impl State {
    /// The id that the run has at the server: `ID`, `ID-r2` after a roll-back, `ID-2` where that was deleted.
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

    /// Forgets all that was sent: the server has nothing of it.
    pub(super) fn forget(&mut self) {
        *self = Self {
            generation: self.generation,
            burned: self.burned,
            supersedes: self.supersedes.take(),
            ..Self::default()
        };
    }

    /// Notes what a line says, and the files it stands for.
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

    /// How long the run had been going at the last line, in whole seconds; none before the first.
    pub(super) fn runtime(&self) -> Option<f64> {
        let runtime: f64 = self.summary.get("_runtime")?.parse().unwrap_or(0.0);
        Some(runtime.floor())
    }

    /// Notes a file that is to be sent.
    pub(super) fn owe(&mut self, name: &str, from: &str) {
        if !self.owed.iter().any(|owed| owed.name == name) {
            self.owed.push(Owed {
                name: name.into(),
                from: from.into(),
            });
        }
    }
}
