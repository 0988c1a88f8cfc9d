//! The progress of a run: its rows, read from the spool and shown on one line of the screen.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use indicatif::HumanDuration;
use spd_tracker::{Cursor, Kind, Mark, Read, ReadError, Reader, Row};
use spd_trainer::metrics::Subset;
use spd_trainer::networks::LEAKY;

use crate::run_dir::RunDir;
use crate::screen::{self, plain};
use crate::threads;
use crate::wait::wait_until;

/// Interval of progress lines where there is no terminal.
pub(crate) const LINE_EVERY: Duration = Duration::from_secs(10);

/// Progress lines of a command, one in each [interval](LINE_EVERY) at most.
pub(crate) struct Lines(Mutex<Instant>);

impl Default for Lines {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl Lines {
    /// Says the line, if it is time for one.
    pub(crate) fn say(&self, line: impl FnOnce() -> String) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if said.elapsed() >= LINE_EVERY {
            *said = Instant::now();
            screen::note(&line());
        }
    }
}

/// The time that work still takes of which so much is done, of so much, in words.
pub(crate) fn left((done, all): (u64, u64), elapsed: Duration) -> String {
    let left = elapsed.mul_f64((all - done) as f64 / done.max(1) as f64);
    format!("{} left", HumanDuration(left))
}

/// The latest known state of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Progress {
    /// The phase, as in the spool; empty before the first row.
    phase: String,
    /// Finished steps of the phase.
    step: u64,
    /// Steps of the phase; 0 if it does not count them.
    steps: u64,
    steps_per_s: f64,
    /// Total loss and number of active components in the last training row.
    loss: Option<f64>,
    l0: Option<f64>,
    /// Whether its target sees later tokens, which stands beside the loss.
    leaks: bool,
}

impl Progress {
    /// Updates the state from a row; returns the row's message for the user, if any.
    fn take(&mut self, row: &Row) -> Option<String> {
        let note = row.note.as_deref().map(plain);
        match row.kind {
            Kind::Train => {
                self.loss = row.number("loss/total").or(self.loss);
                self.l0 = l0(row.numbers(), &[]).or(self.l0);
                None
            }
            Kind::System => {
                self.phase = note?;
                self.step = row.step;
                self.steps = row.number("steps").map_or(0, whole);
                self.steps_per_s = row.number("steps_per_s").unwrap_or(0.0);
                None
            }
            // The last message of a launch is for a parent launcher.
            Kind::Event if row.number("stopped").is_some() => None,
            Kind::Event | Kind::Alert => happened(row),
            Kind::Eval => None,
        }
    }

    /// The state as a live line of at most `columns` characters. If it is too long, parts are left
    /// out, the bar first; loss and speed go last.
    pub(crate) fn live(&self, columns: usize) -> String {
        const LEFT_OUT: [usize; 5] = [1, 6, 4, 0, 2];
        let [loss, l0, speed, left] = self.numbers().map(Option::unwrap_or_default);
        let (bar, step) = match self.steps {
            0 => (String::new(), String::new()),
            steps => (bar(self.step, steps), format!("{}/{steps}", self.step)),
        };
        let activity = format!("{:>15}", self.activity());
        let parts = [activity, bar, step, loss, l0, speed, left];
        let line = |count: usize| {
            let mut line = String::new();
            for (number, part) in parts.iter().enumerate() {
                if !part.is_empty() && !LEFT_OUT[..count].contains(&number) {
                    let gap = if number < 2 { " " } else { "  " };
                    line.extend([part, gap]);
                }
            }
            line.truncate(line.trim_end().len());
            line
        };
        let mut lines = (0..LEFT_OUT.len()).map(line);
        let fits = |line: &String| line.chars().count() <= columns;
        lines.find(fits).unwrap_or_else(|| line(LEFT_OUT.len()))
    }

    /// The activity, in a word or two.
    pub(crate) fn activity(&self) -> &str {
        activity(&self.phase)
    }

    /// Loss, L0, speed and remaining time, as far as known.
    fn numbers(&self) -> [Option<String>; 4] {
        let (loss, l0) = loss_and_l0(self.loss, self.l0);
        let said = |loss| match self.leaks {
            true => format!("{LEAKY} {loss}"),
            false => loss,
        };
        // A phase without counted steps has neither speed nor a known end.
        let speed = Some(self.steps_per_s);
        let speed = speed.filter(|speed| self.steps > 0 && speed.is_finite() && *speed > 0.0);
        let left = speed.and_then(|speed| {
            let seconds = self.steps.saturating_sub(self.step) as f64 / speed;
            let left = Duration::try_from_secs_f64(seconds.ceil()).ok()?;
            Some(format!("{} left", HumanDuration(left)))
        });
        [loss.map(said), l0, speed.map(pace), left]
    }

