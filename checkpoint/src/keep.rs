//! Deletes old checkpoints, and never the last good one.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use crate::latest::steps;
use crate::step_path::step_path;
use crate::{CheckpointError, atomic, verify};

/// Deletes all but the newest `keep` checkpoints under `root`, and returns their paths.
///
/// The newest is first read back and compared with its manifest. If it is damaged, nothing is
/// deleted, since an older one may be the last good one. The newest is the one with the highest
/// step, so a run that deliberately returns to an earlier step needs another root.
///
/// # Errors
///
/// When the newest is damaged, or the disk refuses.
pub fn prune(root: &Path, keep: NonZeroUsize) -> Result<Vec<PathBuf>, CheckpointError> {
    let steps = steps(root)?;
    let Some(&newest) = steps.last() else {
        return Ok(Vec::new());
    };
    verify(&step_path(root, newest))?;

    let surplus = steps.len().saturating_sub(keep.get());
    let mut deleted = Vec::with_capacity(surplus);
    for &step in &steps[..surplus] {
        let path = step_path(root, step);
        atomic::remove_dir(&path)?;
        deleted.push(path);
    }
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use spd_testing::faults::{self, Then};

    use super::*;
    use crate::{Snapshot, newest, write};

    fn root_with(steps: &[u64]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for &step in steps {
            write(
                root.path(),
                &Snapshot {
                    step,
                    ..Snapshot::default()
                },
            )
            .unwrap();
        }
        root
    }

    #[test]
    fn the_newest_are_kept() {
        let root = root_with(&[1, 2, 3, 4]);
        let keep = NonZeroUsize::new(3).unwrap();
        assert_eq!(
            prune(root.path(), keep).unwrap(),
            [step_path(root.path(), 1)]
        );
        assert_eq!(prune(root.path(), keep).unwrap(), [] as [PathBuf; 0]);
        assert_eq!(steps(root.path()).unwrap(), [2, 3, 4]);
        assert_eq!(prune(root.path(), NonZeroUsize::MIN).unwrap().len(), 2);
        assert_eq!(steps(root.path()).unwrap(), [4]);
    }

    #[test]
    fn nothing_is_deleted_when_the_newest_is_damaged() {
        let root = root_with(&[1, 2, 3]);
        fs::remove_file(step_path(root.path(), 3).join("meta.json")).unwrap();
        let error = prune(root.path(), NonZeroUsize::MIN)
            .unwrap_err()
            .to_string();
        assert!(
            error.ends_with("step-00000003: meta.json is missing; resume from an older checkpoint")
        );
        assert_eq!(steps(root.path()).unwrap(), [1, 2, 3]);
    }

    #[test]
    fn an_interrupted_prune_leaves_only_good_checkpoints() {
        for then in [Then::Fail, Then::Crash] {
            for operation in 0.. {
                let root = root_with(&[1, 2, 3]);
                let (outcome, fired) =
                    faults::at(operation, then, || prune(root.path(), NonZeroUsize::MIN));
                assert_eq!(outcome.is_err(), fired);
                for step in steps(root.path()).unwrap() {
                    verify(&step_path(root.path(), step)).unwrap();
                }
                assert_eq!(newest(root.path()).unwrap().snapshot.unwrap().step, 3);
                if !fired {
                    break;
                }
                prune(root.path(), NonZeroUsize::MIN).unwrap();
                assert_eq!(steps(root.path()).unwrap(), [3]);
            }
        }
    }
}
