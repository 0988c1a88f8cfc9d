//! `spd-launch attribute`: the same table by any number of threads and after kills; and refusals.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;

use rustix::process::Signal;
use serde_json::{Value, json};
use spd_checkpoint::{Snapshot, newest, write};

use crate::scratch::{Scratch, end, launch, names, send, start, wait_until};
use crate::small_run::{language_model, toy};

fn done(scratch: &Scratch, arguments: &[&str]) -> String {
    let ended = launch(scratch.launcher(arguments));
    assert_eq!(ended.code, Some(0), "{arguments:?}: {}", ended.stderr);
    ended.stdout
}

fn refused(scratch: &Scratch, arguments: &[&str], expected: &str) {
    let arguments = [&["attribute"], arguments].concat();
    let ended = launch(scratch.launcher(&arguments));
    assert_eq!(
        (ended.code, ended.stderr.as_str(), ended.stdout.as_str()),
        (Some(2), format!("error: {expected}\n").as_str(), ""),
        "{arguments:?}"
    );
}

/// A run with a harvest that has some examples of its components; the directory of the harvest.
fn harvested(scratch: &Scratch, examples: &str) -> String {
    let sites = "decomposition.sites=[{pattern=\"*.mlp.*\",C=24},{pattern=\"*.c_attn\",C=16}]";
    language_model(scratch, "runs/x", &[sites]);
    let few = ["--removals", "0", "--no-pairs", "--examples", examples];
    done(scratch, &[&["harvest", "runs/x"], &few[..]].concat());
    let harvests = names(&scratch.run_dir().join("harvests"));
    let [harvest] = harvests.as_slice() else {
        panic!("{harvests:?}");
    };
    format!("runs/x/harvests/{harvest}")
}

/// The two files of attributions.
fn files(scratch: &Scratch, dir: &str) -> [Vec<u8>; 2] {
    let dir = scratch.path().join(dir);
    assert!(!dir.join("attributed.json").exists());
    ["attributions.parquet", "attribute.json"].map(|name| fs::read(dir.join(name)).unwrap())
}

#[test]
fn any_number_of_threads_and_kills_give_the_same_table() {
    let scratch = Scratch::new();
    let harvest = harvested(&scratch, "100");
    let asked = ["attribute", "runs/x", "--positions", "100"];
    let said = done(&scratch, &[&asked[..], &["--threads", "1"]].concat());
    let end_of_line =
        format!(" components and the logits are attributed; the table is in {harvest}\n");
    assert!(said.ends_with(&end_of_line), "{said}");
    let whole = files(&scratch, &harvest);
    let about: Value = serde_json::from_slice(&whole[1]).unwrap();
    assert_eq!(
        (&about["step"], &about["strongest"]),
        (&json!(2), &json!(100))
    );
    assert_eq!(
        about["positions"],
        json!({ "component": 100, "logits": 100 })
    );
    done(
        &scratch,
        &[&asked[..], &["--threads", "2", "--out", "two"]].concat(),
    );
    assert!(files(&scratch, "two") == whole, "two threads");

    // Killed whenever it has saved more, until it ends by itself.
    let dir = scratch.path().join("killed");
    let so_far = || fs::metadata(dir.join("attributed.json")).map_or(0, |file| file.len());
    let again = [&asked[..], &["--out", "killed", "--save-seconds", "0"]].concat();
    let mut kills = 0;
    for _ in 0..3 {
        let mut running = start(scratch.launcher(&again));
        let before = so_far();
        wait_until("more is saved", || {
            running.try_wait().unwrap().is_some() || so_far() != before
        });
        send(running.id(), Signal::KILL);
        kills += usize::from(end(running).code.is_none());
    }
    assert!(kills > 0, "it ended before it was killed");
    done(&scratch, &again);
    assert!(files(&scratch, "killed") == whole, "after {kills} kills");

    let said = done(&scratch, &asked);
    let line = format!("the attributions of step 2 are in {harvest} already\n");
    assert_eq!(said, line);
    refused(
        &scratch,
        &["runs/x", "--positions", "99"],
        &format!(
            "{harvest}/attribute.json: belongs to attributions of another harvest, or with other settings; give another directory \
             with --out"
        ),
    );
    let said = done(
        &scratch,
        &["attribute", "runs/x", "--to", "logits", "--out", "logits"],
    );
    assert!(
        said.starts_with("0 components and the logits are "),
        "{said}"
    );
}

