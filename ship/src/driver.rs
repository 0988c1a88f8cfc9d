//! Sends the rows of a run by one sink until they have arrived, through all failures of the server.
//!
//! | answer | action |
//! |---|---|
//! | later | the same again, after 2, 4, 8, ... 60 seconds or the server's time, an hour at most |
//! | unauthorized | credentials are read again, during the run, after 1, 5, 15, 60, ... minutes |
//! | gone | the run is opened again, once; then as later |
//! | too large | half of it |
//! | invalid | halves, down to single steps, which go to `sinks/NAME.refused.jsonl` |

#[cfg(test)]
mod tests;
mod waits;

use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spd_tracker::{Cursor, METRICS, Read, ReadError, Reader, Start};
use tokio::sync::watch;
use tokio::time::Instant;

use self::waits::hold;
use crate::cursor::{Files, Place};
use crate::feed::{Fed, Feed, Steps};
use crate::run::RunInfo;
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped};

/// Time between two polls of the spool if there is nothing to send.
const LOOK: Duration = Duration::from_millis(500);

/// The status of a sink.
#[derive(Debug, Clone, Default)]
pub(crate) struct Status {
    /// Metrics rows that the server has.
    pub(crate) sent: u64,
    /// Rows of these that this process sent.
    pub(crate) now: u64,
    /// Metrics rows that it refused.
    pub(crate) refused: u64,
    /// System rows that it refused.
    pub(crate) refused_system: u64,
    /// Everything is sent, and the server knows the outcome of the run.
    pub(crate) is_closed: bool,
    /// The reason why not all rows are sent.
    pub(crate) trouble: Option<String>,
}

/// The shared state of a driver and its owner.
pub(crate) struct Link {
    /// The end of the run; `None` before it.
    pub(crate) over: watch::Receiver<Option<End>>,
    pub(crate) status: Arc<Mutex<Status>>,
    /// Takes lines for the user.
    pub(crate) say: Arc<dyn Fn(&str) + Send + Sync>,
}

/// A status, also after a thread that held it has panicked.
pub(crate) fn locked(status: &Mutex<Status>) -> MutexGuard<'_, Status> {
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends until the run is over and all rows are sent. The status holds the reason if it gives up.
pub(crate) async fn drive<S: Sink>(sink: S, run: &RunInfo, mut link: Link) {
    let status = Arc::clone(&link.status);
    let driven = match hold(&run.dir, S::NAME, &mut link).await {
        Ok(files) => Driver::new(sink, run, link, files).run().await,
        Err(line) => Err(line),
    };
    if let Err(line) = driven {
        locked(&status).trouble = Some(line);
    }
}

struct Driver<'r, S: Sink> {
    sink: S,
    run: &'r RunInfo,
    link: Link,
    files: Files,
    place: Place<S::State>,
    /// Consecutive failures.
    failures: u32,
    is_open: bool,
    /// A part of the current rows has arrived: the state is ahead of the place, and is not written.
    is_partial: bool,
    /// The server has lost all rows: they are read again from the first.
    is_anew: bool,
    warned: Option<Instant>,
    /// The last warning still holds.
    is_named: bool,
    /// The end of the run was noticed: it now waits as long as servers ask.
    knows_end: bool,
    /// The page of the run, as it was shown to the user.
    page: Option<String>,
    /// Metrics rows that were taken for sending.
    sent: u64,
}

impl<'r, S: Sink> Driver<'r, S> {
    fn new(sink: S, run: &'r RunInfo, link: Link, files: Files) -> Self {
        Self {
            sink,
            run,
            link,
            place: files.read(),
            files,
            failures: 0,
            is_open: false,
            is_partial: false,
            is_anew: false,
            warned: None,
            is_named: false,
            knows_end: false,
            page: None,
            sent: 0,
        }
    }

