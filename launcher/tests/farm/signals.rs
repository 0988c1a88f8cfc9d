//! Signals that ask a run to stop, once or twice and at random times: it exits in time, saves as it
//! says, and continues.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::both::children;
use crate::launch::Ended;
use crate::runs::{
    RUN, SHARED_TEXT, SHARED_TMS, SHARED_TOY, Small, TEXT, TOY, Uninterrupted, send, steps,
};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "signals",
    cases: 120,
    columns: &[
        "signals",
        "unread",
        "before it listened",
        "stopped",
        "killed",
        "done",
        "bit-equal",
    ],
};

/// Time limit from the last signal to the end; `--grace` gives 25 s, and a stop takes a second or
/// two.
const LEAVING: Duration = Duration::from_secs(10);

/// Runs in which one phase takes most of the time.
const PHASES: [(&str, Small); 10] = [
    ("steps", TOY),
    ("target", TOY.with(&["target.train.steps=3000"])),
    (
        "warm-up",
        TOY.with(&["train.faithfulness_warmup.steps=20_000"]),
    ),
    (
        "evaluation",
        TOY.with(&["eval.batches=2000", "eval.every=100"]),
    ),
    ("saving", TOY.with(&["checkpoint.every=10"])),
    ("figures", TOY.with(&["eval.slow_every=20"])),
    ("text", TEXT),
    ("ranks", SHARED_TOY),
    (
        "ranks in evaluation",
        SHARED_TMS.with(&["train.shards=4", "eval.batches=500"]),
    ),
    ("ranks on text", SHARED_TEXT),
];

const SIGNALS: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::USR1, Signal::HUP];

/// The process that gets the signal.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Asked {
    Launcher,
    /// Launcher and rank, as by Ctrl-C.
    Group,
    Rank,
}

/// The output of the launcher; the last two are not read.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stream {
    Read,
    Pipe,
    Terminal,
}

#[test]
#[ignore = "minutes; run with --ignored"]
fn stopped_runs_exit_and_continue() {
    let straight = Uninterrupted::of_each(&PHASES.map(|(_, small)| small));
    FIELD.run(|case| {
        let number = case.number as usize % PHASES.len();
        case.kind(PHASES[number].0);
        let straight = &straight[number];
        let cached = PHASES[number].0 != "target" && case.random.one_in(2);
        straight.furnish(case.dir(), cached);
        asked(case, straight)
    });
}

fn asked(case: &mut Case, straight: &Uninterrupted) -> Result<(), String> {
    let stream = match case.random.below(6) {
        0 => Stream::Pipe,
        1 => Stream::Terminal,
        _ => Stream::Read,
    };
    let whom = match case.random.below(4) {
        0 => Asked::Group,
        // The launcher got no signal, so it may wait for its reader.
        1 if stream == Stream::Read => Asked::Rank,
        _ => Asked::Launcher,
    };
    let mut command = straight.small.command(case.dir());
    let ranks = straight.small.ranks(&mut case.random);
    command.args(["--cpus", &ranks.to_string()]);
    command.process_group(0);
    let (running, paused) = if stream == Stream::Read {
        (case.start(command), None)
    } else {
        case.count("unread");
        let paused = if stream == Stream::Pipe {
            Paused::pipe()
        } else {
            Paused::terminal()
        };
        let writer = || paused.writer.try_clone().unwrap();
        command.stdout(writer()).stderr(writer());
        (case.start_unread(command), Some(paused))
    };
    thread::sleep(straight.took.mul_f64(0.9 * case.random.part()));
    let launcher = running.child.id();
    let began =
        fs::symlink_metadata(case.dir().join(RUN)).is_ok() && !children(launcher).is_empty();
    if let Some(paused) = &paused {
        paused.fill();
        // Time to draw, and for drawing to block.
        thread::sleep(Duration::from_millis(case.random.below(500) as u64));
    }
    let mut sent = vec![];
    for _ in 0..=case.random.below(2) {
        let signal = *case.random.one(&SIGNALS);
        case.launches
            .push(format!("  {signal:?} to {whom:?}, {stream:?}\n"));
        case.count("signals");
        match whom {
            Asked::Launcher => send(launcher, signal),
            Asked::Rank => children(launcher)
                .into_iter()
                .for_each(|rank| send(rank, signal)),
            Asked::Group => {
                let group = Pid::from_raw(launcher.try_into().unwrap()).unwrap();
                // The process has exited by itself.
                let _ = kill_process_group(group, signal);
            }
        }
        sent.push(signal);
        thread::sleep(Duration::from_millis(case.random.below(700) as u64));
    }
    let ended = case.end(running, LEAVING)?;
    left_as_documented(case, &ended, whom, &sent, began)?;
    case.launch(straight.small.command(case.dir()), &[0])?;
    straight.compare(case.dir())?;
    case.count("bit-equal");
    Ok(())
}

