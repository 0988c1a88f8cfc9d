//! The paths of the command line: run directories, and directories of sweeps with run directories
//! in them.

use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::ReportError;
use crate::figures::text;

/// Most bytes of `sweep.json`.
const LARGEST: u64 = 64 << 20;

/// A directory of the command line.
#[derive(Debug)]
pub(crate) enum Source {
    Run(PathBuf),
    Sweep(PathBuf),
}

impl Source {
    /// The run or sweep at a path.
    ///
    /// # Errors
    ///
    /// When it is neither.
    pub(crate) fn at(path: &Path) -> Result<Self, ReportError> {
        let no_run = |found: &str| ReportError::NoRun {
            path: path.to_path_buf(),
            found: found.to_owned(),
        };
        let holds = |name: &str| path.join(name).is_file();
        match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(no_run("nothing")),
            Err(error) => Err(no_run(&format!("something unreadable ({error})"))),
            Ok(found) if !found.is_dir() => Err(no_run("a file")),
            Ok(_) if holds("config.toml") => Ok(Self::Run(path.to_path_buf())),
            Ok(_) if holds("sweep.json") => Ok(Self::Sweep(path.to_path_buf())),
            Ok(_) => Err(no_run("a directory without either")),
        }
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Run(path) | Self::Sweep(path) => path,
        }
    }

    /// The present run directories, in order; without those of a sweep that have not begun.
    pub(crate) fn runs(&self) -> Vec<PathBuf> {
        match self {
            Self::Run(path) => vec![path.clone()],
            Self::Sweep(path) => {
                let members = self.sweep().unwrap_or_default();
                let names = members.get("runs").and_then(Value::as_array);
                let names = names.into_iter().flatten();
                names
                    .filter_map(|member| Self::member(path, member.get("directory")?.as_str()?))
                    .filter(|dir| dir.join("config.toml").is_file())
                    .collect()
            }
        }
    }

    /// The directory of a run of the sweep at `path`, if its name stays inside of it.
    pub(crate) fn member(path: &Path, name: &str) -> Option<PathBuf> {
        is_plain(name).then(|| path.join(name))
    }

    /// The contents of `sweep.json`.
    pub(crate) fn sweep(&self) -> Option<Map<String, Value>> {
        let Self::Sweep(path) = self else { return None };
        serde_json::from_str(&text(&path.join("sweep.json"), LARGEST)?).ok()
    }
}

/// Whether a name stays in the directory that it is joined to.
fn is_plain(name: &str) -> bool {
    let parts = || Path::new(name).components();
    parts().count() > 0 && parts().all(|part| matches!(part, Component::Normal(_)))
}

/// The shortest suffix of each path that no other path has.
pub(crate) fn names(paths: &[PathBuf]) -> Vec<String> {
    let whole: Vec<PathBuf> = paths
        .iter()
        .map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()))
        .map(|path| path.components().collect())
        .collect();
    let end = |path: &Path, parts: usize| -> PathBuf {
        let all = path.components().count();
        path.components().skip(all.saturating_sub(parts)).collect()
    };
    let name = |path: &PathBuf| {
        let most = path.components().count();
        let alone = |parts: &usize| {
            let alike = whole
                .iter()
                .filter(|other| end(other, *parts) == end(path, *parts));
            alike.count() == 1
        };
        let parts = (1..=most).find(alone).unwrap_or(most);
        end(path, parts).display().to_string()
    };
    whole.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_long_as_they_must_be() {
        let paths = ["/runs/a.sweep/seed=0", "/runs/b.sweep/seed=0", "/runs/c"];
        let found = names(&paths.map(PathBuf::from));
        assert_eq!(found, ["a.sweep/seed=0", "b.sweep/seed=0", "c"]);
        assert_eq!(
            names(&["/a/b", "/a/b/"].map(PathBuf::from)),
            ["/a/b", "/a/b"]
        );
    }

    #[test]
    fn members_stay_in_their_sweep() {
        assert!(is_plain("seed=0") && is_plain("a/b"));
        assert!(!is_plain("../x") && !is_plain("/x") && !is_plain(""));
    }
}
