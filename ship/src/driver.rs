//! Sends the rows of a run by one sink until they have arrived, whatever the server does meanwhile.
//!
//! | answer | what is done |
//! |---|---|
//! | later | the same again, after 2, 4, 8, ... 60 seconds or when the server says, an hour at most |
//! | unauthorized | credentials are read again after 1, 5, 15, 60, 60, ... minutes, until the run is over |
//! | gone | the run is opened again, once; then as later |
//! | too large | half of it |
//! | invalid | halves, down to the steps that are refused by themselves: they go to `sinks/NAME.refused.jsonl` |

#[cfg(test)]
mod tests;
mod waits;

use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use spd_tracker::{Cursor, METRICS, Read, ReadError, Reader, Start};
use tokio::sync::watch;
use tokio::time::Instant;

use self::waits::hold;
use crate::cursor::{Files, Place};
use crate::feed::{Fed, Feed, Steps};
use crate::run::RunInfo;
use crate::sink::{After, End, Refusal, RollBack, Sink, Stamped};

/// Time between two looks at the spool where there is nothing to send.
const LOOK: Duration = Duration::from_millis(500);

/// How a sink is doing, for whoever asks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Status {
    /// Metrics rows that the server has.
    pub(crate) sent: u64,
    /// How many of them this process sent.
    pub(crate) now: u64,
    /// Those that it refused.
    pub(crate) refused: u64,
    /// System rows that it refused.
    pub(crate) refused_system: u64,
    /// Everything is sent, and the server knows how the run ended.
    pub(crate) is_closed: bool,
    /// Why not all is sent.
    pub(crate) trouble: Option<String>,
}

/// What a driver and its owner share.
pub(crate) struct Link {
    /// How the run ended, once it has.
    pub(crate) over: watch::Receiver<Option<End>>,
    pub(crate) status: Arc<Mutex<Status>>,
    /// Where a line for people goes.
    pub(crate) say: Arc<dyn Fn(&str) + Send + Sync>,
}

/// Sends until the run is over and all is sent; what cannot go on says why in the status.
pub(crate) async fn drive<S: Sink>(sink: S, run: &RunInfo, mut link: Link) {
    let status = Arc::clone(&link.status);
    let driven = match hold(&run.dir, S::NAME, &mut link).await {
        Ok(files) => Driver::new(sink, run, link, files).run().await,
        Err(line) => Err(line),
    };
    if let Err(line) = driven {
        let mut status = status.lock().unwrap_or_else(PoisonError::into_inner);
        status.trouble = Some(line);
    }
}

struct Driver<'r, S: Sink> {
    sink: S,
    run: &'r RunInfo,
    link: Link,
    files: Files,
    place: Place<S::State>,
    /// Failures in a row.
    failures: u32,
    is_open: bool,
    /// A part of what was tried has arrived: the state is ahead of the place, and is not written down.
    is_partial: bool,
    /// The server has none of the rows any more: all are to be read again, from the first.
    is_anew: bool,
    warned: Option<Instant>,
    /// What was wrong then is wrong still, for all that is known.
    is_named: bool,
    /// It has been woken by the end of the run: from then on it waits as long as servers want.
    knows_end: bool,
    /// Where people look at the run, as they were told.
    page: Option<String>,
    /// Metrics rows that were taken to be sent.
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
                // A server is not asked more often than it likes while a run goes on.
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
                // What a heartbeat says is worth no warning.
                let _ = self.sink.idle(self.run, &mut self.place.state).await;
                // A disk that does not take this may take the next.
                let _ = self.files.write(&self.place);
            } else {
                self.rest(LOOK).await;
            }
        }
    }

    /// Makes the run known to the server, however long that takes.
    async fn open(&mut self) -> Result<(), String> {
        loop {
            let opened = self.sink.open(self.run, &mut self.place.state).await;
            match opened {
                Ok(()) => break,
                Err(refusal) => self.pause(&refusal).await?,
            }
        }
        self.worked();
        self.is_open = true;
        if let Some(page) = self.sink.page(&self.place.state)
            && self.page.replace(page.clone()).as_ref() != Some(&page)
        {
            (self.link.say)(&format!("{}: {page}", S::NAME));
        }
        if self.sink.starts_anew() {
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

    /// The rows that are still to be sent. What was tried when an earlier process ended must hold before others follow it.
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
                    // The run ended before it had made as many rows again: it has those before, which hold.
                    break;
                }
                self.rest(LOOK).await;
            }
        }
        Feed::of(dir, &self.place.metrics, &self.place.system).map(Ok)
    }

    /// Rows behind a start are void: the server is told, where it has some of them.
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

    /// Sends steps in as many pieces as the server likes.
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

    /// Puts aside what the server refuses by itself.
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
                // What is refused even as a gap is left out.
                Err(Refusal::TooLarge { .. } | Refusal::Invalid { .. }) => return Ok(()),
                Err(refusal) => self.recover(&refusal).await?,
            }
            if self.is_anew {
                return Ok(());
            }
        }
    }

    /// Sends system rows, if there are any; whether there were.
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
                    // They are in the run directory for whoever misses them.
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

    /// Says how the run ended; not so where all its rows are to be sent again first.
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
        let mut status = self
            .link
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        status.is_closed = true;
        Ok(true)
    }

    /// Writes down how far it is, before anything else is sent.
    async fn save(&mut self) -> Result<(), String> {
        while let Err(line) = self.files.write(&self.place) {
            self.wait_for_disk(line).await?;
        }
        Ok(())
    }

    fn tell(&mut self) {
        let mut status = self
            .link
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        (status.sent, status.refused) = (self.place.metrics.mark.lines, self.place.refused);
        status.refused_system = self.place.refused_system;
        status.now = self.sent.min(status.sent);
    }
}

/// Two parts of whole steps; nothing where there is one step.
fn halves(rows: &[Stamped]) -> Option<(Vec<Stamped>, Vec<Stamped>)> {
    let starts: Vec<usize> = (1..rows.len())
        .filter(|&row| rows[row].row.step != rows[row - 1].row.step)
        .collect();
    let (first, second) = rows.split_at(*starts.get(starts.len() / 2)?);
    Some((first.to_vec(), second.to_vec()))
}

/// How many rows of a run a sink has still to send.
pub(crate) fn owed(dir: &Path, sent: u64) -> u64 {
    let rows = spd_files::read(&dir.join(METRICS)).unwrap_or_default();
    let rows = rows.iter().filter(|&&byte| byte == b'\n').count() as u64;
    rows.saturating_sub(sent)
}
