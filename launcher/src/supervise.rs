//! The ranks of an attempt, from their start to the end of the last, and what is said about it.
//!
//! One thread waits for whatever comes first: what a rank tells, what it prints, its end, a signal. It waits for nothing else: the
//! terminal, the logs and the rows have threads of their own. What is to be done about it is decided by the [`Supervisor`].

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::HumanDuration;
use signal_hook::consts::{SIGABRT, SIGKILL};
use spd_trainer::FaultKind;

use crate::channel::{Listener, Message};
use crate::exit::Exit;
use crate::failure::monotonic;
use crate::memory;
use crate::output::{Output, SHOWN, last_words};
use crate::progress::{Follower, Spool, place};
use crate::ranks::{Process, Program};
use crate::run_dir::RunDir;
use crate::screen;
use crate::stop::{self, Stop, StopRequest};
use crate::supervisor::{Action, Cause, Event, Status, Supervisor, Timeouts, Verdict};

/// Longest time between two looks at the clock.
const LOOK: Duration = Duration::from_millis(200);

/// The same while a log has no room.
const LOOK_SOON: Duration = Duration::from_millis(10);

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

/// Starts the ranks and stays with them until they are gone.
///
/// - `memory`: what the run plans to use, for the message when the machine had less
///
/// # Errors
///
/// When a rank cannot be started or watched; none is left running then.
pub(crate) fn attempt(
    program: &Program,
    run_dir: &RunDir,
    timeouts: Timeouts,
    stop: &mut Stop,
    memory: &str,
) -> Result<Attempt> {
    let follower = Follower::start(Spool::follow(run_dir)?).context("the progress of the run")?;
    let kills = memory::oom_kills();
    let memory_of_ranks = program
        .shared_memory()
        .context("memory for ranks to share")?;
    let start = |rank| Rank::start(program, run_dir, rank, memory_of_ranks.as_ref());
    let mut ranks = (0..program.ranks).map(start).collect::<Result<Vec<_>>>()?;
    for (index, rank) in ranks.iter().enumerate() {
        screen::detail(&format!(
            "rank {index} is process {}; it prints to {}",
            rank.process.pid(),
            run_dir.log(index).display()
        ));
    }
    drop(memory_of_ranks);
    let supervisor = Supervisor::new(ranks.len(), timeouts, monotonic());
    let supervisor = watch(&mut ranks, supervisor, timeouts, stop)?;
    drop(follower);
    let ended = ranks.into_iter().map(|rank| Ended {
        pid: rank.process.pid(),
        lines: rank.output.last_lines(),
    });
    Ok(Report {
        supervisor: &supervisor,
        ranks: &ended.collect::<Vec<_>>(),
        timeouts,
        memory,
        was_oom_killed: memory::oom_kills() > kills,
        run_dir,
    }
    .attempt())
}

/// A rank, and all that is heard of it.
struct Rank {
    process: Process,
    listener: Listener,
    output: Output,
    is_gone: bool,
}

impl Rank {
    fn start(
        program: &Program,
        run_dir: &RunDir,
        rank: usize,
        memory: Option<&OwnedFd>,
    ) -> Result<Self> {
        let log = run_dir.log(rank);
        let (output, writer) = Output::to_log(&log).with_context(|| log.display().to_string())?;
        let (listener, input) = Listener::new().context("a channel to the rank")?;
        let started = Process::start(program.command(rank, memory), input, writer);
        let process = started.with_context(|| {
            format!("{}: rank {rank} cannot be started", program.path.display())
        })?;
        Ok(Self {
            process,
            listener,
            output,
            is_gone: false,
        })
    }
}

/// Has the supervisor hear all that happens, and does what it says, until all ranks are gone.
fn watch(
    ranks: &mut [Rank],
    mut supervisor: Supervisor,
    timeouts: Timeouts,
    stop: &mut Stop,
) -> Result<Supervisor> {
    let mut forwarded = Instant::now();
    while !supervisor.is_over() {
        let is_held = ranks.iter().any(|rank| rank.output.is_held());
        let fds = ranks
            .iter()
            .flat_map(|rank| rank.listener.fd().into_iter().chain(rank.output.fd()));
        stop.wait(fds, if is_held { LOOK_SOON } else { LOOK });
        let mut events = Vec::new();
        for (index, rank) in ranks.iter_mut().enumerate() {
            // Its end first: what it said before that is there then.
            let status = rank.process.ended();
            let status = status.with_context(|| format!("rank {index}: cannot be watched"))?;
            let said = rank.listener.read().into_iter();
            events.extend(said.map(|message| Event::Said(index, message)));
            if let Some(status) = status
                && !std::mem::replace(&mut rank.is_gone, true)
            {
                events.push(Event::Ended(index, Status::of(status)));
            }
            rank.output.read();
        }
        if forwarded.elapsed() >= LOOK {
            let ranks = ranks.iter_mut().enumerate();
            ranks.for_each(|(index, rank)| forward(index, &mut rank.output));
            forwarded = Instant::now();
        }
        match stop.request() {
            Some(StopRequest::Leave(signal)) => {
                screen::note(&format!(
                    "{}: {}, {} s at most; a second Ctrl-C kills {}",
                    stop::name(signal),
                    if ranks.len() == 1 {
                        "the rank saves and leaves"
                    } else {
                        "the ranks save and leave"
                    },
                    timeouts.grace.as_secs(),
                    if ranks.len() == 1 { "it" } else { "them" },
                ));
                events.push(Event::Leave);
            }
            Some(StopRequest::LeaveNow(signal)) => events.push(Event::LeaveNow(signal)),
            None => {}
        }
        events.push(Event::Tick);
        for event in events {
            if let Event::Said(rank, Message::Beat { phase, step, .. }) = &event
                && *phase != supervisor.at(*rank).phase
            {
                screen::detail(&format!("rank {rank}: {phase}, step {step}"));
            }
            for action in supervisor.on(monotonic(), event) {
                act(&action, ranks, &supervisor);
            }
        }
    }
    Ok(supervisor)
}

