//! Waits of a driver: for a slow, wrong or dead server, for new credentials, for space on the disk;
//! and the warnings meanwhile.

use std::path::Path;
use std::time::Duration;

use spd_tracker::{METRICS, ReadError};
use tokio::time::Instant;

use super::{Driver, LOOK, Link, locked};
use crate::cursor::Files;
use crate::sink::{Refusal, Sink};

/// Longest wait that a server may ask for.
const LONGEST: Duration = Duration::from_secs(3600);

/// Time between two warnings of one sink.
const WARN_EVERY: Duration = Duration::from_secs(300);

/// Locks the files of a sink. Another process may hold them for a while, and a full disk may refuse
/// them.
///
/// # Errors
///
/// The reason for failing, once the run is over.
pub(super) async fn hold(dir: &Path, name: &'static str, link: &mut Link) -> Result<Files, String> {
    let mut failures = 0;
    loop {
        let line = match Files::hold(dir, name) {
            Ok(files) => return Ok(files),
            Err(line) => line,
        };
        if link.over.borrow().is_some() {
            return Err(line);
        }
        failures += 1;
        if failures == 1 {
            (link.say)(&format!(
                "{name}: {line}; the run goes on, and rows wait in {METRICS}"
            ));
        }
        let _ = tokio::time::timeout(backoff(failures), link.over.changed()).await;
    }
}

impl<S: Sink> Driver<'_, S> {
    /// Waits as long as a refusal asks for, and opens the run again if that may help.
    pub(super) async fn recover(&mut self, refusal: &Refusal) -> Result<(), String> {
        let is_gone = matches!(refusal, Refusal::Gone { .. });
        if !is_gone || !self.is_open {
            self.pause(refusal).await?;
        }
        if matches!(refusal, Refusal::Gone { .. } | Refusal::Unauthorized { .. }) {
            self.is_open = false;
            self.open().await?;
            // A run that is gone again at once is waited for.
            self.is_open = !is_gone;
        }
        Ok(())
    }

    /// Waits as long as a refusal asks for. After the end of the run it does not wait for new
    /// credentials: the rows are shipped later.
    pub(super) async fn pause(&mut self, refusal: &Refusal) -> Result<(), String> {
        self.failures += 1;
        let (why, wait) = match refusal {
            Refusal::Later { why, after } => {
                let asked = after.map(|after| after.min(LONGEST));
                (why, asked.unwrap_or_else(|| backoff(self.failures)))
            }
            Refusal::Gone { why } => (why, backoff(self.failures)),
            Refusal::Unauthorized { why }
            | Refusal::TooLarge { why }
            | Refusal::Invalid { why } => {
                let minutes = [1, 5, 15, 60];
                let index = (self.failures as usize - 1).min(minutes.len() - 1);
                let wait = Duration::from_secs(60 * minutes[index]);
                let is_over = self.link.over.borrow().is_some();
                (why, if is_over { LOOK } else { wait })
            }
        };
        self.warn(why);
        self.rest(wait).await;
        match refusal {
            Refusal::Unauthorized { why } if self.knows_end => Err(why.clone()),
            _ => Ok(()),
        }
    }

    /// Waits for space on a full disk. After the end of the run it does not wait.
    pub(super) async fn wait_for_disk(&mut self, line: String) -> Result<(), String> {
        self.failures += 1;
        self.warn(&line);
        if self.knows_end {
            return Err(line);
        }
        self.rest(backoff(self.failures)).await;
        Ok(())
    }

    /// Waits before a file is read again.
    pub(super) async fn wait_for(&mut self, error: &ReadError) {
        self.warn(&error.to_string());
        self.rest(backoff(1)).await;
    }

    /// Waits, at most until the end of the run.
    pub(super) async fn rest(&mut self, time: Duration) {
        if self.knows_end {
            tokio::time::sleep(time).await;
            return;
        }
        if self.link.over.borrow().is_none() {
            let _ = tokio::time::timeout(time, self.link.over.changed()).await;
        }
        self.knows_end = self.link.over.borrow().is_some();
    }

    pub(super) fn worked(&mut self) {
        if std::mem::take(&mut self.is_named) {
            (self.link.say)(&format!("{}: rows are sent again", S::NAME));
        }
        self.failures = 0;
        locked(&self.link.status).trouble = None;
    }

    /// Warns, at most once in five minutes.
    pub(super) fn warn(&mut self, why: &str) {
        locked(&self.link.status).trouble = Some(why.to_owned());
        if self
            .warned
            .is_none_or(|warned| warned.elapsed() >= WARN_EVERY)
        {
            (self.warned, self.is_named) = (Some(Instant::now()), true);
            (self.link.say)(&format!(
                "{}: {why}; the run goes on, and rows wait in {METRICS}",
                S::NAME
            ));
        }
    }
}

/// 2, 4, 8, ... 60 seconds.
fn backoff(failures: u32) -> Duration {
    Duration::from_secs((1 << failures.clamp(1, 6)).min(60))
}