#[test]
fn what_cannot_be_attributed_is_refused() {
    let scratch = Scratch::new();
    language_model(&scratch, "runs/x", &[]);
    refused(
        &scratch,
        &["runs/x"],
        "runs/x/harvests: expected a harvest, found none; `spd-launch harvest runs/x` makes one",
    );
    refused(
        &scratch,
        &["data"],
        "data: holds no config.toml, so it is no run directory; give one, like runs/tms_5-2",
    );
    let none = ["--examples", "0", "--removals", "0", "--no-pairs"];
    done(&scratch, &[&["harvest", "runs/x"], &none[..]].concat());
    let first = names(&scratch.run_dir().join("harvests")).remove(0);
    let out = ["runs/x", "--out", "other"];
    for (more, expected) in [
        (
            ["--harvest", "data"],
            "data: expected a harvest, found no harvest.safetensors; run `spd-launch harvest` to its end first",
        ),
        (
            ["--to", "logits:0"],
            "--to logits:0: expected a site, found \"logits\"; the sites are ",
        ),
        (
            ["--to", "c_fc"],
            "--to c_fc: expected SITE:INDEX, like linear1:3 or linear1:0-4, found \"c_fc\"",
        ),
        (
            ["--to", "*:0"],
            "--to: expected components of which the harvest has examples, behind other sites, found none; give others, or logits",
        ),
    ] {
        let ended = launch(scratch.launcher(&[&["attribute"], &out[..], &more].concat()));
        let line = format!("error: {expected}");
        assert!(ended.stderr.starts_with(&line), "{}", ended.stderr);
        assert_eq!((ended.code, ended.stderr.lines().count()), (Some(2), 1));
    }
    assert!(!scratch.path().join("other").exists());
    refused(
        &scratch,
        &["runs/x", "--to", "logits", "--out", "data"],
        "data: holds shakespeare, which is of no harvest; give the name of a new directory with --out",
    );
    done(
        &scratch,
        &["harvest", "runs/x", "--tokens", "64", "--removals", "0"],
    );
    let mut harvests = names(&scratch.run_dir().join("harvests"));
    harvests.retain(|name| *name != first);
    let [first, newest] = [&first, &harvests[0]].map(|name| format!("runs/x/harvests/{name}"));
    let of_logits = ["attribute", "runs/x", "--to", "logits", "--positions", "1"];
    let table =
        |dir: &str| format!("0 components and the logits are attributed; the table is in {dir}\n");
    let ended = launch(scratch.launcher(&of_logits));
    assert_eq!((ended.code, ended.stdout), (Some(0), table(&newest)));
    let line = format!("the newest of 2 harvests is {newest}; --harvest takes another\n");
    assert!(ended.stderr.starts_with(&line), "{}", ended.stderr);
    let said = done(&scratch, &[&of_logits[..], &["--harvest", &first]].concat());
    assert_eq!(said, table(&first));
}

// The run has gone on since it was harvested.
#[test]
fn the_checkpoint_is_that_of_the_harvest() {
    let scratch = Scratch::new();
    let harvest = harvested(&scratch, "5");
    let root = scratch.run_dir().join("checkpoints");
    let snapshot = newest(&root).unwrap().snapshot.unwrap();
    write(
        &root,
        &Snapshot {
            step: 3,
            ..snapshot
        },
    )
    .unwrap();
    let asked = ["attribute", "runs/x", "--to", "logits", "--positions", "1"];
    let said = format!("0 components and the logits are attributed; the table is in {harvest}\n");
    assert_eq!(done(&scratch, &asked), said);
    fs::remove_dir_all(root.join("step-00000002")).unwrap();
    refused(
        &scratch,
        &["runs/x", "--out", "other"],
        "runs/x/checkpoints: has no checkpoint of step 2 any more, which was harvested; `spd-launch harvest runs/x` harvests the \
         newest one",
    );
}

#[test]
fn a_toy_has_no_attributions() {
    let scratch = Scratch::new();
    toy(&scratch, &[]);
    refused(
        &scratch,
        &["runs/x"],
        "runs/x: expected a language model, found a target that reads features; its figures show all of its components",
    );
}
