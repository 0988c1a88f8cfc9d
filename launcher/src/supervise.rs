//! One rank, from its start to its end, and what is said about it.

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGKILL, SIGTERM};

use crate::exit::Exit;
use crate::output::{Output, SHOWN, last_words};
use crate::progress::{Display, Progress, Spool};
use crate::ranks::{Process, Program};
use crate::run_dir::RunDir;
use crate::screen;
use crate::stop::{self, Stop, StopRequest};

/// Time between two looks at whether the rank lives and what the user wants.
const LOOK: Duration = Duration::from_millis(20);

/// Time between two looks at what it wrote.
const READ: Duration = Duration::from_millis(200);

/// How long a rank is waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    /// From being asked to leave until it is killed.
    pub(crate) grace: Duration,
    /// From its last sign of life until it is killed; `None` waits for ever.
    pub(crate) heartbeat: Option<Duration>,
}

/// Why a rank is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It left with this code.
    Left(i32),
    /// A signal ended it that was not sent from here.
    Signal(i32),
    /// It left on being asked, before it could save.
    LeftUnsaved,
    /// It was killed: no sign of life for too long.
    Hung(Duration),
    /// It was killed: it did not leave within the grace.
    Overstayed(Duration),
    /// It was killed: the user asked twice. Holds the signal.
    Interrupted(i32),
}

/// The end of one attempt.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// The launcher's own end, if this is the last attempt.
    pub(crate) exit: Exit,
    /// What to say: the cause first.
    pub(crate) message: Vec<String>,
    /// Whether another attempt could end better.
    pub(crate) may_restart: bool,
}

/// Starts a rank and stays with it until it is gone.
///
/// - `memory`: what the run plans to use, for the message when the machine had less
///
/// # Errors
///
/// When the rank cannot be started or watched; none is left running then.
pub(crate) fn attempt(
    program: &Program,
    run_dir: &RunDir,
    timeouts: Timeouts,
    stop: &mut Stop,
    memory: &str,
) -> Result<Attempt> {
    let log = run_dir.log();
    let mut spool = Spool::follow(run_dir)?;
    let (output, writer) = Output::to_log(&log).with_context(|| log.display().to_string())?;
    let started = Process::start(program.command(), Stdio::null(), writer);
    let mut rank =
        started.with_context(|| format!("{}: cannot be started", program.path.display()))?;
    let end = Watch {
        rank: &mut rank,
        output: &output,
        spool: &mut spool,
        timeouts,
    }
    .until_end(stop)?;
    // Its last rows may have come after the last look.
    let news = spool.read();
    news.events.iter().for_each(|event| screen::progress(event));
    let lines = output.last_lines();
    Ok(Report {
        pid: rank.pid(),
        end,
        lines: &lines,
        progress: spool.progress(),
        memory,
        run_dir,
    }
    .attempt())
}

struct Watch<'a> {
    rank: &'a mut Process,
    output: &'a Output,
    spool: &'a mut Spool,
    timeouts: Timeouts,
}

impl Watch<'_> {
    fn until_end(self, stop: &mut Stop) -> Result<End> {
        let Self {
            rank,
            output,
            spool,
            timeouts,
        } = self;
        let mut display = Display::new();
        let mut deadline = None;
        let mut since_heartbeat = SinceHeartbeat::default();
        let mut last_read = Instant::now();
        loop {
            if let Some(status) = rank.ended().context("rank 0: cannot be watched")? {
                return Ok(End::of(status, stop.asked()));
            }
            match stop.request() {
                Some(StopRequest::Leave(signal)) => {
                    rank.ask();
                    deadline = Instant::now().checked_add(timeouts.grace);
                    screen::note(&format!(
                        "{}: the rank saves and leaves, {} s at most; a second Ctrl-C kills it",
                        stop::name(signal),
                        timeouts.grace.as_secs()
                    ));
                }
                Some(StopRequest::LeaveNow(signal)) => {
                    rank.kill();
                    return Ok(End::Interrupted(signal));
                }
                None => {}
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                rank.kill();
                return Ok(End::Overstayed(timeouts.grace));
            }
            if last_read.elapsed() >= READ {
                let news = spool.read();
                since_heartbeat.look(last_read.elapsed(), news.any);
                last_read = Instant::now();
                news.events.iter().for_each(|event| screen::progress(event));
                display.show(spool.progress());
                forward(output);
                if let Some(limit) = timeouts
                    .heartbeat
                    .filter(|limit| since_heartbeat.lasted >= *limit)
                    && deadline.is_none()
                {
                    rank.kill();
                    return Ok(End::Hung(limit));
                }
            }
            thread::sleep(LOOK);
        }
    }
}