    async fn run(mut self) -> Result<(), String> {
        self.tell();
        self.open().await?;
        let mut feed = self.feed().await?;
        let mut spoken = Instant::now();
        loop {
            let end = *self.link.over.borrow();
            let fed = match feed.steps(S::ROWS, end.is_some()) {
                Ok(Fed::Steps(steps)) => steps,
                Ok(Fed::RolledBack(start, cursor)) => {
                    self.go_back(&start, cursor).await?;
                    feed = self.feed().await?;
                    continue;
                }
                Err(error) => {
                    self.wait_for(&error).await;
                    continue;
                }
            };
            let is_new = !fed.rows.is_empty();
            if is_new {
                self.send_steps(fed).await?;
            }
            if self.is_anew {
                feed = self.feed().await?;
                continue;
            }
            let is_more = self.send_system(&mut feed).await?;
            if self.is_anew {
                feed = self.feed().await?;
                continue;
            }
            if is_new || is_more {
                spoken = Instant::now();
                // The interval limits the rate of requests while the run goes on.
                if end.is_none() {
                    self.rest(S::EVERY).await;
                }
            } else if let Some(end) = end {
                if self.close(end).await? {
                    return Ok(());
                }
                feed = self.feed().await?;
            } else if spoken.elapsed() >= S::EVERY {
                spoken = Instant::now();
                // A failed heartbeat is worth no warning.
                let _ = self.sink.idle(self.run, &mut self.place.state).await;
                // The next write may succeed.
                let _ = self.files.write(&self.place);
            } else {
                self.rest(LOOK).await;
            }
        }
    }

    /// Makes the run known to the server, however long that takes.
    async fn open(&mut self) -> Result<(), String> {
        let is_anew = loop {
            let opened = self.sink.open(self.run, &mut self.place.state).await;
            match opened {
                Ok(is_anew) => break is_anew,
                Err(refusal) => self.pause(&refusal).await?,
            }
        };
        self.worked();
        self.is_open = true;
        if let Some(page) = self.sink.page(&self.place.state)
            && self.page.replace(page.clone()).as_ref() != Some(&page)
        {
            (self.link.say)(&format!("{}: {page}", S::NAME));
        }
        if is_anew {
            self.start_anew();
        } else if self.is_partial {
            return Ok(());
        }
        self.save().await
    }

    fn start_anew(&mut self) {
        (self.is_anew, self.is_partial) = (true, false);
        self.place.metrics = Cursor::default();
        self.place.tried = Cursor::default();
        self.place.system.clear();
    }

    /// The rows that are still to be sent. Rows that an earlier process may have sent must hold
    /// before others follow.
    async fn feed(&mut self) -> Result<Feed, String> {
        self.is_anew = false;
        loop {
            match self.proven_feed().await {
                Ok(Ok(feed)) => return Ok(feed),
                Ok(Err((start, cursor))) => self.go_back(&start, cursor).await?,
                Err(error) => self.wait_for(&error).await,
            }
        }
    }

    async fn proven_feed(&mut self) -> Result<Result<Feed, (Start, Cursor)>, ReadError> {
        let dir = &self.run.dir;
        if self.place.tried.mark.offset > self.place.metrics.mark.offset {
            let mut reader = Reader::of_metrics(dir, &self.place.tried)?;
            while !reader.is_proven() {
                if let Some(Read::RolledBack(start)) = reader.next()? {
                    return Ok(Err((start, reader.cursor())));
                }
                if reader.is_proven() {
                    break;
                }
                if self.link.over.borrow().is_some() {
                    // The run ended before it made as many rows again: the rows before its end
                    // hold.
                    break;
                }
                self.rest(LOOK).await;
            }
        }
        Feed::of(dir, &self.place.metrics, &self.place.system).map(Ok)
    }

    /// Rolls back to a start, after which rows are void. The server is told if it has some of them.
    async fn go_back(&mut self, start: &Start, cursor: Cursor) -> Result<(), String> {
        let to = RollBack {
            generation: cursor.generation,
            rows: start.lines,
            step: start.step,
        };
        if self.place.tried.mark.offset > start.offset {
            loop {
                let told = self
                    .sink
                    .roll_back(self.run, &mut self.place.state, to)
                    .await;
                match told {
                    Ok(After::FromStart) => {
                        self.start_anew();
                        break;
                    }
                    Ok(After::GoOn) => break,
                    Err(refusal) => self.recover(&refusal).await?,
                }
                if self.is_anew {
                    break;
                }
            }
            self.worked();
        }
        if self.place.metrics.mark.offset > start.offset {
            self.place.metrics = cursor.clone();
        }
        if self.place.tried.mark.offset > start.offset {
            self.place.tried = cursor;
        }
        self.save().await
    }

    /// Sends steps in as many requests as the server needs.
    async fn send_steps(&mut self, steps: Steps) -> Result<(), String> {
        self.place.tried = steps.end.clone();
        self.save().await?;
        self.is_partial = true;
        self.sent += steps.rows.len() as u64;
        let mut pieces = vec![steps.rows];
        while let Some(rows) = pieces.pop() {
            let sent = self
                .sink
                .send_metrics(self.run, &mut self.place.state, &rows)
                .await;
            match sent {
                Ok(()) => self.worked(),
                Err(Refusal::TooLarge { why } | Refusal::Invalid { why }) => match halves(&rows) {
                    Some((first, second)) => pieces.extend([second, first]),
                    None => self.refuse(rows, &why).await?,
                },
                Err(refusal) => {
                    self.recover(&refusal).await?;
                    pieces.push(rows);
                }
            }
            if self.is_anew {
                return Ok(());
            }
        }
        self.is_partial = false;
        self.place.metrics = steps.end;
        self.save().await?;
        self.tell();
        Ok(())
    }

