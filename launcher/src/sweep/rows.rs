//! The rows of a sweep for trackers: it is another run of its group, with its own spool.
//!
//! Each finished run has a row, with its position in the sweep as the step; a final row has the
//! table. Rows are in the order of the runs, whichever ends first, so a continued sweep writes the
//! same bytes again, and no row is sent twice.

use std::path::Path;

use serde_json::{Map, Value as Json, json};
use spd_checkpoint::atomic::write_file;
use spd_configs::Tracker;
use spd_report::State;
use spd_ship::About;
use spd_tracker::{Kind, Mark, Row, Spool, Value, now};
use spd_trainer::run_file::Run;

use super::member::Member;
use super::report;
use crate::exit::Exit;
use crate::launched::ended;
use crate::run_dir::RunDir;
use crate::screen;

/// The table of a sweep as a page, in its directory.
const TABLE: &str = "table.html";

/// Writes the rows of a sweep.
pub(crate) struct SweepRows {
    spool: Spool,
    /// The first run without a row.
    next: usize,
    is_whole: bool,
}

impl SweepRows {
    /// Opens the spool in the directory of a sweep. If that fails, a note says so, and there are no
    /// rows.
    pub(crate) fn start(root: &RunDir) -> Option<Self> {
        match Spool::start(root.path(), &Mark::default(), 0) {
            Ok(spool) => Some(Self {
                spool,
                next: 0,
                is_whole: false,
            }),
            Err(error) => {
                screen::note(&format!("no tracker receives the sweep: {error}"));
                None
            }
        }
    }

    /// Writes an event of a run.
    pub(crate) fn tell(&self, place: usize, member: &Member, line: &str) {
        let kind = match member.state {
            State::Failed => Kind::Alert,
            _ => Kind::Event,
        };
        let row = Row::new(place as u64, kind).with_note(line);
        self.spool.append(row.with("time", now()));
    }

    /// Writes rows for runs that have ended, and the table once all have.
    pub(crate) fn add(&mut self, name: &str, members: &[Member], root: &Path) {
        while let Some(member) = members.get(self.next) {
            match member.state {
                State::Done => self.spool.append(row(self.next, member)),
                State::Failed => {}
                _ => return,
            }
            self.next += 1;
        }
        if std::mem::replace(&mut self.is_whole, true) {
            return;
        }
        let row = Row::new(members.len() as u64, Kind::Eval);
        let file = |name: &str| Value::File(name.to_owned());
        let row = row
            .with("sweep/table", Value::Text(report::markdown(members)))
            .with("sweep/page", file(TABLE))
            .with("sweep/json", file("sweep.json"));
        let page = report::html(name, members);
        if let Err(error) = write_file(&root.join(TABLE), page.as_bytes()) {
            screen::note(&error.to_string());
        }
        self.spool.append(row);
    }
}

/// The row of a finished run: its swept values and results.
fn row(place: usize, member: &Member) -> Row {
    let mut row = Row::new(place as u64, Kind::Eval);
    for (key, value) in &member.values {
        row = row.with(format!("sweep/{key}"), value_of(value));
    }
    let numbers = member.results.iter();
    let numbers = numbers.filter_map(|(name, value)| Some((name, value.as_f64()?)));
    for (name, value) in numbers {
        row = row.with(name.as_str(), value);
    }
    match member.l0() {
        Some(l0) if !member.results.contains_key("l0") => row.with("l0", l0),
        _ => row,
    }
}

fn value_of(text: &str) -> Value {
    match report::parsed(text) {
        Json::Number(number) => number.as_f64().unwrap_or(f64::NAN).into(),
        Json::Bool(is_so) => f64::from(u8::from(is_so)).into(),
        _ => Value::Text(text.to_owned()),
    }
}

/// The description of a sweep for trackers.
pub(crate) fn about(name: &str, members: &[Member]) -> Option<About> {
    let file = serde_json::from_str(&report::json(name, members)).ok()?;
    Some(about_of(&file, &members.first()?.run.tracker))
}

/// The description from a `sweep.json`.
fn about_of(file: &Json, tracker: &Tracker) -> About {
    let name = file["name"].as_str().unwrap_or("sweep");
    let runs = file["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let mut swept: Map<String, Json> = Map::new();
    for (key, value) in runs
        .iter()
        .filter_map(|run| run["values"].as_object())
        .flatten()
    {
        let values = swept.entry(key).or_insert_with(|| json!([]));
        if let Some(values) = values.as_array_mut().filter(|all| !all.contains(value)) {
            values.push(value.clone());
        }
    }
    let config = json!({"name": name, "runs": runs.len(), "sweep": swept});
    About::sweep(name, tracker, config)
}

/// Sets the name and group of a sweep's run at trackers, whether or not it names one now: it may be
/// shipped later.
pub(crate) fn label(run: &mut Run, sweep: &str, member: &str) {
    let tracker = &mut run.tracker;
    tracker.group.get_or_insert_with(|| sweep.to_owned());
    let name = tracker.name.as_deref().unwrap_or(&run.name);
    tracker.name = Some(format!("{name} {member}"));
}

/// The directories of a sweep to ship, with their exits: the sweep itself, then the runs that have
/// begun.
///
/// - `given`: trackers instead of those that the runs name
///
/// # Errors
///
/// One line, when it cannot be read, or none of its runs has begun.
pub(crate) fn all_of(
    root: &RunDir,
    given: &[spd_configs::Destination],
) -> Result<Vec<(RunDir, About, Exit)>, String> {
    let path = root.sweep();
    let refused = |found: String| format!("{}: {found}", path.display());
    let bytes = spd_files::read(&path).map_err(|found| refused(found.to_string()))?;
    let file: Json = serde_json::from_slice(&bytes).map_err(|found| {
        refused(format!(
            "is not JSON: {found}; the command of the sweep makes it again"
        ))
    })?;
    let name = file["name"].as_str().unwrap_or("sweep");
    let runs = file["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let (mut all, mut is_done) = (Vec::new(), true);
    for member in runs.iter().filter_map(|run| run["directory"].as_str()) {
        let dir = RunDir::at(root.path().join(member));
        if !dir.config().is_file() {
            is_done = false;
            continue;
        }
        let mut run = Run::load_resolved(&dir.config()).map_err(|faults| faults.to_string())?;
        if !given.is_empty() {
            run.tracker.to = given.to_vec();
        }
        // Earlier versions did not store them.
        if run.tracker.group.is_none() {
            label(&mut run, name, member);
        }
        let exit = ended(dir.path()).unwrap_or(Exit::Stopped);
        is_done &= exit == Exit::Done;
        let about = About::run(dir.path(), &run.name, &run.tracker, &run);
        all.push((dir, about, exit));
    }
    let Some((_, first, _)) = all.first() else {
        return Err(refused(
            "none of its runs has begun, so there is nothing to send".to_owned(),
        ));
    };
    // Sweeps of earlier versions have no rows. The sweep is sent first: MLflow shows its runs below
    // it.
    if root.path().join(spd_tracker::STARTS).is_file() {
        let exit = if is_done { Exit::Done } else { Exit::Stopped };
        let about = about_of(&file, &first.tracker);
        all.insert(0, (root.clone(), about, exit));
    }
    Ok(all)
}
