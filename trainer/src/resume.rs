//! Whether a run goes on, from where, and on the data and the target that it began with: asked
//! before anything is trained, by the launcher and again by the rank.
//!
//! A run directory without a checkpoint is either that of a run that was killed before its first
//! one, which begins again with the same command, or one whose checkpoints are lost, which must
//! not. `saved.json` tells them apart: it is written once, beside `checkpoints/` and not in it, as
//! soon as the first checkpoint is on the disk. In this order, because a record that came before
//! its checkpoint would make a run that is killed between the two be taken for a lost one. Killed
//! between the two as it is, the run has its checkpoint, and the next start, which finds that,
//! writes the record before its first step. If the record is gone too, rows tell: once they are two
//! saves ahead, the first save is over. It may have failed; then `saved.json` says that there was
//! none.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};
use spd_checkpoint::atomic::write_file;
use spd_checkpoint::{CheckpointError, look};
use spd_tracker::{LastRows, METRICS, Mark, Start};

use crate::data::{datasets, fingerprint};
use crate::fault::Fault;
use crate::run_file::Run;

/// The state from which a run with a directory continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Continuation {
    /// From the checkpoint of this step.
    From(u64),
    /// From the beginning: no checkpoint was written yet.
    Anew,
    /// Nowhere: its checkpoints are damaged or gone. A line for the user.
    Lost(String),
}

/// The state from which a run continues in its directory `dir`, given its data and its target.
///
/// - `every`: steps between two saves
pub(crate) fn goes_on(
    dir: &Path,
    made_of: &[Ingredient],
    every: u64,
) -> Result<Continuation, Fault> {
    let root = dir.join(CHECKPOINTS);
    if root.is_file() {
        return Ok(Continuation::Lost(advise(
            dir,
            &format!("{} is no directory", root.display()),
        )));
    }
    let found = look(&root)?;
    if let Some((step, meta)) = found.newest {
        check(made_of, &meta, step)?;
        return Ok(Continuation::From(step));
    }
    Ok(match lost(dir, &found.damaged, every)? {
        Some(line) => Continuation::Lost(line),
        None => Continuation::Anew,
    })
}

/// End of a run's rows when a checkpoint was made.
pub(crate) fn mark(meta: &BTreeMap<String, Value>) -> Result<Mark, Fault> {
    let mark = meta.get("metrics").cloned().unwrap_or_default();
    Ok(serde_json::from_value(mark).context("the checkpoint's mark of the metrics")?)
}

/// Directory of checkpoints in a run directory.
pub(crate) const CHECKPOINTS: &str = "checkpoints";

/// The record that there was one, or that none could be written.
pub(crate) const SAVED: &str = "saved.json";

/// Writes down that a run has a checkpoint, or that what was to be its first one was not written;
/// unless a checkpoint is known of.
pub(crate) fn remember(dir: &Path, first: Option<u64>) -> Result<(), CheckpointError> {
    let path = dir.join(SAVED);
    let is_known = match Record::of(&path) {
        Record::Saved(_) => true,
        Record::Failed => first.is_none(),
        Record::Nothing => false,
    };
    if is_known {
        return Ok(());
    }
    write_file(&path, format!("{}\n", json!({ "first": first })).as_bytes())
}

/// The content of [`SAVED`].
enum Record {
    Nothing,
    Failed,
    /// There was one, the first of them after this step, if it can be read. A record that is
    /// damaged was one of that too.
    Saved(Option<u64>),
}

impl Record {
    fn of(path: &Path) -> Self {
        if fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            return Self::Nothing;
        }
        let record = spd_files::read(path).ok();
        let record = record.and_then(|text| serde_json::from_slice::<Value>(&text).ok());
        match record.as_ref().and_then(|record| record.get("first")) {
            Some(Value::Null) => Self::Failed,
            first => Self::Saved(first.and_then(Value::as_u64)),
        }
    }
}

/// A line, if rows tell of a checkpoint that nothing else knows of.
fn told_by_rows(dir: &Path, every: u64) -> Option<String> {
    let starts = Start::all(dir).unwrap_or_default();
    if let Some(start) = starts.iter().rev().find(|start| start.offset > 0) {
        return Some(format!(
            "it has gone on from a checkpoint of step {} before",
            start.step
        ));
    }
    let mut rows = LastRows::of(&dir.join(METRICS)).ok()?;
    let last = rows.find_map(Result::ok)?.step;
    // The second save waits for the first.
    (every > 0 && last >= every.saturating_mul(2))
        .then(|| format!("its rows go up to step {last}, it saves every {every} steps"))
}

