//! The state of a run, from its directory: the holder of its lock, its summary, the last line of
//! its launcher, and its last rows. The page, lists of runs, and the commands that follow or stop
//! one share it.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use spd_checkpoint::{Holder, Lock, newest_step};
use spd_tracker::{Kind, LastRows, METRICS, Row, SYSTEM, now, system_files};

use crate::figures::text;
use crate::run::{TRAIN, whole};
use crate::settings::{CONFIG, LARGEST, Settings, settings};

/// Age in seconds of the newest row of a run that counts as running if its lock cannot be seen: its
/// launcher writes a row every 15.
const LATELY: f64 = 60.0;

/// Seconds without a row after which a run is called silent.
const SILENT: f64 = 60.0;

/// Rows at the end of a run that may include the one about its stop.
const WHERE_IT_STOPS: usize = 32;

/// Most letters of the note of a [`LastWord`]: a lock file holds little.
const LONGEST_NOTE: usize = 600;

/// Phases between two steps of another one.
const LOOKS: [&str; 3] = ["eval", "figures", "saving"];

/// The state of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Made, and not started.
    #[default]
    Waiting,
    /// Its launcher is alive.
    Running,
    /// Stopped on request. The same command resumes it.
    Stopped,
    /// Ended by an error.
    Failed,
    /// Its launcher is gone without a message.
    Killed,
    /// Finished.
    Done,
}

impl State {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Killed => "killed",
            Self::Done => "done",
        }
    }
}

/// The line that a launcher leaves in the lock file when the run is over. It keeps the lock until
/// the page is made and trackers are done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastWord {
    /// The outcome of the run, or of the launch.
    pub state: State,
    /// The first line of its message.
    #[serde(default)]
    pub note: String,
    /// Start and end of the launch, in seconds since 1970.
    pub began: f64,
    /// See `began`.
    pub ended: f64,
}

impl LastWord {
    /// As a line; a note that is too long is cut.
    pub fn line(&self) -> String {
        let mut short = self.clone();
        short.note = self.note.chars().take(LONGEST_NOTE).collect();
        serde_json::to_string(&short).expect("words and numbers are JSON")
    }

    /// The line of the last holder of the lock, if it left one.
    pub(crate) fn of(holder: &Holder) -> Option<Self> {
        serde_json::from_str(holder.word.as_ref()?).ok()
    }
}

/// The state of a run, with its progress.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// Its directory.
    pub path: PathBuf,
    /// Its state.
    pub state: State,
    /// A remark on the state for the user.
    pub note: Option<String>,
    /// Its name and the kind of its target, from its `config.toml`.
    pub name: Option<String>,
    /// See `name`.
    pub target: Option<String>,
    /// Whether that is a network whose logits depend on later tokens, from its `config.toml`.
    pub leaky: bool,
    /// Its phase; empty before the first row.
    pub phase: String,
    /// Finished and planned steps of the phase, if it counts steps of its own.
    pub of_phase: Option<(u64, u64)>,
    /// Finished and planned steps of the run.
    pub step: u64,
    /// See `step`.
    pub steps: Option<u64>,
    /// Steps a second of the phase, while it runs.
    pub steps_per_s: Option<f64>,
    /// The total loss of the last row of training.
    pub loss: Option<f64>,
    /// Start of the newest launch, in seconds since 1970.
    pub began: Option<f64>,
    /// Time of its newest row or message.
    pub heard: Option<f64>,
    /// Duration of the newest launch in seconds, up to now if it runs.
    pub seconds: Option<f64>,
    /// Step of its newest checkpoint.
    pub saved: Option<u64>,
    /// The process that has the lock of its launcher, or had it.
    pub holder: Option<Holder>,
    /// Whether it is over and its launcher still makes the page, or ships rows.
    pub is_leaving: bool,
    /// A line for each file that could not be read.
    pub problems: Vec<String>,
}

/// The last rows of a run.
#[derive(Default)]
struct Told {
    /// Time of the last row.
    last: Option<f64>,
    /// Time and text of its stop on request, if that is its last event.
    stopped: Option<(f64, String)>,
}

impl Status {
    /// The state of the run in a directory. A file that cannot be read is a problem; the rest is
    /// still read.
    pub fn of(dir: &Path) -> Self {
        let config = text(&dir.join(CONFIG), LARGEST);
        Self::with(dir, &settings(&config.unwrap_or_default()))
    }