    /// Sets rows aside that the server refuses.
    async fn refuse(&mut self, rows: Vec<Stamped>, why: &str) -> Result<(), String> {
        let mut lines = String::new();
        for Stamped { row, .. } in &rows {
            let _ = writeln!(lines, "{}", serde_json::to_string(row).unwrap_or_default());
        }
        while let Err(line) = self.files.refuse(&lines) {
            self.wait_for_disk(line).await?;
        }
        self.place.refused += rows.len() as u64;
        self.warn(&format!("{} rows are refused: {why}", rows.len()));
        loop {
            let skipped = self.sink.skip(self.run, &mut self.place.state, &rows).await;
            match skipped {
                Ok(()) => return Ok(()),
                // A gap that is refused too is left out.
                Err(Refusal::TooLarge { .. } | Refusal::Invalid { .. }) => return Ok(()),
                Err(refusal) => self.recover(&refusal).await?,
            }
            if self.is_anew {
                return Ok(());
            }
        }
    }

    /// Sends system rows; returns whether there were any.
    async fn send_system(&mut self, feed: &mut Feed) -> Result<bool, String> {
        let mut is_any = false;
        loop {
            let (name, mark, rows) = match feed.system(S::ROWS) {
                Ok(Some(found)) => found,
                Ok(None) => return Ok(is_any),
                Err(error) => {
                    self.wait_for(&error).await;
                    return Ok(is_any);
                }
            };
            while !rows.is_empty() {
                let sent = self
                    .sink
                    .send_system(self.run, &mut self.place.state, &rows)
                    .await;
                match sent {
                    Ok(()) => {
                        self.worked();
                        is_any = true;
                        break;
                    }
                    // They stay in the run directory.
                    Err(Refusal::TooLarge { why } | Refusal::Invalid { why }) => {
                        self.place.refused_system += rows.len() as u64;
                        self.warn(&format!("{} system rows are refused: {why}", rows.len()));
                        break;
                    }
                    Err(refusal) => {
                        self.recover(&refusal).await?;
                        if self.is_anew {
                            return Ok(is_any);
                        }
                    }
                }
            }
            self.place.system.insert(name, mark);
            self.save().await?;
        }
    }

    /// Sends the end of the run. Returns false if all its rows are to be sent again first.
    async fn close(&mut self, end: End) -> Result<bool, String> {
        loop {
            let closed = self.sink.close(self.run, &mut self.place.state, end).await;
            match closed {
                Ok(()) => break,
                Err(refusal) => self.recover(&refusal).await?,
            }
            if self.is_anew {
                return Ok(false);
            }
        }
        self.save().await?;
        self.worked();
        self.tell();
        locked(&self.link.status).is_closed = true;
        Ok(true)
    }

    /// Writes the progress, before anything else is sent.
    async fn save(&mut self) -> Result<(), String> {
        while let Err(line) = self.files.write(&self.place) {
            self.wait_for_disk(line).await?;
        }
        Ok(())
    }

    fn tell(&mut self) {
        let mut status = locked(&self.link.status);
        (status.sent, status.refused) = (self.place.metrics.mark.lines, self.place.refused);
        status.refused_system = self.place.refused_system;
        status.now = self.sent.min(status.sent);
    }
}

/// Two parts of whole steps; `None` for a single step.
fn halves(rows: &[Stamped]) -> Option<(Vec<Stamped>, Vec<Stamped>)> {
    let starts: Vec<usize> = (1..rows.len())
        .filter(|&row| rows[row].row.step != rows[row - 1].row.step)
        .collect();
    let (first, second) = rows.split_at(*starts.get(starts.len() / 2)?);
    Some((first.to_vec(), second.to_vec()))
}

/// Number of rows of a run that a sink has not sent yet.
pub(crate) fn owed(dir: &Path, sent: u64) -> u64 {
    let rows = spd_files::read(&dir.join(METRICS)).unwrap_or_default();
    let rows = rows.iter().filter(|&&byte| byte == b'\n').count() as u64;
    rows.saturating_sub(sent)
}
