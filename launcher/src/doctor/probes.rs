//! `spd-launch doctor --deep`: probes of a GPU, each in processes of its own, which are this program again, and with a limit.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use spd_trainer::Fault;
use spd_trainer::cuda::{self, Probe};

use crate::cli::ProbeArgs;
use crate::exit::Exit;
use crate::output::last_words;
use crate::ranks::{Process, command, own_program};
use crate::screen;
use crate::stop;

/// The probe that all further ones need.
const OPEN: &str = "open";

/// Lines of a process that are kept.
const LINES: usize = 50;

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What became of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// It was killed at its limit.
    Hung,
    /// A signal ended it that was not sent from here.
    Crashed,
    Skipped,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "ok",
            Self::Failed => "failed",
            Self::Hung => "hung",
            Self::Crashed => "crashed",
            Self::Skipped => "skipped",
        }
    }

    fn is_bad(self) -> bool {
        matches!(self, Self::Failed | Self::Hung | Self::Crashed)
    }
}

/// Runs every probe, and prints a line as each ends.
pub(super) fn deep(gpu: usize) -> Exit {
    if let Some(lacks) = cuda::lacks(gpu.saturating_add(1), false) {
        screen::result(&format!("\nGPU {gpu} cannot be probed: {lacks}.\n"));
        return Exit::Failed;
    }
    screen::result(&format!("\nProbes of GPU {gpu}:\n"));
    let (mut bad, mut opens) = (0, true);
    let probes = cuda::all_probes();
    for probe in &probes {
        let start = Instant::now();
        let (outcome, said) = match probe.lacks() {
            _ if !opens => (Outcome::Skipped, "the GPU cannot be opened".to_owned()),
            Some(lacks) => (Outcome::Skipped, lacks),
            None => started(probe, gpu)
                .and_then(|commands| watch(commands, probe.limit()))
                .unwrap_or_else(|error| (Outcome::Failed, format!("cannot be started: {error}"))),
        };
        screen::result(&line(probe.name, outcome, start.elapsed(), &said));
        bad += usize::from(outcome.is_bad());
        opens &= probe.name != OPEN || !outcome.is_bad();
    }
    if bad > 0 {
        screen::result(&format!("{bad} of {} probes failed.\n", probes.len()));
        return Exit::Failed;
    }
    screen::result("No probe failed.\n");
    Exit::Done
}

/// A row of the table.
fn line(name: &str, outcome: Outcome, took: Duration, said: &str) -> String {
    let (word, seconds) = (outcome.word(), took.as_secs_f64());
    format!("  {word:<7} {seconds:>6.1} s  {name:<9}  {said}\n")
}

/// What starts the ranks of a probe, each with its standard input.
fn started(probe: &Probe, gpu: usize) -> io::Result<Vec<(Command, Stdio)>> {
    let program = own_program()?;
    let inputs = if probe.ranks == 1 {
        vec![Stdio::null()]
    } else {
        let (one, other) = UnixStream::pair()?;
        [one, other].map(|end| OwnedFd::from(end).into()).into()
    };
    let ranks = inputs.into_iter().enumerate().map(|(rank, input)| {
        let mut command = command(&program);
        command.args(["probe", probe.name, "--gpu", &gpu.to_string()]);
        command.args(["--rank", &rank.to_string()]);
        command.envs(probe.environment(rank));
        (command, input)
    });
    Ok(ranks.collect())
}

