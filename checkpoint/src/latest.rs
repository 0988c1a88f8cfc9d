//! Which checkpoint to resume from: the newest whose hashes hold.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::read::verify_own;
use crate::step_path::{step_of, step_path};
use crate::{CheckpointError, Snapshot, atomic, load};

/// What [`newest`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The newest checkpoint that holds, if there is one.
    pub snapshot: Option<Snapshot>,
    /// Newer ones that do not hold, newest first: where each lies now, and what is wrong with it.
    pub set_aside: Vec<(PathBuf, String)>,
}

/// Reads the newest checkpoint under `root` whose hashes hold.
///
/// A newer one that does not hold is renamed `step-00001200.bad` and stays for whoever wants to know why.
/// Only the process that owns the root may ask; the others are told the step and use [`load`].
///
/// # Errors
///
/// When the newest whole one is of another format: going back behind it would lose work that another
/// build can read. When the file that all of them share is damaged: [`write_frozen`](crate::write_frozen) comes first where that can be
/// mended. And when the disk refuses.
pub fn newest(root: &Path) -> Result<Found, CheckpointError> {
    let mut found = Found::default();
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

/// The answer of [`look`] and [`read_newest`].
#[derive(Debug)]
pub struct Look<T> {
    /// Step of the newest checkpoint that holds, if there is one, and what was read of it.
    pub newest: Option<(u64, T)>,
    /// Newer ones that do not hold, newest first: where each lies, and what is wrong with it.
    pub damaged: Vec<(PathBuf, String)>,
}

/// Finds the checkpoint that [`newest`] would read, without changing anything, for those who do not own the root.
///
/// Every byte of it is compared with its manifest, but for the file that all checkpoints share, which the owner writes again where it is
/// damaged; of it the meta is kept, and no tensor. The owner may write and delete
/// meanwhile: where all are gone or damaged and the steps have changed, it looks again.
///
/// # Errors
///
/// As [`newest`].
pub fn look(root: &Path) -> Result<Look<BTreeMap<String, Value>>, CheckpointError> {
    look_with(root, |path| verify_own(path).map(|(_, meta)| meta))
}

/// Reads the checkpoint that [`newest`] would read, as [`look`] finds it.
///
/// # Errors
///
/// As [`newest`].
pub fn read_newest(root: &Path) -> Result<Look<Snapshot>, CheckpointError> {
    look_with(root, load)
}

fn look_with<T>(
    root: &Path,
    read: impl Fn(&Path) -> Result<T, CheckpointError>,
) -> Result<Look<T>, CheckpointError> {
    let mut steps_now = steps(root)?;
    loop {
        let mut look = Look {
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

/// Step of the newest checkpoint under `root`, whether or not its hashes hold; none where the root cannot be read either.
pub fn newest_step(root: &Path) -> Option<u64> {
    steps(root).ok()?.pop()
}

/// The steps under a root, in order.
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
