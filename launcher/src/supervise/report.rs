//! The report about an attempt, the cause first.

use signal_hook::consts::{SIGABRT, SIGKILL};
use spd_trainer::FaultKind;

use super::Attempt;
use super::local::Finished;
use crate::exit::Exit;
use crate::output::{SHOWN, last_words};
use crate::progress::place;
use crate::run_dir::RunDir;
use crate::screen::unstamped;
use crate::stop;
use crate::supervisor::{Cause, Supervisor, Timeouts, Verdict};

/// The end of a message about a stop before there was anything to save.
const NOTHING_SAVED: &str = "nothing new is saved, and the same command goes on";

/// The data of a report.
pub(super) struct AttemptReport<'a> {
    pub(super) supervisor: &'a Supervisor,
    pub(super) finished: &'a Finished,
    pub(super) timeouts: Timeouts,
    pub(super) memory: &'a str,
    pub(super) run_dir: &'a RunDir,
}

impl AttemptReport<'_> {
    pub(super) fn attempt(&self) -> Attempt {
        let said = |exit, line: String| Attempt::last(exit, vec![line]);
        match self.supervisor.verdict() {
            Verdict::Done => Attempt::last(Exit::Done, Vec::new()),
            // Only the rank knows what is saved, and of which step.
            Verdict::Stopped(Some(words)) => said(Exit::Stopped, words),
            Verdict::Stopped(None) => said(
                Exit::Stopped,
                format!("stopped {}; {NOTHING_SAVED}", self.place(0)),
            ),
            Verdict::Interrupted(signal) => said(
                Exit::Killed(signal),
                format!(
                    "killed by a second signal ({}) {}; the same command goes on from the last checkpoint",
                    stop::name(signal),
                    self.place(0)
                ),
            ),
            Verdict::Failed {
                rank,
                cause,
                consequences,
            } => self.failed(rank, &cause, &consequences),
        }
    }

    fn failed(&self, rank: usize, cause: &Cause, consequences: &[usize]) -> Attempt {
        let kind = match cause {
            Cause::Signal(SIGKILL) if self.finished.was_oom_killed => FaultKind::OutOfMemory,
            cause => cause.kind(),
        };
        let cause_in_words = self.cause(rank, cause);
        let evidence = self.evidence(rank, &cause_in_words);
        let mut message = vec![cause_in_words];
        if !consequences.is_empty() {
            let ranks: Vec<String> = consequences.iter().map(usize::to_string).collect();
            message.push(format!("ranks {} failed because of it", ranks.join(", ")));
        }
        message.extend(evidence);
        let exit = match kind {
            FaultKind::BadInput | FaultKind::Held => Exit::BadInput,
            _ => Exit::Failed,
        };
        Attempt {
            exit,
            message,
            may_restart: !matches!(
                cause,
                Cause::GraceExpired | Cause::SurvivedKill | Cause::Lost
            ) && may_restart(kind),
        }
    }

    fn cause(&self, rank: usize, cause: &Cause) -> String {
        let ended = &self.finished.ranks[rank];
        let pid = ended.pid;
        let who = match &ended.host {
            Some(host) => format!("rank {rank} (pid {pid} on {host})"),
            None => format!("rank {rank} (pid {pid})"),
        };
        let place = self.place(rank);
        let words = last_words(&ended.lines).map_or(String::new(), |words| format!(": {words}"));
        match cause {
            Cause::Failure(failure) => {
                let message = &failure.message;
                match failure.kind {
                    FaultKind::BadInput => format!("{who} refused its input: {message}"),
                    FaultKind::Bug => {
                        format!("{who} panicked {place}, which is a bug in spd: {message}")
                    }
                    _ => format!("{who} failed {place}: {message}"),
                }
            }
            Cause::Code(1) => format!("{who} failed {place}{words}"),
            Cause::Code(code) => format!("{who} exited with code {code} {place}{words}"),
            Cause::Signal(signal) => self.signalled(&who, *signal, &place, &words),
            Cause::Hung(limit) if ended.was_stopped => format!(
                "{who} was stopped by a signal and made no progress for {} s {place}: it was killed; `kill -CONT` lets a stopped process go on, and \
                 --hang-seconds sets the limit",
                limit.as_secs()
            ),
            Cause::Hung(limit) => format!(
                "{who} made no progress for {} s {place}: it counts as hung and was killed; --hang-seconds sets the limit",
                limit.as_secs()
            ),
            Cause::GraceExpired if ended.was_stopped => format!(
                "{who} was stopped by a signal and could not exit within {} s of being asked, {place}: it was killed; `kill -CONT` lets a stopped \
                 process go on",
                self.timeouts.grace.as_secs()
            ),
            Cause::GraceExpired => format!(
                "{who} did not exit within {} s of being asked, {place}, and was killed; --grace gives it longer",
                self.timeouts.grace.as_secs()
            ),
            Cause::Lost => format!(
                "rank {rank} is lost {place}, as the launcher of its node{} is: {}",
                ended
                    .host
                    .as_ref()
                    .map_or(String::new(), |host| format!(" ({host})")),
                ended.lost.as_deref().unwrap_or("it does not answer")
            ),
            Cause::SurvivedKill => format!(
                "{who} was killed {place} and does not die: it waits for a disk or a driver that does not answer, and ends when that does"
            ),
        }
    }

    fn signalled(&self, who: &str, signal: i32, place: &str, words: &str) -> String {
        let name = stop::name(signal);
        let hint = match signal {
            SIGKILL if self.finished.was_oom_killed => format!(
                "; the kernel did that for want of memory: the plan needs {}",
                self.memory
            ),
            SIGKILL => format!(
                "; not by the launcher, so most likely the machine ran out of memory: the plan needs {}; see `dmesg`",
                self.memory
            ),
            SIGABRT if words.is_empty() => "; it aborted itself, which is a bug".to_owned(),
            _ => words.to_owned(),
        };
        format!("{who} was killed by signal {signal} ({name}) {place}{hint}")
    }

    fn place(&self, rank: usize) -> String {
        let at = self.supervisor.at(rank);
        place(&at.phase, at.step)
    }

    /// The last lines of a rank, without those that the `cause` contains already.
    fn evidence(&self, rank: usize, cause: &str) -> Vec<String> {
        let (log, lines) = (self.run_dir.log(rank), &self.finished.ranks[rank].lines);
        if self.finished.ranks[rank].lost.is_some() {
            return Vec::new();
        }
        if lines.is_empty() {
            return vec![format!("it printed nothing ({})", log.display())];
        }
        let last = &lines[lines.len().saturating_sub(SHOWN)..];
        let is_told = |line: &String| {
            let words = unstamped(line).strip_prefix("error: ");
            words.is_some_and(|words| cause.contains(words))
        };
        let others = last.iter().filter(|line| !is_told(line));
        let others: Vec<String> = others.map(|line| format!("  {line}")).collect();
        if others.is_empty() {
            return vec![format!("its log is {}", log.display())];
        }
        let head = format!("its last lines ({}):", log.display());
        [head].into_iter().chain(others).collect()
    }
}

