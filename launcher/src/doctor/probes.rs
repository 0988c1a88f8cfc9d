//! `spd-launch doctor --deep`: probes a GPU in child processes of this program, each with a time
//! limit.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use spd_trainer::Fault;
use spd_trainer::cuda::{self, Probe};

use crate::cli::DoctorProbeArgs;
use crate::exit::Exit;
use crate::output::last_words;
use crate::ranks::{Process, command, own_program};
use crate::screen;
use crate::stop;

/// The probe that all others depend on.
const OPEN: &str = "open";

/// Lines of a process that are kept.
const LINES: usize = 50;

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeOutcome {
    Passed,
    Failed,
    /// It was killed at its time limit.
    Hung,
    /// It died of a signal that was not sent from here.
    Crashed,
    Skipped,
}

impl ProbeOutcome {
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
            _ if !opens => (ProbeOutcome::Skipped, "the GPU cannot be opened".to_owned()),
            Some(lacks) => (ProbeOutcome::Skipped, lacks),
            None => started(probe, gpu)
                .and_then(|commands| watch(commands, probe.limit()))
                .unwrap_or_else(|error| {
                    (ProbeOutcome::Failed, format!("cannot be started: {error}"))
                }),
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

/// A line of output for one probe.
fn line(name: &str, outcome: ProbeOutcome, took: Duration, said: &str) -> String {
    let (word, seconds) = (outcome.word(), took.as_secs_f64());
    format!("  {word:<7} {seconds:>6.1} s  {name:<9}  {said}\n")
}

/// The commands for the ranks of a probe, each with its standard input.
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
        command.args(["doctor-probe", probe.name, "--gpu", &gpu.to_string()]);
        command.args(["--rank", &rank.to_string()]);
        command.envs(probe.environment(rank));
        (command, input)
    });
    Ok(ranks.collect())
}

/// Starts processes and waits until all have exited, one has failed, or the limit is reached.
/// Returns the outcome and a description.
fn watch(commands: Vec<(Command, Stdio)>, limit: Duration) -> io::Result<(ProbeOutcome, String)> {
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
            (Some((rank, None)), _) => break (ProbeOutcome::Failed, rank, None),
            (Some((rank, Some(signal))), _) => {
                break (ProbeOutcome::Crashed, rank, Some(stop::name(signal)));
            }
            (None, None) => break (ProbeOutcome::Passed, 0, None),
            (None, Some(rank)) if start.elapsed() >= limit => {
                let killed = format!("killed after {} s", limit.as_secs_f64());
                break (ProbeOutcome::Hung, rank, Some(killed));
            }
            (None, Some(_)) => thread::sleep(LOOK_EVERY),
        }
    };
    ranks.iter_mut().for_each(|(process, _)| process.kill());
    let who = match outcome {
        ProbeOutcome::Passed => String::new(),
        _ if ranks.len() == 1 => String::new(),
        _ => format!("rank {rank}: "),
    };
    let (_, lines) = ranks.swap_remove(rank);
    let lines = lines.join().unwrap_or_default();
    let words = last_words(&lines).or(lines.last().map(String::as_str));
    let said: Vec<&str> = what.as_deref().into_iter().chain(words).collect();
    let said = match said[..] {
        [] => "no output".to_owned(),
        _ => said.join("; last output: "),
    };
    Ok((outcome, who + &said))
}

/// The last lines of a process, once all writers have closed its pipe.
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

/// `spd-launch doctor-probe`: runs one rank of a probe in this process.
///
/// # Errors
///
/// When the probe is unknown or fails.
pub(crate) fn probe(asked: &DoctorProbeArgs) -> Result<Exit, Fault> {
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

    fn watched(scripts: &[&str], limit: Duration) -> (ProbeOutcome, String) {
        let commands = scripts.iter().map(|script| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            (command, Stdio::null())
        });
        watch(commands.collect(), limit).unwrap()
    }

    #[test]
    fn the_process_that_decides_is_named_with_its_last_output() {
        use ProbeOutcome::{Crashed, Failed, Hung, Passed};
        let [long, short] = [60, 5].map(Duration::from_secs);
        for (scripts, limit, outcome, said) in [
            (&["echo a; echo found; echo"][..], long, Passed, "found"),
            (
                &["echo 'error: wrong'; echo a note; exit 1"],
                long,
                Failed,
                "wrong",
            ),
            (&["exit 7"], long, Failed, "no output"),
            (
                &["echo here; kill -SEGV $$"],
                long,
                Crashed,
                "SIGSEGV; last output: here",
            ),
            (
                &["echo here; sleep 600 & sleep 600"],
                short,
                Hung,
                "killed after 5 s; last output: here",
            ),
            // The others are not waited for.
            (
                &["sleep 600", "echo no; exit 1"],
                long,
                Failed,
                "rank 1: no",
            ),
            (&["echo one", "echo other"], long, Passed, "one"),
            (
                &["true", "sleep 600"],
                short,
                Hung,
                "rank 1: killed after 5 s",
            ),
        ] {
            let expected = (outcome, said.to_owned());
            assert_eq!(watched(scripts, limit), expected, "{scripts:?}");
        }
    }

    #[test]
    fn a_row_has_outcome_seconds_name_and_output() {
        let row = line(
            "mma",
            ProbeOutcome::Crashed,
            Duration::from_millis(12_340),
            "SIGABRT",
        );
        assert_eq!(row, "  crashed   12.3 s  mma        SIGABRT\n");
    }
}