/// Why a run without a whole checkpoint must not begin again; `None` where it may.
///
/// - `damaged`: checkpoints that do not hold: where each lies, and what is wrong with it
/// - `every`: steps between two saves
pub(crate) fn lost(
    dir: &Path,
    damaged: &[(PathBuf, String)],
    every: u64,
) -> Result<Option<String>, Fault> {
    let place = dir.display();
    let why = match (damaged, Record::of(&dir.join(SAVED))) {
        ([], Record::Failed) => return Ok(None),
        ([], Record::Nothing) => match told_by_rows(dir, every) {
            None => return Ok(None),
            Some(told) => format!("{told}, and {place}/{CHECKPOINTS} holds none"),
        },
        ([], Record::Saved(first)) => {
            let first = first.map_or(String::new(), |step| {
                format!(", the first of them after step {step}")
            });
            format!("it has saved checkpoints{first}, and {place}/{CHECKPOINTS} holds none")
        }
        ([(newest, reason), others @ ..], _) => {
            let others = match others.len() {
                0 => String::new(),
                1 => ", and 1 older one is damaged too".to_owned(),
                count => format!(", and {count} older ones are damaged too"),
            };
            format!(
                "no checkpoint is whole: {}: {reason}{others}",
                newest.display()
            )
        }
    };
    Ok(Some(advise(dir, &why)))
}

fn advise(dir: &Path, why: &str) -> String {
    let place = dir.display();
    format!(
        "{place}: {why}; put the checkpoints back, or start over with --fresh, which moves {place} aside, or with --out"
    )
}

/// Something that a run is made of, whose change would make it another run.
#[derive(Debug, Clone)]
pub(crate) struct Ingredient {
    pub(crate) what: What,
    /// Its path.
    pub(crate) path: PathBuf,
    /// xxh3-128, 32 hexadecimal digits.
    pub(crate) hash: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// The dataset that is trained on, by its index or its tokens.
    Train,
    /// The dataset that is evaluated on, in the same way.
    Eval,
    /// The dataset of the non-target stream, in the same way.
    Nontarget,
    /// The target, by its weights as they are used.
    Target,
}

impl What {
    /// Its name in the meta of a checkpoint.
    fn key(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Eval => "eval",
            Self::Nontarget => "nontarget",
            Self::Target => "target",
        }
    }
}

/// The datasets of a run, as far as they can be read; faults of the others are reported when they
/// are opened. Generated data are described by the run file.
pub(crate) fn data(run: &Run) -> Vec<Ingredient> {
    [What::Train, What::Eval, What::Nontarget]
        .into_iter()
        .zip(datasets(run))
        .filter_map(|(what, path)| {
            Some(Ingredient {
                what,
                path: path.to_owned(),
                hash: fingerprint(&run.data, path).ok()?,
            })
        })
        .collect()
}

/// Their key in the meta of a checkpoint.
pub(crate) const MADE_OF: &str = "made_of";

pub(crate) fn remembered(made_of: &[Ingredient]) -> Value {
    let hashes = made_of.iter();
    let hashes = hashes.map(|part| (part.what.key().to_owned(), json!(part.hash)));
    Value::Object(hashes.collect())
}