    /// The same with the settings of the run, which were read before.
    pub(crate) fn with(dir: &Path, settings: &Settings) -> Self {
        let mut status = Self::waiting(dir);
        status.saved = newest_step(&dir.join("checkpoints"));
        status.describe(settings);
        let told = status.read_rows();
        match Lock::holder(&dir.join("logs")) {
            Ok(holder) => status.holder = holder,
            Err(error) => status.problems.push(error.to_string()),
        }
        status.decide(told, now());
        status
    }

    /// The state of a run without a directory.
    pub(crate) fn waiting(dir: &Path) -> Self {
        Self {
            path: dir.to_path_buf(),
            ..Self::default()
        }
    }

    /// Seconds until the end of the phase, at the current speed.
    pub fn seconds_left(&self) -> Option<f64> {
        let (step, steps) = self.of_phase.or(Some((self.step, self.steps?)))?;
        let speed = self.steps_per_s.filter(|speed| *speed > 0.0)?;
        let left = steps.saturating_sub(step) as f64 / speed;
        left.is_finite().then_some(left)
    }

    fn describe(&mut self, settings: &Settings) {
        if settings.is_empty() {
            let path = self.path.join(CONFIG);
            self.problems
                .push(format!("{}: is not a readable run file", path.display()));
        }
        let value = |key: &str| {
            let found = settings.iter().find(|(known, _)| known == key);
            found.map(|(_, value)| value.clone())
        };
        self.name = value("name");
        self.target = value("target.kind");
        self.leaky = value("target.allow_leak").as_deref() == Some("true");
        self.steps = value("train.steps").and_then(|steps| steps.parse().ok());
    }

    /// Reads the last rows.
    fn read_rows(&mut self) -> Told {
        self.loss = self.find(METRICS, |row| row.number("loss/total"));
        let (mut told, mut is_first, mut rows) = (Told::default(), true, 0);
        // The last row with a phase, and the last one with steps.
        let (mut doing, mut counted) = (None, None);
        self.find::<()>(SYSTEM, |row| {
            rows += 1;
            let time = row.number("time");
            told.last = told.last.or(time);
            let note = row.note.clone().unwrap_or_default();
            match row.kind {
                Kind::System if row.note.is_some() => {
                    doing.get_or_insert((note, row.step));
                    if counted.is_none() && row.number("steps") > Some(0.0) {
                        counted = Some(row);
                    }
                }
                // Only if it is the last event.
                Kind::Event | Kind::Alert if is_first => {
                    is_first = false;
                    let is_stop = row.number("stopped").is_some();
                    told.stopped = time.filter(|_| is_stop).map(|time| (time, note));
                }
                _ => {}
            }
            (counted.is_some() && (!is_first || rows >= WHERE_IT_STOPS)).then_some(())
        });
        for name in system_files(&self.path) {
            let heard = self.find(&name, |row| row.number("time"));
            let all = self.heard.into_iter().chain(heard);
            self.heard = all.max_by(f64::total_cmp);
        }
        self.step = self.saved.unwrap_or(0);
        if let Some((phase, step)) = doing {
            let is_look = LOOKS.contains(&phase.as_str());
            // The steps of an earlier launch, if this one has not come as far.
            let counted = counted.filter(|row| is_look || row.note.as_ref() == Some(&phase));
            let of_run = counted
                .as_ref()
                .is_none_or(|row| row.note.as_deref() == Some(TRAIN));
            if of_run && (is_look || phase == TRAIN) {
                // Rows of progress are several steps apart.
                self.step = self.step.max(step);
            }
            self.phase = phase;
            if let Some(row) = counted {
                self.steps_per_s = row.number("steps_per_s").filter(|speed| *speed > 0.0);
                if !of_run {
                    let steps = row.number("steps").and_then(whole);
                    self.of_phase = steps.map(|steps| (row.step, steps));
                    self.phase = row.note.unwrap_or_default();
                }
            }
        }
        told
    }

    /// The result of the last row that gives one.
    fn find<T>(&mut self, name: &str, mut give: impl FnMut(Row) -> Option<T>) -> Option<T> {
        let path = self.path.join(name);
        let mut refused = None;
        let rows = match LastRows::of(&path) {
            Ok(rows) => rows,
            Err(found) => {
                self.problem(format!("{}: {found}", path.display()));
                return None;
            }
        };
        let mut is_any = false;
        for row in rows {
            match row.map(&mut give) {
                Ok(Some(given)) => return Some(given),
                Ok(None) => is_any = true,
                Err(found) => refused = refused.or(Some(found)),
            }
        }
        if let Some(found) = refused.filter(|_| !is_any) {
            self.problem(format!("{}: no row can be read: {found}", path.display()));
        }
        None
    }

