//! `spd-launch runs [DIR...]`: lists the runs under directories, as a table or as JSON lines.

use std::path::{Path, PathBuf};

use indicatif::HumanCount;
use serde_json::{Value, json};
use spd_files::foreign::cut;
use spd_report::{Listed, Listing, State, Status, Sweep, lasting};
use spd_tracker::now;
use spd_trainer::Fault;

use crate::cli::RunsArgs;
use crate::exit::Exit;
use crate::progress::{activity, pace};
use crate::report::fault;
use crate::screen::{self, plain, result_columns};
use crate::table::{Align, Table};

/// The default directory.
const RUNS: &str = "runs";

/// Columns that a narrow terminal drops, in this order: heard, ran, left, speed, note, loss, step.
const LEAST: [usize; 7] = [5, 4, 7, 6, 8, 3, 2];

/// Characters of a note in the table; `--json` has all of them.
const LONGEST_NOTE: usize = 120;

/// Lists runs. Unreadable files are reported, and the rest is listed.
///
/// # Errors
///
/// Bad input, when one of the directories does not exist.
pub(crate) fn runs(asked: &RunsArgs) -> Result<Exit, Fault> {
    let mut dirs = asked.dirs.clone();
    if dirs.is_empty() {
        if let Ok(false) = Path::new(RUNS).try_exists() {
            screen::note(
                "no runs here: there is no directory runs; `spd-launch runs DIR` looks elsewhere",
            );
            return Ok(Exit::Done);
        }
        dirs.push(PathBuf::from(RUNS));
    }
    let listings = dirs
        .iter()
        .map(|dir| Listing::of(dir).map_err(|error| fault(&error)))
        .collect::<Result<Vec<Listing>, Fault>>()?;
    let found: Vec<&Listed> = listings.iter().flat_map(|listing| &listing.found).collect();
    if asked.json {
        let lines = found.iter().flat_map(|listed| objects(listed));
        let text: String = lines.map(|line| format!("{line}\n")).collect();
        screen::result(&text);
    } else if !found.is_empty() {
        let table = table(&found);
        screen::result(&match result_columns() {
            Some(columns) => table.text_within(columns, &LEAST),
            None => table.text(),
        });
    }
    for (dir, listing) in dirs.iter().zip(&listings) {
        if listing.found.is_empty() {
            screen::note(&format!("{}: no runs there", dir.display()));
        }
        listing.problems.iter().for_each(|line| screen::note(line));
    }
    let problems = found.iter().flat_map(|listed| problems(listed));
    problems.for_each(|line| screen::note(line));
    Ok(Exit::Done)
}

fn problems(listed: &Listed) -> Vec<&String> {
    match listed {
        Listed::Run(run) => run.problems.iter().collect(),
        Listed::Sweep(sweep) => {
            let of_runs = sweep.members.iter().flat_map(|member| &member.problems);
            sweep.problems.iter().chain(of_runs).collect()
        }
    }
}

fn table(found: &[&Listed]) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[Left, Left, Right, Right, Right, Right, Right, Right, Left]);
    table.row([
        "run", "state", "step", "loss", "ran", "heard", "speed", "left", "note",
    ]);
    let now = now();
    for listed in found {
        match listed {
            Listed::Run(run) => table.row(cells(run.path.display().to_string(), run, now)),
            Listed::Sweep(sweep) => {
                let name = plain(&sweep.path.display().to_string());
                let mut row = vec![name, sweep.state.name().to_owned()];
                row.extend(vec![String::new(); 6]);
                let note = plain(sweep.note.as_deref().unwrap_or_default());
                row.push(cut(note, LONGEST_NOTE));
                table.row(row);
                for run in &sweep.members {
                    table.row(cells(format!("  {}", inside(run, &sweep.path)), run, now));
                }
            }
        }
    }
    table
}

