//! `spd-launch tail RUN`: follows the rows of a run, like `tail -f`.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use jiff::{Timestamp, Unit};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use spd_report::{State, Status};
use spd_tracker::{
    Cursor, Kind, METRICS, Mark, Read, ReadError, Reader, Row, SYSTEM, Start, system_files,
};
use spd_trainer::Fault;
use spd_trainer::networks::LEAKY;
use spd_trainer::run_file::Run;

use crate::cli::TailArgs;
use crate::exit::Exit;
use crate::progress::{activity, happened, l0, loss_and_l0};
use crate::run_dir::RunDir;
use crate::screen::{self, plain, result_columns};

/// Interval of reading rows.
const READ: Duration = Duration::from_millis(200);

/// Interval of checking the run's state.
const LOOK: Duration = Duration::from_secs(1);

/// Rows of phase and speed in which the last events are searched, about half a day.
const SYSTEM_ROWS: usize = 100_000;

/// Values in a row's line besides loss and L0.
const VALUES: usize = 6;

/// Prints the last rows of a run, then new ones, until the run is over or the output is closed.
///
/// # Errors
///
/// Bad input, when the run does not exist, unless `--wait` is given.
pub(crate) fn tail(asked: &TailArgs) -> Result<Exit, Fault> {
    let run_dir = RunDir::at(asked.run.clone());
    check(&run_dir, asked.wait)?;
    let mut tail = Tail {
        asked,
        run_dir: &run_dir,
        run: None,
        files: Vec::new(),
        told: Vec::new(),
    };
    let mut is_first = true;
    loop {
        // The last rows may have been written after the last read.
        let status = Status::of(run_dir.path());
        let is_over = match status.state {
            State::Running => false,
            State::Done => true,
            _ => !asked.wait,
        };
        tail.run = run_dir.run();
        let looked = Instant::now();
        while is_first || is_over || looked.elapsed() < LOOK {
            let mut new = tail.read();
            // Rows of one file keep their order; rows of different files are ordered by time, which
            // metrics have in milliseconds.
            let ms = |line: &Line| (1e3 * line.time).round();
            new.sort_by(|a, b| ms(a).total_cmp(&ms(b)));
            let before = if is_first {
                new.len().saturating_sub(asked.rows)
            } else {
                0
            };
            new[before..]
                .iter()
                .for_each(|line| screen::result(&line.text));
            is_first = false;
            if is_over {
                let note = status
                    .note
                    .map_or(String::new(), |note| format!(": {note}"));
                let place = run_dir.path().display();
                screen::end(&format!("{place} is {}{note}", status.state.name()));
                return Ok(Exit::Done);
            }
            if output_closes_within(READ) {
                return Ok(Exit::Done);
            }
        }
    }
}

fn check(run_dir: &RunDir, waits: bool) -> Result<(), Fault> {
    if run_dir.config().is_file() {
        return Ok(());
    }
    let place = run_dir.path().display();
    if run_dir.sweep().is_file() {
        return Err(Fault::BadInput(format!(
            "{place}: is the directory of a sweep; name one of its runs, like {}",
            run_dir.path().join("seed=0").display()
        )));
    }
    match run_dir.path().try_exists() {
        Ok(true) if !run_dir.path().is_dir() => Err(Fault::BadInput(format!(
            "{place}: expected a run directory, found a file"
        ))),
        _ if waits => Ok(()),
        Err(error) => Err(Fault::BadInput(format!("{place}: {error}"))),
        Ok(_) => Err(Fault::BadInput(format!(
            "{place}: not a run directory, as it has no config.toml; --wait waits for a run to begin there, `spd-launch runs` lists \
             those there are"
        ))),
    }
}

/// The followed files of a run.
struct Tail<'a> {
    asked: &'a TailArgs,
    run_dir: &'a RunDir,
    /// The run, once it can be read.
    run: Option<Run>,
    files: Vec<(String, Reader)>,
    /// Reading errors that were already reported.
    told: Vec<String>,
}

/// A printed line, with its time for sorting.
struct Line {
    time: f64,
    text: String,
}

