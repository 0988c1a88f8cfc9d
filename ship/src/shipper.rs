//! All sinks of a run, on a thread of their own.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use spd_configs::Destination;
use spd_tracker::Start;
use tokio::sync::watch;

use crate::driver::{Link, Status, locked, owed};
use crate::run::{About, RunInfo};
use crate::sink::End;
use crate::trackers::ship;

/// Time between two polls for the start of the run, or the end of the sinks.
const LOOK: Duration = Duration::from_millis(50);

/// Ships the rows of a run, or of a sweep, to the trackers of its `[tracker]`, during the run and
/// afterwards. A server cannot affect the run: a shipper only reads files, and is abandoned if it
/// is not done in time.
pub struct Shipper {
    dir: PathBuf,
    over: watch::Sender<Option<End>>,
    sinks: Vec<(Destination, Arc<Mutex<Status>>)>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Shipper {
    /// Starts shipping the run in `dir`, which need not have begun. Returns `None` if it names no
    /// tracker.
    ///
    /// - `say`: takes lines for the user: answers of servers, at most one in five minutes for each
    ///
    /// # Errors
    ///
    /// When no thread can be started.
    pub fn start(
        dir: &Path,
        about: About,
        say: impl Fn(&str) + Send + Sync + 'static,
    ) -> std::io::Result<Option<Self>> {
        if about.tracker.to.is_empty() {
            return Ok(None);
        }
        let to = about.tracker.to.iter();
        let sinks: Vec<_> = to.map(|to| (*to, Arc::default())).collect();
        let (over, is_over) = watch::channel(None);
        let stop = Arc::default();
        let work = Work {
            dir: dir.to_path_buf(),
            about,
            sinks: sinks.clone(),
            over: is_over,
            stop: Arc::clone(&stop),
            say: Arc::new(say),
        };
        let thread = thread::Builder::new()
            .name("shipper".into())
            .spawn(move || work.run())?;
        Ok(Some(Self {
            dir: dir.to_path_buf(),
            over,
            sinks,
            stop,
            thread: Some(thread),
        }))
    }

    /// Set when somebody presses Stop on the page of the run, which only W&B has.
    pub fn stop(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// Reports the launcher's exit code, waits for at most `patience` until all is sent, and
    /// returns a line for each tracker.
    pub fn finish(mut self, code: u8, patience: Duration) -> Vec<Told> {
        let _ = self.over.send(Some(End { code }));
        let begun = Instant::now();
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && begun.elapsed() < patience {
                thread::sleep(LOOK);
            }
        }
        let told = self
            .sinks
            .iter()
            .map(|(to, status)| Told::of(to.word(), &locked(status), &self.dir));
        told.collect()
    }
}

/// The outcome for the rows of a run at one tracker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// All rows are there, and the tracker knows the outcome of the run.
    pub is_done: bool,
    /// The outcome as a line for the user.
    pub line: String,
}

impl Told {
    fn of(name: &str, status: &Status, dir: &Path) -> Self {
        let (sent, owed) = (status.sent, owed(dir, status.sent));
        let mut refused = match status.refused {
            0 => String::new(),
            refused => format!(", {refused} of them refused"),
        };
        if status.refused_system > 0 {
            let rows = status.refused_system;
            refused.push_str(&format!(", and {rows} rows of the system are refused"));
        }
        let line = match &status.trouble {
            _ if status.is_closed => match status.now {
                0 if sent > 0 => format!("{name}: all {sent} rows were there before{refused}"),
                now if now < sent => {
                    format!("{name}: all {sent} rows are sent, {now} of them now{refused}")
                }
                _ => format!("{name}: all {sent} rows are sent{refused}"),
            },
            Some(trouble) if owed == 0 && sent > 0 => format!(
                "{name}: all {sent} rows are sent{refused}, but the end of the run is not: {trouble}; `spd-launch ship {}` sends it",
                dir.display()
            ),
            trouble => format!(
                "{name}: {owed} rows are not sent{refused}: {}; `spd-launch ship {}` sends them",
                trouble.as_deref().unwrap_or("there was no time"),
                dir.display()
            ),
        };
        Self {
            is_done: status.is_closed,
            line,
        }
    }
}

/// The work of the thread.
struct Work {
    dir: PathBuf,
    about: About,
    sinks: Vec<(Destination, Arc<Mutex<Status>>)>,
    over: watch::Receiver<Option<End>>,
    stop: Arc<AtomicBool>,
    say: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Work {
    fn run(self) {
        if let Err(line) = self.ship() {
            for (_, status) in &self.sinks {
                locked(status).trouble = Some(line.clone());
            }
        }
    }

    fn ship(&self) -> Result<(), String> {
        let Some(start) = self.begun()? else {
            return Err("the run has made no rows".to_owned());
        };
        let run = RunInfo::of(&self.dir, self.about.clone(), start);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|found| format!("cannot start a runtime: {found}"))?;
        let tasks = tokio::task::LocalSet::new();
        let run = Arc::new(run);
        for (to, status) in &self.sinks {
            let link = Link {
                over: self.over.clone(),
                status: Arc::clone(status),
                say: Arc::clone(&self.say),
            };
            let stop = Arc::clone(&self.stop);
            tasks.spawn_local(ship(*to, Arc::clone(&run), link, stop));
        }
        runtime.block_on(tasks);
        Ok(())
    }

    /// The first start of the run; waits while the run may still begin.
    fn begun(&self) -> Result<Option<Start>, String> {
        loop {
            let is_over = self.over.borrow().is_some();
            let starts = Start::all(&self.dir).map_err(|found| found.to_string())?;
            match starts.into_iter().next() {
                Some(start) => return Ok(Some(start)),
                None if is_over => return Ok(None),
                None => thread::sleep(LOOK),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_rows_are_counted_by_kind() {
        let status = |refused, refused_system| Status {
            sent: 9,
            now: 9,
            refused,
            refused_system,
            is_closed: true,
            trouble: None,
        };
        let line = |status| Told::of("mlflow", &status, Path::new("/nowhere")).line;
        assert_eq!(line(status(0, 0)), "mlflow: all 9 rows are sent");
        assert_eq!(
            line(status(1, 2)),
            "mlflow: all 9 rows are sent, 1 of them refused, and 2 rows of the system are refused"
        );
        let again = |now| {
            line(Status {
                now,
                ..status(0, 0)
            })
        };
        assert_eq!(again(0), "mlflow: all 9 rows were there before");
        assert_eq!(again(2), "mlflow: all 9 rows are sent, 2 of them now");
        let open = Status {
            is_closed: false,
            trouble: Some("no".to_owned()),
            ..status(0, 0)
        };
        assert_eq!(
            line(open),
            "mlflow: all 9 rows are sent, but the end of the run is not: no; `spd-launch ship /nowhere` sends it"
        );
    }
}
