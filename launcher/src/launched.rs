//! The result that a launcher leaves in the lock file of its run.
//!
//! Trackers are told ends as the exit codes of launchers.

use std::path::Path;

use spd_checkpoint::Lock;
use spd_report::{Book, LastWord, State, Status};
use spd_trainer::Fault;

use crate::exit::Exit;
use crate::screen::plain;
use crate::track::Track;

/// A launch that holds its run directory.
pub(crate) struct Launched {
    lock: Lock,
    began: f64,
}

impl Launched {
    /// A launch that begins now.
    pub(crate) fn now(lock: Lock) -> Self {
        Self {
            lock,
            began: spd_tracker::now(),
        }
    }

    /// Records the result and the first line about it in the lock file, then ends trackers and
    /// makes the last page, which reads it. The directory is held until then. Returns the data of
    /// that page, if there is one.
    pub(crate) fn leave(
        self,
        ended: &Result<(Exit, String), Fault>,
        track: Option<Track>,
    ) -> Option<Book> {
        let (state, note) = match ended {
            Ok((exit, said)) => (state(*exit), said.clone()),
            Err(fault) => (State::Failed, fault.to_string()),
        };
        let word = LastWord {
            state,
            note: plain(note.lines().next().unwrap_or_default()),
            began: self.began,
            ended: spd_tracker::now(),
        };
        // If the disk refuses, the launcher counts as killed.
        let _ = self.lock.leave(&word.line());
        track?.finish(ended.as_ref().map_or(Exit::Failed, |(exit, _)| *exit))
    }
}

fn state(exit: Exit) -> State {
    match exit {
        Exit::Done => State::Done,
        Exit::Failed | Exit::BadInput => State::Failed,
        Exit::Stopped => State::Stopped,
        Exit::Killed(_) => State::Killed,
    }
}

/// The recorded result of the run in a directory; `None` while it runs, and if unknown.
pub(crate) fn ended(dir: &Path) -> Option<Exit> {
    match Status::of(dir).state {
        State::Running => None,
        State::Done => Some(Exit::Done),
        State::Failed => Some(Exit::Failed),
        State::Stopped | State::Killed | State::Waiting => Some(Exit::Stopped),
    }
}