/// How long there was no sign of life.
#[derive(Debug, Default)]
struct SinceHeartbeat {
    lasted: Duration,
}

impl SinceHeartbeat {
    fn look(&mut self, since_last: Duration, news: bool) {
        // A launcher that was paused itself has not listened: the pause counts as one look.
        self.lasted = if news {
            Duration::ZERO
        } else {
            self.lasted + since_last.min(5 * READ)
        };
    }
}

/// Shows what the rank prints, as far as a person could read it.
fn forward(output: &Output) {
    let (lines, skipped) = output.news();
    if skipped > 0 {
        screen::progress(&format!(
            "[0] (left out here, see the log: {skipped} lines)"
        ));
    }
    for line in lines {
        screen::progress(&format!("[0] {line}"));
    }
}

impl End {
    fn of(status: ExitStatus, asked: bool) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Left(code),
            // It was asked before it listened, at its very start.
            (None, Some(SIGTERM)) if asked => Self::LeftUnsaved,
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

/// How a stop ends that came before there was anything to save.
const NOTHING_SAVED: &str = "nothing new is saved, and the same command goes on";

struct Report<'a> {
    pid: u32,
    end: End,
    lines: &'a [String],
    progress: &'a Progress,
    memory: &'a str,
    run_dir: &'a RunDir,
}