    fn problem(&mut self, line: String) {
        if !self.problems.contains(&line) {
            self.problems.push(line);
        }
    }

    /// Decides the state.
    fn decide(&mut self, told: Told, now: f64) {
        let holder = self.holder.clone().unwrap_or_default();
        let taken = holder.written.and_then(unix);
        let word = LastWord::of(&holder);
        let age = self.heard.map(|heard| now - heard);
        let is_elsewhere = holder
            .host
            .as_deref()
            .is_some_and(|host| host != Lock::host());
        let at = match &holder.host {
            Some(host) if is_elsewhere => format!(" on {host}"),
            _ => String::new(),
        };
        let goes_on = || match self.saved {
            Some(step) => format!("the same command goes on from step {step}"),
            None => "the same command begins again".to_owned(),
        };
        let had_begun =
            self.heard.is_some() || !self.phase.is_empty() || self.path.join(METRICS).is_file();
        let (state, note) = if self.path.join("summary.json").is_file() {
            (State::Done, None)
        } else if holder.is_held && word.is_none() {
            let silent = told.last.map(|last| now - last).filter(|age| *age > SILENT);
            let silent = silent.map(|age| format!("silent for {}", lasting(age)));
            let place = is_elsewhere.then(|| format!("it runs{at}"));
            let notes: Vec<String> = place.into_iter().chain(silent).collect();
            (
                State::Running,
                (!notes.is_empty()).then(|| notes.join("; ")),
            )
        } else if let Some(word) = word.as_ref().filter(|word| word.state != State::Done) {
            let note = match word.note.as_str() {
                "" => goes_on(),
                note => note.to_owned(),
            };
            (word.state, Some(note))
        } else if word.is_some() {
            let note = "its summary.json is gone; the same command makes it again";
            (State::Stopped, Some(note.to_owned()))
        } else if is_elsewhere && age.is_some_and(|age| age < LATELY) {
            let note = format!("it seems to run{at}; its lock cannot be seen from here");
            (State::Running, Some(note))
        } else if let Some((_, note)) = told
            .stopped
            .filter(|(time, _)| taken.is_none_or(|taken| *time >= taken))
        {
            (State::Stopped, Some(note))
        } else if !had_begun {
            (State::Waiting, None)
        } else {
            let who = match holder.pid {
                Some(pid) => format!("its launcher (process {pid}{at})"),
                None => "its launcher".to_owned(),
            };
            let note = format!(
                "{who} exited without a message: it was killed, or its machine went down; {}",
                goes_on()
            );
            (State::Killed, Some(note))
        };
        self.is_leaving = holder.is_held && state != State::Running;
        self.began = word.as_ref().map(|word| word.began).or(taken);
        let until = match state {
            State::Running => Some(now),
            _ => word.map(|word| word.ended).or(self.heard),
        };
        let seconds = until.zip(self.began).map(|(until, began)| until - began);
        self.seconds = seconds.filter(|seconds| *seconds >= 0.0);
        if state == State::Waiting {
            (self.began, self.seconds) = (None, None);
        }
        if state != State::Running {
            self.steps_per_s = None;
        }
        (self.state, self.note) = (state, note);
    }
}

/// A duration: `90 s`, `5 min`, `3 h`, `2 days`.
pub fn lasting(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    match seconds {
        ..100.0 => format!("{seconds:.0} s"),
        ..6000.0 => format!("{:.0} min", seconds / 60.0),
        ..172_800.0 => format!("{:.1} h", seconds / 3600.0),
        _ => format!("{:.0} days", seconds / 86_400.0),
    }
}

fn unix(time: SystemTime) -> Option<f64> {
    let since = time.duration_since(UNIX_EPOCH).ok()?;
    Some(since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_in_its_usual_unit() {
        for (seconds, told) in [
            (-5.0, "0 s"),
            (0.4, "0 s"),
            (99.0, "99 s"),
            (100.0, "2 min"),
            (5_900.0, "98 min"),
            (6_000.0, "1.7 h"),
            (172_799.0, "48.0 h"),
            (259_200.0, "3 days"),
        ] {
            assert_eq!(lasting(seconds), told);
        }
    }
}
