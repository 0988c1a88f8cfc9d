//! The version of the program: that of the crate and, built in a clone, its commit, as in
//! `0.1.0 (7a7de303)`, and `0.1.0 (7a7de303-dirty)` if files of the program differ from it. Only
//! this crate is built again when the commit changes.

use std::path::Path;
use std::process::Command;

/// Files that the program is made of: all but these.
const PROGRAM: [&str; 9] = [
    ":(top)",
    ":(top,exclude)*.md",
    ":(top,exclude)*/tests/*",
    ":(top,exclude)*/examples/*",
    ":(top,exclude).*",
    ":(top,exclude)docs",
    ":(top,exclude)python",
    ":(top,exclude)testing",
    ":(top,exclude)emulated",
];

fn main() {
    let commit = commit().map_or(String::new(), |commit| format!(" ({commit})"));
    let version = env!("CARGO_PKG_VERSION");
    println!("cargo::rustc-env=SPD_VERSION={version}{commit}");
    println!("cargo::rerun-if-changed=build.rs");
}

/// The commit of this clone; `None` elsewhere, as in an archive of the crate, and without git.
fn commit() -> Option<String> {
    // An archive that is unpacked in the clone of another project has none of its commits.
    git(&["ls-files", "--error-unmatch", "build.rs"], &[])?;
    let commit = git(&["rev-parse", "--short=8", "HEAD"], &[])?;
    // Its log has a new line whenever HEAD is another commit. In a worktree it lies elsewhere.
    let log = ["rev-parse", "--git-path", "HEAD", "--git-path", "logs/HEAD"];
    let watched = git(&log, &[])? + &git(&["ls-files", "--"], &PROGRAM)?;
    // A file that is missing would have Cargo build this crate each time.
    for path in watched.lines().filter(|path| is_there(path)) {
        println!("cargo::rerun-if-changed={path}");
    }
    let changed = git(&["status", "--porcelain", "--"], &PROGRAM)?;
    let dirty = if changed.is_empty() { "" } else { "-dirty" };
    Some(format!("{}{dirty}", commit.trim_end()))
}

fn is_there(path: &str) -> bool {
    Path::new(path).try_exists().unwrap_or(false)
}

/// The output of git; `None` if it fails or is not there.
fn git(command: &[&str], paths: &[&str]) -> Option<String> {
    let mut git = Command::new("git");
    // `status` would write the index.
    git.env("GIT_OPTIONAL_LOCKS", "0").args(command).args(paths);
    let output = git.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()
}
