//! The interface of a sink, which sends rows to one tracker.
//!
//! A sink keeps no rows and no counts. Everything that it knows of the server is its state, which
//! the driver writes together with the place in the spool after the server has accepted rows. A
//! sink that is killed in between sends the same rows again, from the same state.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use spd_tracker::Row;

use crate::run::RunInfo;

/// A row with its time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stamped {
    /// The row.
    pub(crate) row: Row,
    /// Seconds since 1970; the same at every attempt.
    pub(crate) time: f64,
}

/// Sends rows to one tracker.
pub(crate) trait Sink {
    /// The knowledge of the server.
    type State: Clone + Default + Serialize + DeserializeOwned;

    /// Its name, in run files, messages and the name of its cursor's file.
    const NAME: &'static str;

    /// Time between two sends during the run.
    const EVERY: Duration;

    /// Most rows of one send.
    const ROWS: usize;

    /// Makes the run known to the server, or finds it there. Called at the start, and again after
    /// the server lost the run or refused the credentials, which are then read again. Returns
    /// whether it made a run without the rows that were sent before, in place of a lost one. The
    /// driver then sends all rows again.
    async fn open(&mut self, run: &RunInfo, state: &mut Self::State) -> Result<bool, Refusal>;

    /// The address of the run's page, once it is known.
    fn page(&self, _state: &Self::State) -> Option<String> {
        None
    }

    /// Sends train and eval rows: whole steps, mostly ascending.
    async fn send_metrics(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        rows: &[Stamped],
    ) -> Taken;

    /// Sends rows of [`spd_tracker::Kind::System`], `Event` and `Alert`.
    async fn send_system(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        rows: &[Stamped],
    ) -> Taken;

    /// Fills the place of metrics rows that the server refuses one by one, if the server counts
    /// rows.
    async fn skip(&mut self, _: &RunInfo, _: &mut Self::State, _: &[Stamped]) -> Taken {
        Ok(())
    }

    /// Rolls back: rows from `to` on were sent, and the run has made others since.
    async fn roll_back(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        to: RollBack,
    ) -> Result<After, Refusal>;

    /// Sends a heartbeat, if the server expects one. Called when nothing was sent for
    /// [`Sink::EVERY`].
    async fn idle(&mut self, _: &RunInfo, _: &mut Self::State) -> Taken {
        Ok(())
    }

    /// Sends the end of the run. If the run continues later, `open` is called again.
    async fn close(&mut self, run: &RunInfo, state: &mut Self::State, end: End) -> Taken;
}

/// The place that a run rolled back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RollBack {
    /// Number of its earlier starts.
    pub(crate) generation: u64,
    /// Number of metrics rows that hold.
    pub(crate) rows: u64,
    /// The first step whose rows are made again.
    pub(crate) step: u64,
}

/// The driver's action after a roll-back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Sends the rows that were made since.
    GoOn,
    /// Sends all rows to another run at the server.
    FromStart,
}

/// The end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    /// Exit code of the launcher: 0 done, 3 stopped on request.
    pub(crate) code: u8,
}

/// The answer of a server.
pub(crate) type Taken = Result<(), Refusal>;

/// The reason why a server refused a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It may accept it later: no connection, an overload, an error of its own. It may name a time.
    Later {
        /// In words.
        why: String,
        /// The time that it asked to wait.
        after: Option<Duration>,
    },
    /// The credentials are missing, wrong or insufficient. They are read again from time to time.
    Unauthorized {
        /// In words, without the credentials.
        why: String,
    },
    /// The request is too large; half of it may be accepted.
    TooLarge {
        /// In words.
        why: String,
    },
    /// A part of the request is invalid, and stays so.
    Invalid {
        /// In words.
        why: String,
    },
    /// The server has lost the run; `open` may restore it.
    Gone {
        /// In words.
        why: String,
    },
}