fn left_as_documented(
    case: &mut Case,
    ended: &Ended,
    whom: Asked,
    sent: &[Signal],
    began: bool,
) -> Result<(), String> {
    let by = ended.status.signal();
    if !began && sent.iter().any(|signal| by == Some(signal.as_raw())) {
        case.count("before it listened");
        return Ok(());
    }
    let code = ended.code()?;
    let expected = match code {
        0 => {
            case.count("done");
            true
        }
        3 => {
            case.count("stopped");
            saved(case.dir(), ended)?;
            true
        }
        // A rank that is asked before it handles signals dies of that.
        1 => whom == Asked::Rank,
        2 => false,
        killed => {
            case.count("killed");
            let second = sent.get(1).map(|signal| 128 + signal.as_raw());
            second == Some(killed) && whom != Asked::Rank
        }
    };
    if expected {
        return Ok(());
    }
    Err(format!(
        "leaves with code {code} after {sent:?} to {whom:?}"
    ))
}

/// Checks that a stop that says `saved` has a checkpoint of the step that it names.
fn saved(dir: &Path, ended: &Ended) -> Result<(), String> {
    let Some(line) = ended
        .stderr
        .lines()
        .find(|line| line.starts_with("stopped "))
    else {
        return Ok(());
    };
    // `nothing new is saved`, `nothing is saved yet`.
    if !line.contains("saved") || line.contains("nothing") {
        return Ok(());
    }
    let step = line.split("step ").nth(1).and_then(|rest| {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        rest[..digits].parse::<u64>().ok()
    });
    let checkpoints = if line.contains("target") {
        let targets = fs::read_dir(dir.join("cache/targets")).map_err(|error| error.to_string())?;
        let entry = targets.flatten().next().ok_or("no target was begun")?;
        entry.path().join("checkpoints")
    } else {
        dir.join(RUN).join("checkpoints")
    };
    let newest = steps(&checkpoints).pop();
    let newest = newest.and_then(|name| name.strip_prefix("step-")?.parse::<u64>().ok());
    match (newest, step) {
        (None, _) => Err(format!("says {line:?}, and there is no checkpoint")),
        (Some(newest), Some(step)) if newest != step => Err(format!(
            "says {line:?}, and the newest checkpoint is of step {newest}"
        )),
        _ => Ok(()),
    }
}

/// A stream that is not read, with some room.
struct Paused {
    writer: OwnedFd,
    /// Its path, where the writer can be opened again.
    path: PathBuf,
    /// Stays open: a closed reader is tested elsewhere.
    _reader: OwnedFd,
}

impl Paused {
    fn pipe() -> Self {
        let (reader, writer) = io::pipe().unwrap();
        Self {
            path: format!("/proc/self/fd/{}", writer.as_raw_fd()).into(),
            writer: writer.into(),
            _reader: reader.into(),
        }
    }

    /// A terminal as after Ctrl-S.
    fn terminal() -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let reader = openpt(flags).unwrap();
        grantpt(&reader).unwrap();
        unlockpt(&reader).unwrap();
        let name = ptsname(&reader, vec![]).unwrap();
        let path = PathBuf::from(OsStr::from_bytes(name.as_bytes()));
        Self {
            writer: open(&path, OFlags::RDWR),
            path,
            _reader: reader,
        }
    }

    /// Fills it completely, until not even a short line fits.
    fn fill(&self) {
        let mut file = File::from(open(&self.path, OFlags::WRONLY | OFlags::NONBLOCK));
        for piece in [4096, 1] {
            while file.write(&b"x".repeat(piece)).is_ok() {}
        }
    }
}

fn open(path: &Path, flags: OFlags) -> OwnedFd {
    let flags = flags | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}