/// Refuses to go on from a checkpoint that was made of something else.
pub(crate) fn check(
    made_of: &[Ingredient],
    meta: &BTreeMap<String, Value>,
    step: u64,
) -> Result<(), Fault> {
    for part in made_of {
        let promised = meta.get(MADE_OF).and_then(|all| all.get(part.what.key()));
        // Checkpoints of earlier builds promise nothing.
        let Some(promised) = promised.and_then(Value::as_str) else {
            continue;
        };
        if promised == part.hash {
            continue;
        }
        let of_dataset = if part.path.join("index.json").is_file() {
            "its index.json has"
        } else {
            "its tokens have"
        };
        let (is_not, has) = match part.what {
            What::Train => ("the dataset that the run was trained on", of_dataset),
            What::Eval => ("the dataset that the run was evaluated on", of_dataset),
            What::Nontarget => (
                "the dataset of the non-target stream that the run was trained on",
                of_dataset,
            ),
            What::Target => ("the target that the run takes apart", "its weights have"),
        };
        return Err(Fault::BadInput(format!(
            "{}: not {is_not}: {has} the hash {}, the checkpoint of step {step} says {promised}; \
             put that one back, or start over with --fresh or --out",
            part.path.display(),
            part.hash
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use spd_tracker::{Kind, Row, Spool};

    use super::*;

    fn part(what: What, hash: &str) -> Ingredient {
        Ingredient {
            what,
            path: "data/x".into(),
            hash: hash.into(),
        }
    }

    #[test]
    fn changed_data_or_target_is_refused_by_name() {
        let made_of = [What::Train, What::Eval, What::Target].map(|what| part(what, "aa"));
        let meta = BTreeMap::from([(MADE_OF.to_owned(), remembered(&made_of))]);
        let refusal = |parts: &[Ingredient]| match check(parts, &meta, 22) {
            Ok(()) => None,
            Err(fault) => Some(fault.to_string()),
        };
        assert_eq!(refusal(&made_of), None);
        // Unknown parts are compared later.
        assert_eq!(refusal(&made_of[..1]), None);
        for (what, is_not, has) in [
            (
                What::Train,
                "the dataset that the run was trained on",
                "tokens have",
            ),
            (
                What::Eval,
                "the dataset that the run was evaluated on",
                "tokens have",
            ),
            (
                What::Target,
                "the target that the run takes apart",
                "weights have",
            ),
        ] {
            let expected = format!(
                "data/x: not {is_not}: its {has} the hash bb, the checkpoint of step 22 says aa; \
                 put that one back, or start over with --fresh or --out"
            );
            assert_eq!(refusal(&[part(what, "bb")]), Some(expected));
        }
        let unknown = check(&made_of, &BTreeMap::new(), 22);
        assert!(unknown.is_ok(), "of an earlier build");
    }

    #[test]
    fn a_run_that_never_saved_begins_again_and_one_that_did_must_not() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let found = || goes_on(dir, &[], 20).unwrap();
        assert_eq!(found(), Continuation::Anew);
        fs::create_dir(dir.join(CHECKPOINTS)).unwrap();
        assert_eq!(found(), Continuation::Anew);
        // One whose first save fails has none to lose.
        remember(dir, None).unwrap();
        assert_eq!(found(), Continuation::Anew);
        remember(dir, Some(20)).unwrap();
        // The first one stays.
        remember(dir, Some(40)).unwrap();
        remember(dir, None).unwrap();
        let place = dir.display();
        let advice = format!(
            "put the checkpoints back, or start over with --fresh, which moves {place} aside, or with --out"
        );
        let lost = |why: &str| Continuation::Lost(format!("{place}: {why}; {advice}"));
        let first = format!(
            "it has saved checkpoints, the first of them after step 20, and {place}/checkpoints holds none"
        );
        assert_eq!(found(), lost(&first));
        fs::remove_dir(dir.join(CHECKPOINTS)).unwrap();
        assert_eq!(found(), lost(&first));
        write_file(&dir.join(CHECKPOINTS), b"").unwrap();
        assert_eq!(
            found(),
            lost(&format!("{place}/checkpoints is no directory"))
        );
        fs::remove_file(dir.join(CHECKPOINTS)).unwrap();
        // Its content is for the message; its existence counts.
        write_file(&dir.join(SAVED), b"").unwrap();
        assert_eq!(
            found(),
            lost(&format!(
                "it has saved checkpoints, and {place}/checkpoints holds none"
            ))
        );
        fs::remove_file(dir.join(SAVED)).unwrap();
        for (step, others) in [
            (20, ""),
            (40, ", and 1 older one is damaged too"),
            (60, ", and 2 older ones are damaged too"),
        ] {
            let path = spd_checkpoint::step_path(&dir.join(CHECKPOINTS), step);
            fs::create_dir_all(&path).unwrap();
            let path = path.display();
            let why = format!("no checkpoint is whole: {path}: manifest.json is missing{others}");
            assert_eq!(found(), lost(&why));
        }
    }

    #[test]
    fn rows_tell_of_checkpoints_that_nothing_else_knows_of() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let found = || goes_on(dir, &[], 20).unwrap();
        let lost = |why: &str| {
            let why = format!("{why}, and {}/checkpoints holds none", dir.display());
            Continuation::Lost(advise(dir, &why))
        };
        let spool = Spool::start(dir, &Mark::default(), 0).unwrap();
        let mut mark = Mark::default();
        for step in [0, 20, 39, 40] {
            assert_eq!(found(), Continuation::Anew);
            spool.append(Row::new(step, Kind::Train));
            mark = spool.mark().wait().unwrap();
        }
        drop(spool);
        assert_eq!(
            found(),
            lost("its rows go up to step 40, it saves every 20 steps")
        );
        assert_eq!(goes_on(dir, &[], 0).unwrap(), Continuation::Anew);
        remember(dir, None).unwrap();
        assert_eq!(found(), Continuation::Anew);
        fs::remove_file(dir.join(SAVED)).unwrap();
        drop(Spool::start(dir, &mark, 40).unwrap());
        assert_eq!(
            goes_on(dir, &[], 0).unwrap(),
            lost("it has gone on from a checkpoint of step 40 before")
        );
    }
}