    /// The whole state, as a separate line.
    pub(crate) fn line(&self) -> String {
        let step = match self.steps {
            0 => String::new(),
            steps => format!("step {}/{steps}", self.step),
        };
        let parts = [self.activity().to_owned(), step].into_iter();
        let parts = parts.chain(self.numbers().into_iter().flatten());
        let parts: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
        parts.join("  ")
    }
}

/// The message of a row for the user, if it has one.
pub(crate) fn happened(row: &Row) -> Option<String> {
    let note = row.note.as_deref().map(plain)?;
    Some(format!("step {}: {note}", row.step))
}

/// Active components of all sites, from numbers with one for each site. L0 of `groups` of sites is
/// left out: it counts sites twice.
pub(crate) fn l0<'a>(
    numbers: impl Iterator<Item = (&'a str, f64)>,
    groups: &[Subset],
) -> Option<f64> {
    let is_l0 = |name: &str| {
        let name = name.strip_prefix("eval/").unwrap_or(name);
        let site = name.strip_prefix("l0/");
        site.is_some_and(|site| groups.iter().all(|group| group.name != site))
    };
    let mut l0 = numbers.filter(|(name, _)| is_l0(name)).peekable();
    l0.peek()?;
    Some(l0.map(|(_, value)| value).sum())
}

/// Loss and L0 as text, as far as known.
pub(crate) fn loss_and_l0(loss: Option<f64>, l0: Option<f64>) -> (Option<String>, Option<String>) {
    let loss = loss.map(|loss| format!("loss {loss:.3e}"));
    (loss, l0.map(|l0| format!("L0 {l0:.2}")))
}

/// A speed as text; for slow steps, the time of one.
pub(crate) fn pace(steps_per_s: f64) -> String {
    if steps_per_s < 1.0 {
        format!("{:.1} s/step", 1.0 / steps_per_s)
    } else {
        format!("{steps_per_s:.1} steps/s")
    }
}

/// The activity of a phase, in a word or two.
pub(crate) fn activity(phase: &str) -> &str {
    match phase {
        "" => "starting",
        "data" => "checking data",
        "planning" => "planning",
        "wait" => "waiting for target",
        "target" => "training target",
        "warmup" => "warming up",
        "train" => "decomposing",
        "eval" => "evaluating",
        "figures" => "drawing figures",
        "ladder" => "climbing",
        "saving" => "saving",
        other => other,
    }
}