/// Whether another attempt could succeed after this kind of fault.
fn may_restart(kind: FaultKind) -> bool {
    match kind {
        // The same files, numbers and memory would end it again.
        FaultKind::BadInput | FaultKind::Held | FaultKind::NotFinite | FaultKind::OutOfMemory => {
            false
        }
        FaultKind::InputOutput
        | FaultKind::PeerLost
        | FaultKind::Hang
        | FaultKind::Bug
        | FaultKind::Killed
        | FaultKind::Failed => true,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::local::Ended;
    use crate::channel::Message;
    use crate::failure::Failure;
    use crate::supervisor::{Event, HangLimit, ProcessEnd};

    use super::*;

    const TIMEOUTS: Timeouts = Timeouts {
        grace: Duration::from_secs(25),
        hang: HangLimit::After(Duration::from_secs(1)),
    };

    /// The report about one rank with these events.
    fn report(events: Vec<Event>, lines: &[&str], was_oom_killed: bool) -> Attempt {
        let mut supervisor = Supervisor::new(1, TIMEOUTS, Duration::ZERO);
        for event in events {
            supervisor.on(Duration::ZERO, event);
        }
        let lines = lines.iter().map(|line| (*line).to_owned()).collect();
        AttemptReport {
            supervisor: &supervisor,
            finished: &Finished {
                ranks: vec![Ended {
                    pid: 7,
                    lines,
                    ..Ended::default()
                }],
                was_oom_killed,
            },
            timeouts: TIMEOUTS,
            memory: "3.00 GiB",
            run_dir: &RunDir::at("runs/x".into()),
        }
        .attempt()
    }

    fn ended(status: ProcessEnd) -> Vec<Event> {
        vec![Event::Ended(0, status)]
    }

    fn failed(kind: FaultKind, message: &str, code: i32) -> Vec<Event> {
        let failure = Failure {
            kind,
            phase: "train".to_owned(),
            step: 5,
            time_ns: 1,
            message: message.to_owned(),
            because_of: None,
        };
        vec![
            Event::Said(0, Message::Failure(failure)),
            Event::Ended(0, ProcessEnd::Code(code)),
        ]
    }

    #[test]
    fn the_cause_comes_first() {
        let events = failed(FaultKind::NotFinite, "loss is NaN", 1);
        let attempt = report(events, &["step 3", "error: loss is NaN"], false);
        assert_eq!(
            attempt.message,
            [
                "rank 0 (pid 7) failed after step 5 (decomposing): loss is NaN",
                "its last lines (runs/x/logs/rank0.log):",
                "  step 3",
            ]
        );
        assert_eq!((attempt.exit, attempt.may_restart), (Exit::Failed, false));
        // A rank that printed only its cause has no further lines.
        let events = failed(FaultKind::NotFinite, "loss is NaN", 1);
        let attempt = report(events, &["error: loss is NaN"], false);
        assert_eq!(attempt.message[1..], ["its log is runs/x/logs/rank0.log"]);
    }

    #[test]
    fn a_kill_from_outside_hints_at_memory() {
        let killed = || ended(ProcessEnd::Signal(SIGKILL));
        let attempt = report(killed(), &[], false);
        assert_eq!(
            attempt.message,
            [
                "rank 0 (pid 7) was killed by signal 9 (SIGKILL) while it started; not by the launcher, so \
                 most likely the machine ran out of memory: the plan needs 3.00 GiB; see `dmesg`",
                "it printed nothing (runs/x/logs/rank0.log)",
            ]
        );
        assert!(attempt.may_restart);
        let attempt = report(killed(), &[], true);
        assert!(
            attempt.message[0]
                .ends_with("; the kernel did that for want of memory: the plan needs 3.00 GiB")
        );
        assert!(!attempt.may_restart);
    }

    #[test]
    fn the_kind_decides_on_a_restart() {
        for (kind, code, exit, again) in [
            (FaultKind::BadInput, 2, Exit::BadInput, false),
            (FaultKind::Held, 2, Exit::BadInput, false),
            (FaultKind::NotFinite, 1, Exit::Failed, false),
            (FaultKind::OutOfMemory, 1, Exit::Failed, false),
            (FaultKind::InputOutput, 1, Exit::Failed, true),
            (FaultKind::Bug, 101, Exit::Failed, true),
            (FaultKind::Failed, 1, Exit::Failed, true),
        ] {
            let attempt = report(failed(kind, "it broke", code), &[], false);
            assert_eq!(
                (attempt.exit, attempt.may_restart),
                (exit, again),
                "{kind:?}"
            );
        }
        // An exit code without a message is not a refusal.
        for code in [1, 2, 101] {
            let attempt = report(ended(ProcessEnd::Code(code)), &[], false);
            assert_eq!((attempt.exit, attempt.may_restart), (Exit::Failed, true));
        }
        // The exit code of a stop without a request is not a stop.
        let left = report(ended(ProcessEnd::Code(3)), &[], false);
        assert_eq!((left.exit, left.may_restart), (Exit::Failed, true));
        let mut words = vec![Event::Said(0, Message::Stopped("stopped".to_owned()))];
        words.extend(ended(ProcessEnd::Code(3)));
        let stopped = report(words, &[], false);
        assert_eq!((stopped.exit, stopped.may_restart), (Exit::Stopped, false));
        let left = vec![
            Event::Leave,
            Event::LeaveNow(2),
            Event::Ended(0, ProcessEnd::Signal(SIGKILL)),
        ];
        let left = report(left, &[], false);
        assert_eq!((left.exit, left.may_restart), (Exit::Killed(2), false));
    }

    #[test]
    fn a_stopped_rank_says_what_is_saved() {
        let words = "stopped after step 120, which is saved; the same command goes on";
        let events = vec![
            Event::Leave,
            Event::Said(0, Message::Stopped(words.to_owned())),
            Event::Ended(0, ProcessEnd::Code(3)),
        ];
        assert_eq!(report(events, &[], false).message, [words]);
        let early = vec![
            Event::Leave,
            Event::Ended(0, ProcessEnd::Signal(signal_hook::consts::SIGTERM)),
        ];
        assert_eq!(
            report(early, &[], false).message,
            ["stopped while it started; nothing new is saved, and the same command goes on"]
        );
    }
}