/// Starts processes and waits until all are done, one ends badly, or the limit comes; what became of them, and what was said of it.
fn watch(commands: Vec<(Command, Stdio)>, limit: Duration) -> io::Result<(Outcome, String)> {
    let start = Instant::now();
    let mut ranks = Vec::new();
    for (command, input) in commands {
        let (reader, writer) = io::pipe()?;
        let process = Process::start(command, input, writer)?;
        ranks.push((process, thread::spawn(move || lines(reader))));
    }
    let (outcome, rank, what) = loop {
        let (mut runs, mut ended) = (None, None);
        for (rank, (process, _)) in ranks.iter_mut().enumerate() {
            match process.ended()? {
                None => runs = runs.or(Some(rank)),
                Some(status) if status.success() => {}
                Some(status) => ended = ended.or(Some((rank, status.signal()))),
            }
        }
        match (ended, runs) {
            (Some((rank, None)), _) => break (Outcome::Failed, rank, None),
            (Some((rank, Some(signal))), _) => {
                break (Outcome::Crashed, rank, Some(stop::name(signal)));
            }
            (None, None) => break (Outcome::Passed, 0, None),
            (None, Some(rank)) if start.elapsed() >= limit => {
                let killed = format!("killed after {} s", limit.as_secs_f64());
                break (Outcome::Hung, rank, Some(killed));
            }
            (None, Some(_)) => thread::sleep(LOOK_EVERY),
        }
    };
    ranks.iter_mut().for_each(|(process, _)| process.kill());
    let who = match outcome {
        Outcome::Passed => String::new(),
        _ if ranks.len() == 1 => String::new(),
        _ => format!("rank {rank}: "),
    };
    let (_, lines) = ranks.swap_remove(rank);
    let lines = lines.join().unwrap_or_default();
    let words = last_words(&lines).or(lines.last().map(String::as_str));
    let said: Vec<&str> = what.as_deref().into_iter().chain(words).collect();
    let said = match said[..] {
        [] => "it said nothing".to_owned(),
        _ => said.join("; its last words: "),
    };
    Ok((outcome, who + &said))
}

/// The last lines of a process, once nothing writes to its pipe any more.
fn lines(reader: PipeReader) -> Vec<String> {
    let mut lines = Vec::new();
    for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
        let line = screen::plain(String::from_utf8_lossy(&line).trim());
        if !line.is_empty() {
            lines.push(line);
        }
        if lines.len() > LINES {
            lines.remove(0);
        }
    }
    lines
}

/// `spd-launch probe`: one rank of a probe, in this process.
///
/// # Errors
///
/// When the probe is not known, or found something wrong.
pub(crate) fn probe(asked: &ProbeArgs) -> Result<Exit, Fault> {
    let all = cuda::all_probes();
    let known = all.iter().find(|probe| probe.name == asked.name);
    let probe = known.ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|probe| probe.name).collect();
        let (name, names) = (&asked.name, names.join(", "));
        Fault::BadInput(format!("probe {name}: not known; there are {names}"))
    })?;
    let found = cuda::ask(probe, asked.gpu, asked.rank)?;
    screen::result(&format!("{found}\n"));
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(scripts: &[&str], limit: Duration) -> (Outcome, String) {
        let commands = scripts.iter().map(|script| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            (command, Stdio::null())
        });
        watch(commands.collect(), limit).unwrap()
    }

    #[test]
    fn what_became_of_a_process_is_told_with_its_last_words() {
        let long = Duration::from_secs(60);
        let told = |script| watched(&[script], long);
        assert_eq!(
            told("echo a; echo found; echo"),
            (Outcome::Passed, "found".to_owned())
        );
        assert_eq!(
            told("echo 'error: wrong'; echo a note; exit 1"),
            (Outcome::Failed, "wrong".to_owned())
        );
        assert_eq!(
            told("exit 7"),
            (Outcome::Failed, "it said nothing".to_owned())
        );
        assert_eq!(
            told("echo here; kill -SEGV $$"),
            (Outcome::Crashed, "SIGSEGV; its last words: here".to_owned())
        );
        assert_eq!(
            watched(
                &["echo here; sleep 600 & sleep 600"],
                Duration::from_millis(500)
            ),
            (
                Outcome::Hung,
                "killed after 0.5 s; its last words: here".to_owned()
            )
        );
    }

    // Who ends badly is named, and the others are not waited for.
    #[test]
    fn of_several_the_one_that_ends_badly_first_counts() {
        let long = Duration::from_secs(60);
        assert_eq!(
            watched(&["sleep 600", "echo no; exit 1"], long),
            (Outcome::Failed, "rank 1: no".to_owned())
        );
        assert_eq!(
            watched(&["echo one", "echo other"], long),
            (Outcome::Passed, "one".to_owned())
        );
        assert_eq!(
            watched(&["true", "sleep 600"], Duration::from_millis(300)),
            (Outcome::Hung, "rank 1: killed after 0.3 s".to_owned())
        );
    }

    #[test]
    fn a_row_has_outcome_seconds_name_and_what_was_found() {
        let row = line(
            "mma",
            Outcome::Crashed,
            Duration::from_millis(12_340),
            "SIGABRT",
        );
        assert_eq!(row, "  crashed   12.3 s  mma        SIGABRT\n");
    }
}
