//! Finds the checkpoint to resume from: the newest good one, whose hashes hold.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::read::verify_own;
use crate::step_path::{step_of, step_path};
use crate::{CheckpointError, Snapshot, atomic, load};

/// The result of [`newest`].
#[derive(Debug, Default)]
pub struct Newest {
    /// The newest good checkpoint, if any.
    pub snapshot: Option<Snapshot>,
    /// Newer, damaged ones, newest first: the new path and the fault.
    pub set_aside: Vec<(PathBuf, String)>,
}

/// Reads the newest good checkpoint under `root`.
///
/// Newer, damaged ones are renamed `step-00001200.bad` and kept for inspection. Only the owner of
/// the root may call this; other ranks are told the step and call [`load`].
///
/// # Errors
///
/// When the newest complete one has an unknown format: an older one would lose work that another
/// build can read. When the shared file of frozen tensors is damaged: a caller who has the tensors
/// calls [`write_frozen`](crate::write_frozen) first. And when the disk refuses.
pub fn newest(root: &Path) -> Result<Newest, CheckpointError> {
    let mut found = Newest::default();
    for step in steps(root)?.into_iter().rev() {
        let path = step_path(root, step);
        match load(&path) {
            Ok(snapshot) => {
                found.snapshot = Some(snapshot);
                break;
            }
            Err(CheckpointError::Damaged { reason, .. }) => {
                found.set_aside.push((atomic::set_aside(&path)?, reason));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// The result of [`look`] and [`read_newest`].
#[derive(Debug)]
pub struct Inspection<T> {
    /// Step of the newest good checkpoint, if any, and the data read from it.
    pub newest: Option<(u64, T)>,
    /// Newer, damaged ones, newest first: path and fault.
    pub damaged: Vec<(PathBuf, String)>,
}

/// Finds the checkpoint that [`newest`] would read, without changing anything, for processes that
/// do not own the root.
///
/// Every byte is compared with its manifest, except the shared file of frozen tensors, which the
/// owner rewrites when it is damaged. Only the meta is kept. The owner may write and delete
/// meanwhile: if no checkpoint is good and the steps have changed, the search is repeated.
///
/// # Errors
///
/// As [`newest`].
pub fn look(root: &Path) -> Result<Inspection<BTreeMap<String, Value>>, CheckpointError> {
    look_with(root, |path| verify_own(path).map(|(_, meta)| meta))
}

/// Reads the checkpoint that [`newest`] would read, found as [`look`] does.
///
/// # Errors
///
/// As [`newest`].
pub fn read_newest(root: &Path) -> Result<Inspection<Snapshot>, CheckpointError> {
    look_with(root, load)
}

fn look_with<T>(
    root: &Path,
    read: impl Fn(&Path) -> Result<T, CheckpointError>,
) -> Result<Inspection<T>, CheckpointError> {
    let mut steps_now = steps(root)?;
    loop {
        let mut look = Inspection {
            newest: None,
            damaged: Vec::new(),
        };
        for &step in steps_now.iter().rev() {
            let path = step_path(root, step);
            match read(&path) {
                Ok(found) => {
                    look.newest = Some((step, found));
                    return Ok(look);
                }
                Err(CheckpointError::Damaged { reason, .. }) => look.damaged.push((path, reason)),
                Err(error) => return Err(error),
            }
        }
        let later = steps(root)?;
        if later == steps_now {
            return Ok(look);
        }
        steps_now = later;
    }
}

/// Step of the newest checkpoint under `root`, good or damaged; none where the root cannot be read.
pub fn newest_step(root: &Path) -> Option<u64> {
    steps(root).ok()?.pop()
}

/// The steps under a root, ascending.
pub(crate) fn steps(root: &Path) -> Result<Vec<u64>, CheckpointError> {
    let names = atomic::names(root)?;
    let mut steps: Vec<u64> = names
        .iter()
        .filter_map(|name| step_of(Path::new(name)))
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn steps_are_in_order_of_number() {
        let folder = tempfile::tempdir().unwrap();
        for step in [100_000_000, 99_999_999, 5] {
            fs::create_dir(step_path(folder.path(), step)).unwrap();
        }
        assert_eq!(steps(folder.path()).unwrap(), [5, 99_999_999, 100_000_000]);
    }

    #[test]
    fn the_newest_step_is_that_of_a_whole_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(newest_step(folder.path()), None);
        for name in [
            "step-00000009",
            "step-00000010",
            "step-00000011.bad",
            ".tmp-step-00000012",
            "step-13",
        ] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        assert_eq!(newest_step(folder.path()), Some(10));
    }

    #[test]
    fn a_root_that_is_not_there_has_no_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let found = newest(&folder.path().join("none")).unwrap();
        assert!(found.snapshot.is_none() && found.set_aside.is_empty());
    }
}
