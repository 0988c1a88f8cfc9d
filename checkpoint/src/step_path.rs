//! Directory names of checkpoints.

use std::path::{Path, PathBuf};

/// The checkpoint directory of a step: `<root>/step-00001200`.
pub fn step_path(root: &Path, step: u64) -> PathBuf {
    root.join(format!("step-{step:08}"))
}

/// The step in a directory's name.
pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    let step = name.strip_prefix("step-")?.parse().ok()?;
    // Rejects `step-7` and `step-+0000007`: a step has one name.
    (step_path(Path::new(""), step) == Path::new(name)).then_some(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_one_name() {
        for step in [0, 7, 1200, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(step_of(&step_path(Path::new("runs/a"), step)), Some(step));
        }
        for name in [
            "step-7",
            "step-+0000007",
            "step-00000007.bad",
            ".tmp-step-00000007",
            "latest",
        ] {
            assert_eq!(step_of(Path::new(name)), None, "{name}");
        }
    }
}
