//! A run of a sweep: its directory, its launcher process, and its results.

use std::ffi::OsString;
use std::fs;
use std::io::PipeWriter;
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Map, Value};
use spd_report::State;
use spd_trainer::Threads;
use spd_trainer::run_file::Run;

use super::axes::{self, Combination};
use crate::cli::RunArgs;
use crate::output::{Output, last_words};
use crate::progress::{Progress, SpoolReader, l0};
use crate::ranks::{Process, command, own_program};
use crate::run_dir::RunDir;
use crate::{stop, summary};

/// A run of a sweep.
pub(crate) struct Member {
    /// Swept keys and their values.
    pub(crate) values: Combination,
    /// The name of its directory.
    pub(crate) name: String,
    /// The resolved run.
    pub(crate) run: Run,
    /// Its directory.
    pub(crate) dir: RunDir,
    /// Its state; waiting means not started by this launch.
    pub(crate) state: State,
    /// Why it ended early, if it has failed.
    pub(crate) failure: Option<String>,
    /// `values` of its summary, once it is done.
    pub(crate) results: Map<String, Value>,
    /// Whether it found the known solution, and what that means, from its summary.
    pub(crate) solved: Option<(bool, String)>,
    launch_log: PathBuf,
    launch: Option<Launch>,
}

struct Launch {
    process: Process,
    output: Output,
    spool: SpoolReader,
    started: Instant,
}

impl Member {
    /// A run that has not started, in the directory `root` of its sweep.
    pub(crate) fn new(root: &RunDir, values: Combination, run: Run) -> Self {
        let name = axes::name(&values);
        Self {
            dir: RunDir::at(root.path().join(&name)),
            launch_log: root.logs().join(format!("{name}.log")),
            values,
            name,
            run,
            state: State::Waiting,
            failure: None,
            results: Map::new(),
            solved: None,
            launch: None,
        }
    }

    /// Starts this program on the prepared directory, in a child process.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub(crate) fn start(&mut self, asked: &RunArgs, threads: Threads) -> Result<()> {
        let log = &self.launch_log;
        let spool = SpoolReader::follow(&self.dir)?;
        let (output, writer) = Output::to_log(log).with_context(|| log.display().to_string())?;
        let process = self.process(asked, threads, writer)?;
        self.state = State::Running;
        self.launch = Some(Launch {
            process,
            output,
            spool,
            started: Instant::now(),
        });
        Ok(())
    }

    fn process(&self, asked: &RunArgs, threads: Threads, output: PipeWriter) -> Result<Process> {
        let program = own_program().context("cannot find this program's executable")?;
        let mut command = command(&program);
        // Makes a path that begins with a dash different from a flag.
        let with = |flag: &str, path: &Path| {
            let mut word = OsString::from(flag);
            word.push(path);
            word
        };
        command.arg(with("--out=", self.dir.path()));
        for (flag, value) in [
            ("--threads", threads.run.to_string()),
            ("--target-threads", threads.target.to_string()),
            ("--grace", asked.grace.to_string()),
            ("--restarts", asked.restarts.to_string()),
        ] {
            command.arg(flag).arg(value);
        }
        if let Some(seconds) = asked.hang_seconds {
            command.args(["--hang-seconds", &seconds.to_string()]);
        }
        // A continued run has the trackers of its first start in its file.
        for tracker in &asked.tracker {
            command.args(["--tracker", tracker.word()]);
        }
        if let Some(path) = &asked.rank_program {
            command.arg(with("--rank-program=", path));
        }
        // The resolved run in its directory, which was checked; the run file may have changed
        // since.
        command.arg("--").arg(self.dir.config());
        Process::start(command, Stdio::null(), output)
            .with_context(|| format!("{}: cannot be started", program.display()))
    }

    /// The file descriptor of its output, to poll while it runs.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.launch.as_ref()?.output.fd()
    }

    /// Its output, while it runs.
    pub(crate) fn output(&mut self) -> Option<&mut Output> {
        self.launch.as_mut().map(|launch| &mut launch.output)
    }

    /// Reads its new rows; returns its progress and events, while it runs.
    pub(crate) fn look(&mut self) -> Option<(&Progress, Vec<String>)> {
        let launch = self.launch.as_mut()?;
        let events = launch.spool.read();
        Some((&launch.spool.progress, events))
    }

    /// Asks it to save and exit.
    pub(crate) fn ask(&self) {
        if let Some(launch) = &self.launch {
            launch.process.ask();
        }
    }

    /// Kills it, and its rank with it.
    pub(crate) fn kill(&mut self) {
        if let Some(launch) = &mut self.launch {
            launch.process.kill();
            self.state = State::Stopped;
        }
        self.launch = None;
    }

    /// If it has just ended, updates its state and results, and returns how long it ran, and
    /// further events.
    ///
    /// # Errors
    ///
    /// When the operating system cannot say, or a finished run has no readable summary.
    pub(crate) fn ended(&mut self) -> Result<Option<(Duration, Vec<String>)>> {
        let Some(launch) = &mut self.launch else {
            return Ok(None);
        };
        let status = launch.process.ended();
        let Some(status) = status.with_context(|| format!("{}: cannot be watched", self.name))?
        else {
            return Ok(None);
        };
        let ran = launch.started.elapsed();
        let events = launch.spool.read();
        let lines = self.launch.take().map(|launch| launch.output.last_lines());
        match status.code() {
            Some(0) => {
                self.state = State::Done;
                self.read_results()?;
            }
            Some(3) => self.state = State::Stopped,
            _ => self.fail(self.cause(status, &lines.unwrap_or_default())),
        }
        Ok(Some((ran, events)))
    }

    /// Notes that it has failed, and why.
    pub(crate) fn fail(&mut self, cause: String) {
        (self.state, self.failure) = (State::Failed, Some(cause));
    }

    /// Reads the summary of a finished run.
    ///
    /// # Errors
    ///
    /// When there is none, or its form is unknown.
    pub(crate) fn read_results(&mut self) -> Result<()> {
        let summary = summary::json(&self.dir.summary())?;
        let values = summary.get("values").and_then(Value::as_object);
        self.results = values.cloned().unwrap_or_default();
        self.solved = summary.get("solved").and_then(|solved| {
            let found = solved.get("found")?.as_bool()?;
            Some((found, solved.get("means")?.as_str()?.to_owned()))
        });
        Ok(())
    }

    /// Active components of all sites at its end.
    pub(crate) fn l0(&self) -> Option<f64> {
        let numbers = self.results.iter();
        let numbers = numbers.filter_map(|(name, value)| Some((name.as_str(), value.as_f64()?)));
        l0(numbers, &self.run.eval.metrics.subsets.rows)
    }

    /// Why it ended early, and the path of its log.
    fn cause(&self, status: ExitStatus, lines: &[String]) -> String {
        let said = last_words(lines).map(|words| match words.split_once(") ") {
            // The number of the process is no longer useful.
            Some((who, what)) if who.starts_with("rank 0 (pid ") => what.to_owned(),
            _ => words.to_owned(),
        });
        let cause = said.unwrap_or_else(|| match (status.code(), status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, signal) => format!("killed by {}", stop::name(signal.unwrap_or(0))),
        });
        format!("{cause} ({})", self.log().display())
    }

    /// The log of its rank, or of its launcher if the rank has none.
    fn log(&self) -> PathBuf {
        let of_rank = self.dir.log(0);
        if is_file(&of_rank) {
            of_rank
        } else {
            self.launch_log.clone()
        }
    }
}

fn is_file(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0)
}