/// The position of a rank for a message, like `after step 120 (decomposing)`. It may have advanced
/// since its last heartbeat.
pub(crate) fn place(phase: &str, step: u64) -> String {
    let doing = activity(phase);
    match (phase, step) {
        ("", _) => "while it started".to_owned(),
        ("data", _) => "while it checked its data".to_owned(),
        ("planning", _) => "while it planned its programs".to_owned(),
        ("wait", _) => "while it waited for its target".to_owned(),
        (_, 0) => format!("at the beginning ({doing})"),
        ("warmup", made) => format!("after update {made} ({doing})"),
        (_, step) => format!("after step {step} ({doing})"),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "steps are counted far below 2^53"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

/// Reads the two spool files of a run as they grow.
pub(crate) struct SpoolReader {
    files: [Reader; 2],
    /// The latest known state.
    pub(crate) progress: Progress,
}

impl SpoolReader {
    /// Follows rows that are written from now on.
    ///
    /// # Errors
    ///
    /// When an existing file cannot be read.
    pub(crate) fn follow(run_dir: &RunDir) -> Result<Self, ReadError> {
        let system = Reader::open(&run_dir.system(), &Mark::default())?;
        let metrics = Reader::of_metrics(run_dir.path(), &Cursor::default())?;
        let files = [system, metrics];
        let mut spool = Self {
            files,
            progress: Progress::default(),
        };
        spool.read();
        let leaks = run_dir.run().is_some_and(|run| run.target.allow_leak);
        Ok(Self {
            progress: Progress {
                leaks,
                ..Progress::default()
            },
            ..spool
        })
    }

    /// Reads new rows; returns their messages for the user.
    pub(crate) fn read(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        for file in &mut self.files {
            loop {
                match file.next() {
                    Ok(Some(Read::Row { row, .. })) => events.extend(self.progress.take(&row)),
                    Ok(Some(Read::RolledBack(_))) | Err(ReadError::Junk { .. }) => {}
                    // A file that cannot be read now may be readable later; until then nothing is
                    // shown.
                    Ok(None) | Err(_) => break,
                }
            }
        }
        events
    }
}

/// Follows a run's rows and shows them on its own thread, so that a stuck disk stops only the
/// display.
pub(crate) struct Follower {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Follower {
    /// Starts showing rows that are written from now on.
    ///
    /// # Errors
    ///
    /// When the thread cannot start.
    pub(crate) fn start(mut spool: SpoolReader) -> io::Result<Self> {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let thread = threads::spawn("progress", move || {
            let mut display = Display::new();
            loop {
                // The last rows may have been written after the last read.
                let is_last = over.load(Ordering::Acquire);
                spool
                    .read()
                    .iter()
                    .for_each(|event| screen::progress(event));
                if is_last {
                    return;
                }
                display.show(&spool.progress);
                thread::park_timeout(READ);
            }
        })?;
        Ok(Self { is_over, thread })
    }
}

impl Drop for Follower {
    /// Shows the last rows, unless the disk is stuck.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        self.thread.thread().unpark();
        wait_until(TIMEOUT, || self.thread.is_finished());
    }
}

/// Interval of reads.
const READ: Duration = Duration::from_millis(200);

/// How long to wait for the last rows.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Shows progress: a live line on a terminal, periodic lines elsewhere.
struct Display {
    is_live: bool,
    last_line: Option<(String, Instant)>,
}

impl Display {
    /// A display on stderr.
    fn new() -> Self {
        Self {
            is_live: screen::is_live(),
            last_line: None,
        }
    }

    /// Shows the latest state.
    fn show(&mut self, progress: &Progress) {
        if progress.phase.is_empty() {
            return;
        }
        if self.is_live {
            screen::live(vec![progress.live(screen::live_columns())]);
            return;
        }
        if self.is_due(&progress.phase) {
            screen::progress(&progress.line());
            self.last_line = Some((progress.phase.clone(), Instant::now()));
        }
    }

    /// Whether a line is due: the first, after the interval, and when the phase changes, except to
    /// an evaluation between two steps.
    fn is_due(&self, phase: &str) -> bool {
        let is_look = |phase: &str| matches!(phase, "eval" | "figures");
        let Some((last, shown)) = &self.last_line else {
            return true;
        };
        let is_new = last != phase && !is_look(last) && !is_look(phase);
        is_new || shown.elapsed() >= LINE_EVERY
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if self.is_live {
            screen::live(Vec::new());
        }
    }
}

/// A progress bar: `[=====>     ] 3/6`.
pub(crate) fn bar(done: u64, all: u64) -> String {
    let full = u128::from(done.min(all)) * BAR as u128 / u128::from(all.max(1));
    let full = usize::try_from(full).unwrap_or(BAR);
    let head = if full < BAR { ">" } else { "" };
    format!("[{:BAR$}]", "=".repeat(full) + head)
}

/// Width of a bar.
const BAR: usize = 24;

#[cfg(test)]
mod tests {
    use spd_checkpoint::atomic::write_file;
    use spd_trainer::bench::{Overrides, preset};

    use super::*;

    fn phase(name: &str, step: u64) -> Row {
        Row::new(step, Kind::System).with_note(name)
    }

    fn taken(rows: &[Row]) -> Progress {
        let mut progress = Progress::default();
        rows.iter()
            .for_each(|row| assert_eq!(progress.take(row), None));
        progress
    }

    fn training() -> Progress {
        taken(&[
            phase("train", 400)
                .with("steps", 10_000.0)
                .with("steps_per_s", 40.0),
            Row::new(400, Kind::Train)
                .with("loss/total", 0.0123)
                .with("l0/linear1", 1.25)
                .with("l0/linear2", 0.5),
        ])
    }

    #[test]
    fn a_line_has_phase_step_and_numbers() {
        let progress = training();
        assert_eq!(
            progress.line(),
            "decomposing  step 400/10000  loss 1.230e-2  L0 1.75  40.0 steps/s  4 minutes left"
        );
        let leaky = Progress {
            leaks: true,
            ..progress
        };
        let said = "  LEAKY loss 1.230e-2  L0 1.75  ";
        assert!(leaky.line().contains(said) && leaky.live(200).contains(said));
    }

    #[test]
    fn a_bar_is_full_at_the_end() {
        assert_eq!(bar(0, 9), "[>                       ]");
        assert_eq!(bar(3, 6), "[============>           ]");
        assert_eq!(bar(6, 6), "[========================]");
        assert_eq!(bar(0, 0), "[>                       ]");
    }

    #[test]
    fn a_narrow_terminal_drops_the_bar_first_and_keeps_loss_and_speed() {
        let progress = training();
        let whole = "    decomposing [>                       ] 400/10000  loss 1.230e-2  L0 1.75  40.0 steps/s  4 minutes left";
        for (columns, expected) in [
            (200, whole),
            (whole.len(), whole),
            (
                99,
                "    decomposing 400/10000  loss 1.230e-2  L0 1.75  40.0 steps/s  4 minutes left",
            ),
            (
                69,
                "    decomposing 400/10000  loss 1.230e-2  L0 1.75  40.0 steps/s",
            ),
            (59, "    decomposing 400/10000  loss 1.230e-2  40.0 steps/s"),
            (39, "400/10000  loss 1.230e-2  40.0 steps/s"),
            (30, "loss 1.230e-2  40.0 steps/s"),
            (9, "loss 1.230e-2  40.0 steps/s"),
        ] {
            assert_eq!(progress.live(columns), expected, "{columns}");
        }
    }

    #[test]
    fn a_slow_pace_is_in_seconds_per_step() {
        let paces = [1234.5, 40.0, 1.0, 0.5, 0.012].map(pace);
        assert_eq!(
            paces,
            [
                "1234.5 steps/s",
                "40.0 steps/s",
                "1.0 steps/s",
                "2.0 s/step",
                "83.3 s/step"
            ]
        );
    }

    #[test]
    fn unknown_numbers_are_left_out() {
        let progress = taken(&[phase("target", 0)]);
        assert_eq!(progress.line(), "training target");
    }

    #[test]
    fn every_phase_has_a_place() {
        for (phase, step, expected) in [
            ("", 0, "while it started"),
            ("target", 0, "at the beginning (training target)"),
            ("warmup", 7, "after update 7 (warming up)"),
            ("wait", 7, "while it waited for its target"),
            ("train", 400, "after step 400 (decomposing)"),
            ("saving", 400, "after step 400 (saving)"),
        ] {
            assert_eq!(place(phase, step), expected);
        }
    }

    #[test]
    fn absurd_remaining_times_are_left_out() {
        for steps_per_s in [f64::NAN, f64::INFINITY, -1.0, 1e-300] {
            let row = phase("train", 1)
                .with("steps", f64::INFINITY)
                .with("steps_per_s", steps_per_s);
            let line = taken(&[row]).line();
            assert!(!line.contains("left"), "{line}");
        }
    }

    #[test]
    fn evaluations_between_steps_get_no_lines() {
        let after = |last: &str| Display {
            is_live: false,
            last_line: Some((last.to_owned(), Instant::now())),
        };
        assert!(after("target").is_due("warmup") && after("warmup").is_due("train"));
        assert!(!after("train").is_due("train") && !after("train").is_due("eval"));
        assert!(!after("eval").is_due("train") && !after("train").is_due("figures"));
        let looking = phase("eval", 400).with("steps_per_s", 40.0);
        assert_eq!(taken(&[looking]).line(), "evaluating");
    }

    #[test]
    fn an_event_has_a_message() {
        let mut progress = Progress::default();
        let event = Row::new(7, Kind::Event).with_note("resumed\u{1b}[0m");
        assert_eq!(
            progress.take(&event).as_deref(),
            Some("step 7: resumed [0m")
        );
        assert_eq!(progress, Progress::default());
    }

    #[test]
    fn only_new_rows_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().to_owned());
        let rank = spd_tracker::Spool::system(dir.path()).unwrap();
        rank.append(Row::new(1, Kind::Event).with_note("old"));
        rank.append(phase("target", 1));
        rank.sync().unwrap();
        let mut spool = SpoolReader::follow(&run_dir).unwrap();
        assert!(spool.read().is_empty());
        assert_eq!(spool.progress, Progress::default());
        rank.append(Row::new(2, Kind::Event).with_note("new"));
        rank.sync().unwrap();
        assert_eq!(spool.read(), ["step 2: new"]);
    }

    #[test]
    fn a_run_of_a_target_that_leaks_is_known_by_its_run_file() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path().to_owned());
        let mut run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        for leaks in [false, true] {
            run.target.allow_leak = leaks;
            write_file(&run_dir.config(), run.to_toml().as_bytes()).unwrap();
            let spool = SpoolReader::follow(&run_dir).unwrap();
            assert_eq!(spool.progress.leaks, leaks);
        }
    }
}