impl Tail<'_> {
    /// Reads the new lines.
    fn read(&mut self) -> Vec<Line> {
        self.open();
        let mut lines = Vec::new();
        let mut problems = Vec::new();
        for (_, reader) in &mut self.files {
            // A rewritten row has the time of its first version, but keeps its position.
            let mut last = f64::MIN;
            loop {
                match reader.next() {
                    Ok(Some(Read::Row { row, time })) => {
                        last = last.max(time);
                        let text = text(&row, time, (self.asked, self.run.as_ref()));
                        lines.extend(text.map(|text| Line { time: last, text }));
                    }
                    Ok(Some(Read::RolledBack(start))) => {
                        last = last.max(start.time);
                        let text = rolled_back(&start, self.asked.json);
                        lines.push(Line { time: last, text });
                    }
                    Ok(None) => break,
                    Err(error @ ReadError::Junk { .. }) => problems.push(error),
                    // Tried again at the next read.
                    Err(error) => {
                        problems.push(error);
                        break;
                    }
                }
            }
        }
        problems.iter().for_each(|error| self.problem(error));
        lines
    }

    /// Opens files that appear; existing ones a few rows before their ends.
    fn open(&mut self) {
        let dir = self.run_dir.path();
        let mut names = vec![METRICS.to_owned(), SYSTEM.to_owned()];
        if self.asked.all {
            let machines = system_files(dir);
            names.extend(machines.into_iter().filter(|name| name != SYSTEM));
        }
        for name in names {
            if self.files.iter().any(|(known, _)| *known == name) {
                continue;
            }
            match open(dir, &name, self.asked) {
                Ok(reader) => self.files.push((name, reader)),
                Err(error) => self.problem(&error),
            }
        }
    }

    fn problem(&mut self, error: &ReadError) {
        let line = error.to_string();
        if !self.told.contains(&line) {
            screen::note(&line);
            self.told.push(line);
        }
    }
}

fn open(dir: &Path, name: &str, asked: &TailArgs) -> Result<Reader, ReadError> {
    if name == METRICS {
        return Reader::of_metrics(dir, &Cursor::before_last(dir, asked.rows)?);
    }
    // Few of its rows are shown, unless all are.
    let rows = if asked.all {
        asked.rows
    } else {
        asked.rows.max(SYSTEM_ROWS)
    };
    let path = dir.join(name);
    Reader::open(&path, &Mark::before_last(&path, rows)?)
}

/// The line of a row; rows of phase, speed and machines only with `--all`.
fn text(row: &Row, time: f64, (asked, run): (&TailArgs, Option<&Run>)) -> Option<String> {
    if row.kind == Kind::System && !asked.all {
        return None;
    }
    let text = match asked.json {
        true => serde_json::to_string(row).ok()?,
        false => {
            let clock = clock(time);
            let room = result_columns().map(|columns| columns.saturating_sub(clock.len() + 2));
            format!("{clock}  {}", words(row, run, room))
        }
    };
    Some(text + "\n")
}

/// A row in words, with as many values as fit into `columns`.
fn words(row: &Row, run: Option<&Run>, columns: Option<usize>) -> String {
    let step = row.step;
    let event = || happened(row).unwrap_or_else(|| format!("step {step}"));
    match row.kind {
        Kind::Event => event(),
        Kind::Alert => format!("alert  {}", event()),
        Kind::Train | Kind::Eval => {
            let kind = if row.kind == Kind::Train {
                "train"
            } else {
                "eval"
            };
            let groups = run.map_or(&[][..], |run| &run.eval.metrics.subsets.rows);
            let (loss, l0) = loss_and_l0(row.number("loss/total"), l0(row.numbers(), groups));
            let is_told = |name: &str| name == "loss/total" || name.contains("l0/");
            let values = row.numbers().filter(|(name, _)| !is_told(name));
            let short = |name: &str| {
                let name = name.strip_prefix("eval/").unwrap_or(name);
                plain(name.strip_prefix("loss/").unwrap_or(name))
            };
            let all: Vec<String> = values
                .map(|(name, value)| format!("{} {value:.3e}", short(name)))
                .collect();
            let told: Vec<String> = loss.into_iter().chain(l0).collect();
            let mut head = format!("step {step}  {kind}");
            if run.is_some_and(|run| run.target.allow_leak) {
                head += &format!(" {LEAKY}");
            }
            with_values(&head, &told, (&all, VALUES), columns)
        }
        Kind::System => {
            let note = row.note.as_deref().map(|phase| plain(activity(phase)));
            let values = row.numbers().filter(|(name, _)| *name != "time");
            let values = values.map(|(name, value)| format!("{} {value:.4}", plain(name)));
            let told: Vec<String> = note.into_iter().collect();
            let all: Vec<String> = values.collect();
            with_values(&format!("step {step}"), &told, (&all, all.len()), columns)
        }
    }
}

/// A line of the fixed parts and of at most `most` values, with the number of further ones;
/// truncated if even the fixed parts do not fit.
fn with_values(
    head: &str,
    told: &[String],
    (values, most): (&[String], usize),
    columns: Option<usize>,
) -> String {
    let line = |shown: usize| {
        let more = values.len() - shown;
        let more = (more > 0).then(|| format!("and {more} more"));
        let values = values[..shown].iter().cloned();
        let parts = told.iter().cloned().chain(values).chain(more);
        let parts = std::iter::once(head.to_owned()).chain(parts);
        parts.collect::<Vec<_>>().join("  ")
    };
    let most = most.min(values.len());
    let Some(columns) = columns else {
        return line(most);
    };
    let mut lines = (0..=most).rev().map(line);
    let fits = |line: &String| line.chars().count() <= columns;
    let found = lines.find(fits);
    found.unwrap_or_else(|| line(0).chars().take(columns).collect())
}

