//! Shipped run files.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use crate::scratch::{Scratch, launch};

#[test]
fn shipped_run_files_are_found_in_any_directory() {
    let scratch = Scratch::new();
    let dry = |name: &str| launch(scratch.launcher(&[name, "--dry-run", "--threads", "1"]));
    let shipped = dry("tms_5-2");
    assert_eq!(shipped.code, Some(0), "{}", shipped.stderr);
    let row = |ended: &crate::scratch::Ended| {
        let row = ended
            .stdout
            .lines()
            .find(|line| line.starts_with("  run file"));
        row.unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(
        row(&shipped),
        "run file shipped:tms_5-2.toml, which is part of this program"
    );
    assert!(scratch.names().is_empty());

    // A printed copy takes precedence over the shipped one.
    let text = launch(scratch.launcher(&["configs", "tms_5-2"])).stdout;
    fs::create_dir(scratch.path().join("configs")).unwrap();
    fs::write(scratch.path().join("configs/tms_5-2.toml"), &text).unwrap();
    let mine = dry("tms_5-2");
    assert_eq!(row(&mine), "run file configs/tms_5-2.toml");
    assert_eq!(row(&dry("shipped:tms_5-2")), row(&shipped));
    fs::write(
        scratch.path().join("configs/tms_5-2.toml"),
        text + "[nonsense]\n",
    )
    .unwrap();
    let bad = dry("tms_5-2");
    assert_eq!(bad.code, Some(2));
    assert!(
        bad.error().starts_with("configs/tms_5-2.toml:"),
        "{}",
        bad.stderr
    );
}

#[test]
fn faults_of_a_shipped_run_file_have_a_place() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["shakespeare", "--dry-run", "--set", "train.stepz=3"]));
    assert_eq!(ended.code, Some(2));
    let missing = launch(scratch.launcher(&["shakespeare", "--dry-run"]));
    assert_eq!(missing.code, Some(2));
    assert!(
        missing.error().contains("data/shakespeare"),
        "{}",
        missing.stderr
    );
    // Its paths are relative to the working directory.
    let said = missing.error();
    assert!(!said.contains("shipped:data"), "{said}");
}

#[test]
fn shipped_run_files_are_listed_and_printed() {
    let scratch = Scratch::new();
    let all = launch(scratch.launcher(&["configs"]));
    assert_eq!(all.code, Some(0));
    let line = "  tms_5-2                 The smallest run: five features squeezed through two dimensions, taken apart again\n";
    assert!(all.stdout.contains(line), "{}", all.stdout);
    let files = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let shipped = names.filter(|name| name.ends_with(".toml") && name != "Cargo.toml");
    assert_eq!(all.stdout.lines().count(), shipped.count());
    let one = launch(scratch.launcher(&["configs", "tms_5-2"]));
    assert_eq!(
        (one.code, one.stdout.as_str()),
        (Some(0), include_str!("../../../configs/tms_5-2.toml"))
    );
    let none = launch(scratch.launcher(&["configs", "tms_5-3"]));
    assert_eq!(none.code, Some(2));
    assert!(
        none.stderr.contains("a similar value exists")
            || none.stderr.contains("some similar values exist"),
        "{}",
        none.stderr
    );
}

#[test]
fn an_unknown_name_lists_similar_ones() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["tms_5-3"]));
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "tms_5-3: no such run file; looked at tms_5-3, configs/tms_5-3, configs/tms_5-3.toml, and at those that are part of this \
             program; did you mean tms_5-2, tms_5-2-id, tms_40-10, tms_5-2-reference?"
        )
    );
    let ended = launch(scratch.launcher(&["configs/tms_5-2.toml"]));
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "configs/tms_5-2.toml: no such run file; `tms_5-2` alone is the one that is part of this program"
        )
    );
    assert!(scratch.names().is_empty());
}