impl Report<'_> {
    fn attempt(&self) -> Attempt {
        let place = self.progress.place();
        let who = format!("rank 0 (pid {})", self.pid);
        let words = last_words(self.lines).map_or(String::new(), |words| format!(": {words}"));
        let (exit, first) = match self.end {
            End::Left(0) => (Exit::Done, None),
            End::Left(2) => (
                Exit::BadInput,
                Some(format!("{who} refused its input{words}")),
            ),
            End::Left(3) => (
                Exit::Stopped,
                // What is saved, and of which step, only the rank knows.
                Some(self.progress.stopped().map_or_else(
                    || format!("stopped {place}; {NOTHING_SAVED}"),
                    str::to_owned,
                )),
            ),
            End::Left(1) => (Exit::Failed, Some(format!("{who} failed {place}{words}"))),
            End::Left(code) => (
                Exit::Failed,
                Some(format!("{who} left with code {code} {place}{words}")),
            ),
            End::Signal(signal) => (Exit::Failed, Some(self.signalled(&who, signal, &place))),
            End::LeftUnsaved => (
                Exit::Stopped,
                Some(format!("stopped {place}; {NOTHING_SAVED}")),
            ),
            End::Hung(limit) => (
                Exit::Failed,
                Some(format!(
                    "{who} gave no sign of life for {} s {place}: taken as hung and killed; \
                     --hang-seconds sets the limit",
                    limit.as_secs()
                )),
            ),
            End::Overstayed(grace) => (
                Exit::Failed,
                Some(format!(
                    "{who} did not leave within {} s of being asked, {place}, and was killed; \
                     --grace gives it longer",
                    grace.as_secs()
                )),
            ),
            End::Interrupted(signal) => (
                Exit::Killed(signal),
                Some(format!(
                    "killed by a second signal ({}) {place}; the same command goes on from the last checkpoint",
                    stop::name(signal)
                )),
            ),
        };
        let mut message: Vec<String> = first.into_iter().collect();
        let died = matches!(exit, Exit::Failed | Exit::BadInput);
        if died {
            message.extend(self.evidence());
        }
        let may_restart = exit == Exit::Failed && !matches!(self.end, End::Overstayed(_));
        Attempt {
            exit,
            message,
            may_restart,
        }
    }

    fn signalled(&self, who: &str, signal: i32, place: &str) -> String {
        let name = stop::name(signal);
        let hint = if signal == SIGKILL {
            format!(
                "; not from here, so most likely the machine ran out of memory: the plan needs {}, \
                 `dmesg` tells",
                self.memory
            )
        } else {
            last_words(self.lines).map_or(String::new(), |words| format!(": {words}"))
        };
        format!("{who} was killed by signal {signal} ({name}) {place}{hint}")
    }

    fn evidence(&self) -> Vec<String> {
        let log = self.run_dir.log();
        if self.lines.is_empty() {
            return vec![format!("it printed nothing ({})", log.display())];
        }
        let mut evidence = vec![format!("its last lines ({}):", log.display())];
        let last = &self.lines[self.lines.len().saturating_sub(SHOWN)..];
        evidence.extend(last.iter().map(|line| format!("  {line}")));
        evidence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(end: End, lines: &[&str]) -> Attempt {
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        let run_dir = RunDir::at("runs/x".into());
        let progress = Progress::default();
        Report {
            pid: 7,
            end,
            lines: &lines,
            progress: &progress,
            memory: "3.00 GiB",
            run_dir: &run_dir,
        }
        .attempt()
    }

    #[test]
    fn the_cause_comes_first() {
        let attempt = report(End::Left(1), &["step 3", "error: loss is NaN"]);
        assert_eq!(
            attempt.message,
            [
                "rank 0 (pid 7) failed while it started: loss is NaN",
                "its last lines (runs/x/logs/rank0.log):",
                "  step 3",
                "  error: loss is NaN",
            ]
        );
        assert_eq!((attempt.exit, attempt.may_restart), (Exit::Failed, true));
    }

    #[test]
    fn a_kill_from_outside_hints_at_memory() {
        assert_eq!(
            report(End::Signal(9), &[]).message,
            [
                "rank 0 (pid 7) was killed by signal 9 (SIGKILL) while it started; not from here, so \
                 most likely the machine ran out of memory: the plan needs 3.00 GiB, `dmesg` tells",
                "it printed nothing (runs/x/logs/rank0.log)",
            ]
        );
    }

    #[test]
    fn only_failures_may_start_again() {
        let again = |end| report(end, &[]).may_restart;
        assert!(again(End::Left(1)) && again(End::Left(101)) && again(End::Signal(9)));
        assert!(again(End::Hung(Duration::from_secs(1))));
        assert!(!again(End::Left(0)) && !again(End::Left(2)) && !again(End::Left(3)));
        assert!(!again(End::Overstayed(Duration::ZERO)) && !again(End::Interrupted(2)));
    }

    #[test]
    fn a_rank_asked_before_it_listens_has_stopped() {
        let terminated = ExitStatus::from_raw(SIGTERM);
        assert_eq!(End::of(terminated, true), End::LeftUnsaved);
        let attempt = report(End::LeftUnsaved, &[]);
        assert_eq!(attempt.exit, Exit::Stopped);
        assert_eq!(
            attempt.message,
            ["stopped while it started; nothing new is saved, and the same command goes on"]
        );
        assert_eq!(End::of(terminated, false), End::Signal(SIGTERM));
    }

    #[test]
    fn a_launcher_that_was_paused_does_not_blame_the_rank() {
        let mut since_heartbeat = SinceHeartbeat::default();
        since_heartbeat.look(Duration::from_secs(3600), false);
        assert_eq!(since_heartbeat.lasted, 5 * READ);
        since_heartbeat.look(READ, true);
        assert_eq!(since_heartbeat.lasted, Duration::ZERO);
    }
}