fn rolled_back(start: &Start, is_json: bool) -> String {
    let Start { step, time, .. } = start;
    if is_json {
        return format!(
            "{}\n",
            json!({"kind": "rolled_back", "step": step, "time": time})
        );
    }
    format!(
        "{}  the run was rolled back to step {step}: rows of later steps above are discarded, those below replace them\n",
        clock(*time)
    )
}

/// A unix time as in log lines; empty if invalid.
fn clock(time: f64) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "a float saturates")]
    let stamp = Timestamp::from_millisecond((time * 1e3) as i64);
    let second = stamp.and_then(|stamp| stamp.round(Unit::Second));
    match second {
        Ok(second) if time > 0.0 => second.to_string(),
        _ => "-".to_owned(),
    }
}

/// Waits, and returns whether the output has no reader any more: a closed pipe, or a terminal that
/// is gone.
fn output_closes_within(limit: Duration) -> bool {
    let stdout = io::stdout();
    let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
    let limit = Timespec::try_from(limit).ok();
    let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
    matches!(poll(&mut fds, limit.as_ref()), Ok(1..)) && fds[0].revents().intersects(gone)
}

#[cfg(test)]
mod tests {
    use spd_trainer::bench::{Overrides, preset};
    use spd_trainer::metrics::Subset;

    use super::*;

    #[test]
    fn a_row_is_a_line_with_its_main_values() {
        let row = Row::new(1200, Kind::Train)
            .with("loss/total", 0.0123)
            .with("l0/linear1", 1.25)
            .with("l0/linear2", 0.5)
            .with("loss/faithfulness", 1.5e-8)
            .with("lr", 1e-3);
        assert_eq!(
            words(&row, None, None),
            "step 1200  train  loss 1.230e-2  L0 1.75  faithfulness 1.500e-8  lr 1.000e-3"
        );
        let mut eval = Row::new(0, Kind::Eval).with("eval/l0/a", 2.0);
        for number in 0..9 {
            eval = eval.with(format!("eval/m{number}"), 1.0);
        }
        let line = words(&eval, None, None);
        assert!(
            line.starts_with("step 0  eval  L0 2.00  m0 1.000e0  m1 "),
            "{line}"
        );
        assert!(line.ends_with("m5 1.000e0  and 3 more"), "{line}");
        // Groups of sites are sums of sites.
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        run.target.allow_leak = true;
        run.eval.metrics.subsets.rows.push(Subset {
            name: "of_a".into(),
            sites: vec!["a".into()],
            all_but: Vec::new(),
            masked: false,
        });
        let of_group = eval.clone().with("eval/l0/of_a", 2.0);
        let line = words(&of_group, Some(&run), None);
        assert!(
            line.starts_with("step 0  eval LEAKY  L0 2.00  m0 "),
            "{line}"
        );
        // On a terminal a row is truncated to one line.
        for (columns, expected) in [
            (
                63,
                "step 0  eval  L0 2.00  m0 1.000e0  m1 1.000e0  and 7 more",
            ),
            (56, "step 0  eval  L0 2.00  m0 1.000e0  and 8 more"),
            (34, "step 0  eval  L0 2.00  and 9 more"),
            (20, "step 0  eval  L0 2.0"),
        ] {
            assert_eq!(words(&eval, None, Some(columns)), expected, "{columns}");
        }
        let system = Row::new(7, Kind::System)
            .with_note("train")
            .with("steps", 9.0)
            .with("steps_per_s", 0.0123);
        assert_eq!(
            words(&system, None, None),
            "step 7  decomposing  steps 9.0000  steps_per_s 0.0123"
        );
        assert_eq!(
            words(&system, None, Some(40)),
            "step 7  decomposing  and 2 more"
        );
    }

    #[test]
    fn events_are_shown_without_control_characters() {
        let event = Row::new(7, Kind::Event).with_note("went\u{1b}[2J on");
        assert_eq!(words(&event, None, Some(5)), "step 7: went [2J on");
        let alert = Row::new(7, Kind::Alert).with_note("look");
        assert_eq!(words(&alert, None, None), "alert  step 7: look");
    }

    #[test]
    fn an_invalid_time_is_not_shown() {
        assert_eq!(clock(1_795_255_200.25), "2026-11-21T10:00:00Z");
        for time in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert_eq!(clock(time), "-");
        }
    }
}
