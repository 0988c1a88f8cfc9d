//! The run files we ship: they load, and no damage to one of them makes the reader panic.

use std::{fs, path::PathBuf};

use spd_configs::{Faults, Run, Term};

use crate::load;

/// Name and text of each run file beside the crate.
fn shipped() -> Vec<(PathBuf, String)> {
    let mut files: Vec<_> = fs::read_dir(env!("CARGO_MANIFEST_DIR"))
        .expect("the folder of this crate")
        .map(|entry| entry.expect("an entry of it").path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "toml")
        })
        .filter(|path| path.file_name().is_some_and(|name| name != "Cargo.toml"))
        .map(|path| (path.clone(), fs::read_to_string(path).expect("text")))
        .collect();
    files.sort();
    assert!(files.len() >= 3);
    files
}

#[test]
fn each_loads_under_its_own_name_and_loads_again_as_it_was_resolved() {
    for (path, text) in shipped() {
        let run = Run::load(&path, &[]).unwrap();
        assert_eq!(
            load(text.replace('\n', "\r\n").as_bytes(), &[]).as_ref(),
            Ok(&run)
        );
        assert_eq!(
            Some(run.name.as_str()),
            path.file_stem().and_then(|stem| stem.to_str())
        );
        assert_eq!(Run::from_resolved(&run.to_toml()), Ok(run));
    }
}

#[test]
fn each_has_a_row_in_the_readme() {
    let readme = include_str!("../../README.md");
    for (path, _) in shipped() {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(
            readme.contains(&format!("| [`{name}`]({name}) |")),
            "{name}"
        );
    }
}

// Section 2.5 of the reference's description.
#[test]
fn the_toys_have_the_numbers_of_the_reference() {
    for (name, sites) in [("tms_5-2", 2), ("tms_5-2-id", 3)] {
        let path = format!("{}/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        let run = Run::load(path.as_ref(), &[]).unwrap();
        assert_eq!(run.decomposition.sites.len(), sites);
        assert!(run.decomposition.tied);
        assert_eq!((run.train.steps, run.train.batch_size), (10_000, 4096));
        let losses: Vec<_> = run
            .losses
            .iter()
            .map(|loss| (loss.term.name(), loss.coeff))
            .collect();
        assert_eq!(
            losses,
            [
                ("importance_minimality", 3e-3),
                ("stochastic_recon", 1.0),
                ("stochastic_recon_layerwise", 1.0)
            ]
        );
        assert!(matches!(
            run.losses[0].term,
            Term::ImportanceMinimality { p: 1.0, .. }
        ));
    }
}

/// A fault is a line that starts with its place.
fn assert_lines(faults: &Faults, place: &str) {
    assert!(faults.iter().count() > 0);
    for fault in faults.iter() {
        let line = fault.to_string();
        assert!(
            line.starts_with(place) && line.lines().count() == 1,
            "{line:?}"
        );
        assert!(!line.ends_with('.'), "{line}");
    }
}

/// A run, if there is one, is whole.
fn check(text: &str) {
    match Run::from_resolved(text) {
        Ok(run) => assert_eq!(Run::from_resolved(&run.to_toml()), Ok(run)),
        Err(faults) => assert_lines(&faults, "resolved run:"),
    }
}

#[test]
fn a_lost_line_is_a_run_or_a_list_of_faults() {
    for (_, text) in shipped() {
        let lines: Vec<_> = text.lines().collect();
        for lost in 0..lines.len() {
            check(&[&lines[..lost], &lines[lost + 1..]].concat().join("\n"));
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_a_run_or_a_list_of_faults() {
    for (_, text) in shipped() {
        for (cut, _) in text.char_indices() {
            check(&text[..cut]);
        }
    }
}

const JUNK: [&str; 22] = [
    "",
    "\"\"",
    "\"many\"",
    "\"two\\nlines\"",
    "'''\nlong'''",
    "0",
    "-1",
    "1.5",
    "-0.0",
    "nan",
    "inf",
    "1e400",
    "4294967296",
    "99999999999999999999999999999999999999999",
    "0xffff_ffff_ffff_ffff",
    "true",
    "1979-05-27",
    "[]",
    "[1, [2], {}]",
    "{}",
    "{ kind = 3, start = {}, \"a\\nb\" = 1 }",
    "\u{e9}\u{0}",
];

#[test]
fn a_value_of_junk_is_a_run_or_a_list_of_faults() {
    for (_, text) in shipped() {
        for line in text.lines() {
            let Some((key, _)) = line.split_once('=') else {
                continue;
            };
            for junk in JUNK {
                check(&text.replacen(line, &format!("{key}= {junk}"), 1));
            }
        }
    }
}

#[test]
fn an_override_of_junk_is_a_run_or_a_list_of_faults() {
    let keys = [
        "",
        ".",
        "name",
        "target",
        "target.kind",
        "target.train",
        "target.train.lr.start",
        "data",
        "decomposition.sites",
        "decomposition.sites.0",
        "decomposition.sites.0.C",
        "decomposition.sites.-1",
        "importance.hidden",
        "importance.hidden.0",
        "loss",
        "loss.0",
        "loss.0.kind",
        "loss.1.p_final",
        "train",
        "train.lr",
        "train.lr.shape.x",
        "eval",
        "eval.known",
        "checkpoint.keep",
        "log.every",
        "a.b.c",
        "two\nlines",
    ];
    for (path, _) in shipped() {
        for key in keys {
            for junk in JUNK {
                if let Err(faults) = Run::load(&path, &[format!("{key}={junk}")]) {
                    assert!(
                        faults
                            .iter()
                            .all(|fault| fault.to_string().lines().count() == 1)
                    );
                }
            }
        }
    }
}

#[test]
fn a_file_of_other_bytes_is_refused_where_they_start() {
    assert_eq!(
        load(b"name = \"x\"\n# \xc3\xa9\xff", &[]).unwrap_err(),
        "run.toml:2:4: expected UTF-8, found other bytes"
    );
}

#[test]
fn a_file_that_is_not_there_is_refused_in_a_line() {
    let missing = Run::load("nowhere/run.toml".as_ref(), &[])
        .unwrap_err()
        .to_string();
    assert_eq!(missing, "nowhere/run.toml: no such run file");
    let directory = Run::load("src".as_ref(), &[]).unwrap_err().to_string();
    assert_eq!(
        directory,
        "src: cannot be read: Is a directory (os error 21)"
    );
}
