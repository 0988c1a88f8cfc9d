//! What a launcher leaves in the lock file of its run, so that who looks later knows how it ended.
//!
//! Trackers are told of ends in the exit codes of launchers.

use std::path::Path;

use spd_checkpoint::Lock;
use spd_report::{LastWord, State, Status};
use spd_trainer::Fault;

use crate::exit::Exit;
use crate::screen::plain;

/// A launch that holds its directory.
pub(crate) struct Launched {
    lock: Lock,
    began: f64,
}

impl Launched {
    /// One that begins now.
    pub(crate) fn now(lock: Lock) -> Self {
        Self {
            lock,
            began: spd_tracker::now(),
        }
    }

    /// Leaves its last word: how it ended, and the first line that was said about that. The page reads it, so it is there before the last
    /// page is made; the directory is held until the lock is dropped.
    pub(crate) fn leave(self, ended: &Result<(Exit, String), Fault>) -> Lock {
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
        // A disk that does not take it makes it a launcher that was killed.
        let _ = self.lock.leave(&word.line());
        self.lock
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

/// How the run in a directory ended, as far as anybody knows; none while it runs.
pub(crate) fn ended(dir: &Path) -> Option<Exit> {
    match Status::of(dir).state {
        State::Running => None,
        State::Done => Some(Exit::Done),
        State::Failed => Some(Exit::Failed),
        State::Stopped | State::Killed | State::Waiting => Some(Exit::Stopped),
    }
}