/// The name of a run within its sweep.
fn inside(run: &Status, sweep: &Path) -> String {
    let name = run.path.strip_prefix(sweep).unwrap_or(&run.path);
    name.display().to_string()
}

fn cells(name: String, run: &Status, now: f64) -> [String; 9] {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let is_running = run.state == State::Running;
    let steps = match run.steps {
        Some(steps) => format!("{}/{}", HumanCount(run.step), HumanCount(steps)),
        None => HumanCount(run.step).to_string(),
    };
    let doing = match run.of_phase {
        Some((step, steps)) => Some(format!(
            "{}: {}/{}",
            activity(&run.phase),
            HumanCount(step),
            HumanCount(steps)
        )),
        None => Some(activity(&run.phase).to_owned()).filter(|_| run.phase != "train"),
    };
    let doing = doing.filter(|_| is_running);
    let notes: Vec<String> = doing.into_iter().chain(note(run)).collect();
    let notes = notes.join("; ");
    let ago = run
        .heard
        .map(|heard| format!("{} ago", lasting(now - heard)));
    [
        plain(&name),
        run.state.name().to_owned(),
        steps,
        or_none(run.loss.map(|loss| loss_of(run, loss))),
        or_none(run.seconds.map(lasting)),
        or_none(ago),
        or_none(run.steps_per_s.map(pace)),
        or_none(run.seconds_left().map(lasting)),
        cut(plain(&notes), LONGEST_NOTE),
    ]
}

/// The loss of a run; that of a target that leaks does not stand beside others as if it were one.
fn loss_of(run: &Status, loss: f64) -> String {
    let word = if run.leaky { "LEAKY " } else { "" };
    format!("{word}{loss:.3e}")
}

/// The note of a run, and whether its launcher is still exiting.
fn note(run: &Status) -> Option<String> {
    let leaving = "its launcher has not exited yet: it still writes the page and serves trackers";
    let leaving = run.is_leaving.then(|| leaving.to_owned());
    let notes: Vec<String> = run.note.clone().into_iter().chain(leaving).collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

fn objects(listed: &Listed) -> Vec<Value> {
    match listed {
        Listed::Run(run) => vec![object(run, None)],
        Listed::Sweep(sweep) => {
            let runs = sweep.members.iter();
            let runs = runs.map(|run| object(run, Some(&sweep.path)));
            std::iter::once(object_of_sweep(sweep))
                .chain(runs)
                .collect()
        }
    }
}

fn object_of_sweep(sweep: &Sweep) -> Value {
    let holder = sweep.holder.as_ref();
    json!({
        "kind": "sweep",
        "path": sweep.path.display().to_string(),
        "state": sweep.state,
        "note": sweep.note,
        "runs": sweep.members.len(),
        "pid": holder.and_then(|holder| holder.pid),
        "host": holder.and_then(|holder| holder.host.as_deref()),
        "problems": sweep.problems,
    })
}

fn object(run: &Status, sweep: Option<&Path>) -> Value {
    let holder = run.holder.as_ref();
    json!({
        "kind": "run",
        "path": run.path.display().to_string(),
        "name": run.name,
        "target": run.target,
        "leaky": run.leaky,
        "state": run.state,
        "note": note(run),
        "step": run.step,
        "steps": run.steps,
        "phase": Some(&run.phase).filter(|phase| !phase.is_empty()),
        "phase_step": run.of_phase.map(|(step, _)| step),
        "phase_steps": run.of_phase.map(|(_, steps)| steps),
        "loss": run.loss,
        "began": run.began,
        "heard": run.heard,
        "seconds": run.seconds,
        "steps_per_s": run.steps_per_s,
        "seconds_left": run.seconds_left().filter(|_| run.state == State::Running),
        "saved": run.saved,
        "pid": holder.and_then(|holder| holder.pid),
        "host": holder.and_then(|holder| holder.host.as_deref()),
        "sweep": sweep.map(|sweep| sweep.display().to_string()),
        "problems": run.problems,
    })
}