fn act(action: &Action, ranks: &[Rank], supervisor: &Supervisor) {
    match *action {
        Action::Ask(rank) => ranks[rank].process.ask(),
        Action::Kill(rank) => ranks[rank].process.send_kill(),
        Action::Recovered(rank) => screen::note(&format!("rank {rank} goes on")),
        Action::Slow { rank, percent } => screen::note(&format!(
            "rank {rank} (pid {}) is slow: the others wait for it {percent} % of the time",
            ranks[rank].process.pid()
        )),
        Action::Tell {
            rank,
            silent,
            longest,
            limit,
        } => {
            let at = supervisor.at(rank);
            let pid = ranks[rank].process.pid();
            let what = if is_stopped(pid) {
                format!("is stopped (process {pid}; `kill -CONT {pid}` lets it go on)")
            } else {
                "makes no progress".to_owned()
            };
            let longest = longest.map_or(String::new(), |longest| {
                format!(
                    ", its longest pause there before was {:.1} s",
                    longest.as_secs_f64()
                )
            });
            let limit = limit.map_or(String::new(), |limit| {
                format!("; it is killed after {}", HumanDuration(limit))
            });
            screen::note(&format!(
                "rank {rank} {what}: nothing for {} {}{longest}{limit}",
                HumanDuration(silent),
                place(&at.phase, at.step)
            ));
        }
    }
}

/// Whether a signal has stopped a process, as far as the system tells.
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before it may hold anything.
    let state = stat.rsplit_once(") ").map(|(_, state)| state);
    state.is_some_and(|state| state.starts_with(['T', 't']))
}

/// Shows what a rank prints, as far as a person could read it.
fn forward(rank: usize, output: &mut Output) {
    let (lines, skipped) = output.news();
    if skipped > 0 {
        screen::progress(&format!(
            "[{rank}] (left out here, see the log: {skipped} lines)"
        ));
    }
    for line in lines {
        screen::progress(&format!("[{rank}] {line}"));
    }
}

impl Status {
    fn of(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => Self::Code(code),
            None => Self::Signal(status.signal().unwrap_or(0)),
        }
    }
}

/// How a stop ends that came before there was anything to save.
const NOTHING_SAVED: &str = "nothing new is saved, and the same command goes on";

/// A rank that is gone.
struct Ended {
    pid: u32,
    /// Its last.
    lines: Vec<String>,
}

struct Report<'a> {
    supervisor: &'a Supervisor,
    ranks: &'a [Ended],
    timeouts: Timeouts,
    memory: &'a str,
    /// The kernel has killed something of this control group for its memory.
    was_oom_killed: bool,
    run_dir: &'a RunDir,
}

