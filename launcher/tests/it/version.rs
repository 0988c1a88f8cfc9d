//! `spd-launch --version`: where runs record it, and the build script that makes it.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::scratch::{Scratch, launch};
use crate::small_run::toy;

#[test]
fn a_run_and_its_page_record_the_version_of_each_start() {
    let scratch = Scratch::new();
    let said = launch(scratch.launcher(&["--version"])).stdout;
    let version = said.trim_end().strip_prefix("spd-launch ").unwrap();
    assert!(version.starts_with(env!("CARGO_PKG_VERSION")), "{version}");
    toy(&scratch, &[]);
    let starts = fs::read_to_string(scratch.run_dir().join("starts.jsonl")).unwrap();
    let start: Value = serde_json::from_str(starts.trim_end()).unwrap();
    assert_eq!(start["version"], version);
    let page = fs::read_to_string(scratch.run_dir().join("report.html")).unwrap();
    assert!(page.contains(&format!("\"versions\":[\"{version}\"]")));
}

#[test]
fn the_changelog_tells_of_this_version() {
    let changes = concat!(env!("CARGO_MANIFEST_DIR"), "/../CHANGELOG.md");
    let changes = fs::read_to_string(changes).unwrap();
    assert!(changes.contains("\n## [Unreleased]\n"));
    assert!(changes.contains(env!("CARGO_PKG_VERSION")), "{changes}");
}

/// The output of the build script in a directory: the version, and the files that Cargo watches.
fn built(script: &Path, dir: &Path) -> (String, Vec<String>) {
    let output = Command::new(script).current_dir(dir).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let after = |key: &str| {
        let found = lines.lines().filter_map(|line| line.strip_prefix(key));
        found.map(str::to_owned).collect::<Vec<_>>()
    };
    let watched = after("cargo::rerun-if-changed=");
    for path in &watched {
        assert!(dir.join(path).try_exists().unwrap(), "{path}");
    }
    (after("cargo::rustc-env=SPD_VERSION=").concat(), watched)
}

fn git(dir: &Path, arguments: &[&str]) -> String {
    let mut git = Command::new("git");
    git.current_dir(dir).env("GIT_CONFIG_GLOBAL", "/dev/null");
    git.args(["-c", "user.name=x", "-c", "user.email=x@example.org"]);
    let output = git.args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_version_has_the_commit_and_whether_files_of_the_program_differ() {
    let scratch = Scratch::new();
    let script = scratch.path().join("script");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/build.rs");
    let mut rustc = Command::new("rustc");
    rustc.current_dir(env!("CARGO_MANIFEST_DIR"));
    rustc.args(["--edition", "2024", "-o"]).arg(&script);
    rustc.arg(source).env("CARGO_PKG_VERSION", "0.1.0");
    if !rustc.status().is_ok_and(|status| status.success()) {
        return spd_testing::skip("rustc");
    }
    if Command::new("git").arg("--version").output().is_err() {
        return spd_testing::skip("git");
    }
    let put = |path: &str, text: &str| {
        let path = scratch.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let clone = scratch.path().join("clone");
    let (launcher, source) = (clone.join("launcher"), "clone/trainer/src/lib.rs");
    for path in ["clone/launcher/build.rs", source, "clone/docs/runs.md"] {
        put(path, "");
    }
    let plain = ("0.1.0".to_owned(), vec!["build.rs".to_owned()]);
    assert_eq!(built(&script, &launcher), plain, "without a repository");

    git(&clone, &["init", "--quiet"]);
    git(&clone, &["add", "."]);
    git(&clone, &["commit", "--quiet", "--message", "first"]);
    let commit = git(&clone, &["rev-parse", "HEAD"])[..8].to_owned();
    let (version, watched) = built(&script, &launcher);
    assert_eq!(version, format!("0.1.0 ({commit})"));
    // Neither the index nor docs.
    let expected = [
        "../.git/HEAD",
        "../.git/logs/HEAD",
        "build.rs",
        "../trainer/src/lib.rs",
        "build.rs",
    ];
    assert_eq!(watched, expected);

    put("clone/docs/runs.md", "new");
    assert_eq!(built(&script, &launcher).0, version);
    put(source, "// new");
    let dirty = format!("0.1.0 ({commit}-dirty)");
    assert_eq!(built(&script, &launcher).0, dirty);

    git(&clone, &["worktree", "add", "--quiet", "../beside"]);
    let (of_worktree, watched) = built(&script, &scratch.path().join("beside/launcher"));
    assert_eq!(of_worktree, version);
    let log = "worktrees/beside/logs/HEAD";
    assert!(watched.iter().any(|path| path.ends_with(log)));

    // An archive that is unpacked in a clone.
    put("clone/unpacked/launcher/build.rs", "");
    assert_eq!(built(&script, &clone.join("unpacked/launcher")), plain);
}
