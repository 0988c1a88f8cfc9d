//! What a sink is: one way to send rows, which its driver tries until they have arrived.
//!
//! A sink keeps no rows and counts nothing by itself: what it knows of the server is its state, which the driver writes down beside the
//! place in the spool, together and after the server has taken what was sent. So a sink that is killed in between sends the same
//! rows again, from the same state.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use spd_tracker::Row;

use crate::run::RunInfo;

/// A row, and when it was made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stamped {
    /// The row.
    pub(crate) row: Row,
    /// Seconds since 1970; the same at every attempt to send it.
    pub(crate) time: f64,
}

/// One way to send rows.
pub(crate) trait Sink {
    /// What is known of the server.
    type State: Clone + Default + Serialize + DeserializeOwned;

    /// Its name: of its cursor's file, and in what is said of it.
    const NAME: &'static str;

    /// Time between two sends while a run goes on.
    const EVERY: Duration;

    /// The most rows that one send takes.
    const ROWS: usize;

    /// Makes the run known to the server, or finds it there. Called at first, and again where the server has lost it or credentials
    /// were refused: they are read anew.
    async fn open(&mut self, run: &RunInfo, state: &mut Self::State) -> Result<(), Refusal>;

    /// Whether the last `open` made a run that has none of the rows that were sent before, in place of one that the server lost: the
    /// driver then sends all of them again, from the first.
    fn starts_anew(&self) -> bool {
        false
    }

    /// Where people look at the run, once that is known.
    fn page(&self, _state: &Self::State) -> Option<String> {
        None
    }

    /// Sends train and eval rows. The rows of a step come together, whole steps only, mostly rising.
    async fn send_metrics(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        rows: &[Stamped],
    ) -> Result<(), Refusal>;

    /// Sends rows of [`spd_tracker::Kind::System`], `Event` and `Alert`: of the machine, of what happened.
    async fn send_system(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        rows: &[Stamped],
    ) -> Result<(), Refusal>;

    /// Takes the place of metrics rows that the server refuses each by itself, where it counts them.
    async fn skip(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        rows: &[Stamped],
    ) -> Result<(), Refusal>;

    /// Rows from `to` on were sent, and the run has made others since.
    async fn roll_back(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        to: RollBack,
    ) -> Result<After, Refusal>;

    /// Says that the run is alive, where the server wants to hear that; called when nothing was sent for [`Sink::EVERY`].
    async fn idle(&mut self, run: &RunInfo, state: &mut Self::State) -> Result<(), Refusal>;

    /// Says how the run ended. A run may go on after that: then `open` is called again.
    async fn close(
        &mut self,
        run: &RunInfo,
        state: &mut Self::State,
        end: End,
    ) -> Result<(), Refusal>;
}

/// A sink under the name of [`Sink::NAME`] in run files.
pub(crate) trait Tracker: Sink {
    /// The tracker, with credentials from the environment of the process.
    ///
    /// - `stop`: set when somebody presses Stop on the page of the run
    fn new(stop: Arc<AtomicBool>) -> Self;
}

/// Where a run went back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RollBack {
    /// How often it has been started before.
    pub(crate) generation: u64,
    /// Metrics rows that hold.
    pub(crate) rows: u64,
    /// The first step whose rows are made again.
    pub(crate) step: u64,
}

/// What the driver does after a roll-back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Sends the rows that were made since.
    GoOn,
    /// Sends all rows, from the first, to what is another run at the server.
    FromStart,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    /// Exit code of the launcher: 0 done, 3 stopped on request.
    pub(crate) code: u8,
}

/// Why a server did not take what was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It may later: no connection, an overload, a failure of its own. It may say when.
    Later {
        /// In words.
        why: String,
        /// What it asked to wait.
        after: Option<Duration>,
    },
    /// The credentials are missing, wrong or not enough. They are read again now and then.
    Unauthorized {
        /// In words, without them.
        why: String,
    },
    /// The request is too large; half of it may do.
    TooLarge {
        /// In words.
        why: String,
    },
    /// Something in the request is not taken, and will not be.
    Invalid {
        /// In words.
        why: String,
    },
    /// The run is not there any more; `open` may bring it back.
    Gone {
        /// In words.
        why: String,
    },
}