impl Report<'_> {
    fn attempt(&self) -> Attempt {
        let said = |exit, line: String| Attempt {
            exit,
            message: vec![line],
            may_restart: false,
        };
        match self.supervisor.verdict() {
            Verdict::Done => Attempt {
                exit: Exit::Done,
                message: Vec::new(),
                may_restart: false,
            },
            // What is saved, and of which step, only the rank knows.
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
            Cause::Signal(SIGKILL) if self.was_oom_killed => FaultKind::OutOfMemory,
            cause => cause.kind(),
        };
        let mut message = vec![self.cause(rank, cause)];
        if !consequences.is_empty() {
            let ranks: Vec<String> = consequences.iter().map(usize::to_string).collect();
            message.push(format!("ranks {} failed because of it", ranks.join(", ")));
        }
        message.extend(self.evidence(rank));
        let exit = match kind {
            FaultKind::BadInput | FaultKind::Held => Exit::BadInput,
            _ => Exit::Failed,
        };
        Attempt {
            exit,
            message,
            may_restart: !matches!(cause, Cause::Overstayed | Cause::Undead) && may_restart(kind),
        }
    }

    fn cause(&self, rank: usize, cause: &Cause) -> String {
        let (pid, lines) = (self.ranks[rank].pid, &self.ranks[rank].lines);
        let (who, place) = (format!("rank {rank} (pid {pid})"), self.place(rank));
        let words = last_words(lines).map_or(String::new(), |words| format!(": {words}"));
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
            Cause::Code(code) => format!("{who} left with code {code} {place}{words}"),
            Cause::Signal(signal) => self.signalled(&who, *signal, &place, &words),
            Cause::Hung(limit) => format!(
                "{who} made no progress for {} s {place}: taken as hung and killed; --hang-seconds sets the limit",
                limit.as_secs()
            ),
            Cause::Overstayed => format!(
                "{who} did not leave within {} s of being asked, {place}, and was killed; --grace gives it longer",
                self.timeouts.grace.as_secs()
            ),
            Cause::Undead => format!(
                "{who} was killed {place} and does not die: it waits for a disk or a driver that does not answer, and ends when that does"
            ),
        }
    }

    fn signalled(&self, who: &str, signal: i32, place: &str, words: &str) -> String {
        let name = stop::name(signal);
        let hint = match signal {
            SIGKILL if self.was_oom_killed => format!(
                "; the kernel did that for want of memory: the plan needs {}",
                self.memory
            ),
            SIGKILL => format!(
                "; not from here, so most likely the machine ran out of memory: the plan needs {}, `dmesg` tells",
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

    fn evidence(&self, rank: usize) -> Vec<String> {
        let (log, lines) = (self.run_dir.log(rank), &self.ranks[rank].lines);
        if lines.is_empty() {
            return vec![format!("it printed nothing ({})", log.display())];
        }
        let mut evidence = vec![format!("its last lines ({}):", log.display())];
        let last = &lines[lines.len().saturating_sub(SHOWN)..];
        evidence.extend(last.iter().map(|line| format!("  {line}")));
        evidence
    }
}

/// Whether another attempt could end better than one that ended like this.
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
    use crate::failure::Failure;
    use crate::supervisor::HangLimit;

    use super::*;

    const TIMEOUTS: Timeouts = Timeouts {
        grace: Duration::from_secs(25),
        hang: HangLimit::After(Duration::from_secs(1)),
    };

    /// What is said of one rank to which this happens.
    fn report(events: Vec<Event>, lines: &[&str], was_oom_killed: bool) -> Attempt {
        let mut supervisor = Supervisor::new(1, TIMEOUTS, Duration::ZERO);
        for event in events {
            supervisor.on(Duration::ZERO, event);
        }
        let lines = lines.iter().map(|line| (*line).to_owned()).collect();
        Report {
            supervisor: &supervisor,
            ranks: &[Ended { pid: 7, lines }],
            timeouts: TIMEOUTS,
            memory: "3.00 GiB",
            was_oom_killed,
            run_dir: &RunDir::at("runs/x".into()),
        }
        .attempt()
    }

    fn ended(status: Status) -> Vec<Event> {
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
            Event::Ended(0, Status::Code(code)),
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
                "  error: loss is NaN",
            ]
        );
        assert_eq!((attempt.exit, attempt.may_restart), (Exit::Failed, false));
    }

    #[test]
    fn a_kill_from_outside_hints_at_memory() {
        let killed = || ended(Status::Signal(SIGKILL));
        let attempt = report(killed(), &[], false);
        assert_eq!(
            attempt.message,
            [
                "rank 0 (pid 7) was killed by signal 9 (SIGKILL) while it started; not from here, so \
                 most likely the machine ran out of memory: the plan needs 3.00 GiB, `dmesg` tells",
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
    fn what_may_start_again_follows_from_the_kind() {
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
        // A code alone is no word: nobody refused anything.
        for code in [1, 2, 101] {
            let attempt = report(ended(Status::Code(code)), &[], false);
            assert_eq!((attempt.exit, attempt.may_restart), (Exit::Failed, true));
        }
        // Nor a code that says a request: nobody asked.
        let left = report(ended(Status::Code(3)), &[], false);
        assert_eq!((left.exit, left.may_restart), (Exit::Failed, true));
        let mut words = vec![Event::Said(0, Message::Stopped("stopped".to_owned()))];
        words.extend(ended(Status::Code(3)));
        let stopped = report(words, &[], false);
        assert_eq!((stopped.exit, stopped.may_restart), (Exit::Stopped, false));
        let left = vec![
            Event::Leave,
            Event::LeaveNow(2),
            Event::Ended(0, Status::Signal(SIGKILL)),
        ];
        let left = report(left, &[], false);
        assert_eq!((left.exit, left.may_restart), (Exit::Killed(2), false));
    }

    #[test]
    fn a_rank_that_leaves_says_what_is_saved() {
        let words = "stopped after step 120, which is saved; the same command goes on";
        let events = vec![
            Event::Leave,
            Event::Said(0, Message::Stopped(words.to_owned())),
            Event::Ended(0, Status::Code(3)),
        ];
        assert_eq!(report(events, &[], false).message, [words]);
        let early = vec![
            Event::Leave,
            Event::Ended(0, Status::Signal(signal_hook::consts::SIGTERM)),
        ];
        assert_eq!(
            report(early, &[], false).message,
            ["stopped while it started; nothing new is saved, and the same command goes on"]
        );
    }

    #[test]
    fn this_process_is_not_stopped() {
        assert!(!is_stopped(std::process::id()));
    }
}
