//! When a rank that died may start again.

use std::fs;
use std::path::{Path, PathBuf};

/// What is left of `--restarts N`.
#[derive(Debug)]
pub(crate) struct Restarts {
    left: u32,
    before: Option<Option<u64>>,
}

impl Restarts {
    /// At most `limit` of them.
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            left: limit,
            before: None,
        }
    }

    /// Whether the rank may start again; takes one off if so.
    ///
    /// - `newest`: step of the newest checkpoint, if there is one
    ///
    /// # Errors
    ///
    /// Why not, when restarts were asked for and are over; `None` when they were not asked for.
    pub(crate) fn again(&mut self, newest: Option<u64>) -> Result<(), Option<&'static str>> {
        if self.left == 0 {
            let were_asked_for = self.before.is_some();
            return Err(were_asked_for.then_some("not started again: --restarts is used up"));
        }
        // A rank that dies twice at the same place would die there for ever.
        if self.before == Some(newest) {
            return Err(Some(
                "not started again: no new checkpoint since it died before",
            ));
        }
        self.left -= 1;
        self.before = Some(newest);
        Ok(())
    }
}

/// Step of the newest checkpoint under `root`, whether or not its hashes hold.
pub(crate) fn newest(root: &Path) -> Option<u64> {
    let paths = fs::read_dir(root).ok()?.flatten().map(|entry| entry.path());
    let step = |path: PathBuf| {
        let step = path
            .file_name()?
            .to_str()?
            .strip_prefix("step-")?
            .parse()
            .ok()?;
        (spd_checkpoint::step_path(root, step) == path).then_some(step)
    };
    paths.filter_map(step).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_loop_with_progress_goes_on_until_the_limit() {
        let mut restarts = Restarts::new(2);
        assert_eq!(restarts.again(None), Ok(()));
        assert_eq!(restarts.again(Some(100)), Ok(()));
        assert_eq!(
            restarts.again(Some(200)),
            Err(Some("not started again: --restarts is used up"))
        );
    }

    #[test]
    fn a_crash_loop_without_progress_ends() {
        let mut restarts = Restarts::new(9);
        assert_eq!(restarts.again(Some(100)), Ok(()));
        assert_eq!(
            restarts.again(Some(100)),
            Err(Some(
                "not started again: no new checkpoint since it died before"
            ))
        );
    }

    #[test]
    fn nothing_is_said_where_no_restart_was_asked_for() {
        assert_eq!(Restarts::new(0).again(None), Err(None));
    }

    #[test]
    fn the_newest_checkpoint_is_one_that_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(newest(dir.path()), None);
        for name in [
            "step-00000009",
            "step-00000010",
            "step-00000011.bad",
            ".tmp-step-00000012",
            "step-13",
        ] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(newest(dir.path()), Some(10));
    }
}
