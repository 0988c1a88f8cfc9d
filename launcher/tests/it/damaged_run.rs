//! A resume after damage to the run's own files: checkpoints, rows, summary, config, lists of starts.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;

use crate::begun_run::{TOY, flip, kill_halfway, refused, results, succeeds, toy, without_hashes};
use crate::scratch::{Scratch, launch, names};

#[test]
fn a_run_that_lost_its_checkpoints_does_not_start_over() {
    let scratch = Scratch::new();
    kill_halfway(&scratch, toy(&scratch));
    let checkpoints = scratch.run_dir().join("checkpoints");
    flip(&checkpoints.join("step-00000020/tensors.safetensors"));
    assert_eq!(
        without_hashes(&refused(&scratch, || toy(&scratch))),
        "runs/x: no checkpoint is whole: runs/x/checkpoints/step-00000020: tensor `adamw.first._ci_fns.linear1.layers.2.W` \
         has the hash HASH, manifest.json promises HASH; put the checkpoints back, or start over with --fresh, which moves runs/x \
         aside, or with --out"
    );
    fs::remove_dir_all(&checkpoints).unwrap();
    let lost = "runs/x: it has saved checkpoints, the first of them after step 20, and runs/x/checkpoints holds none; put \
                the checkpoints back, or start over with --fresh, which moves runs/x aside, or with --out";
    assert_eq!(refused(&scratch, || toy(&scratch)), lost);
    let rows = fs::read(scratch.run_dir().join("metrics.jsonl")).unwrap();
    // Nor does a rank that is started by hand.
    let ended = launch(scratch.launcher(&["rank", "--run-dir", "runs/x", "--threads", "1"]));
    assert_eq!((ended.code, ended.error()), (Some(2), lost));
    assert_eq!(
        fs::read(scratch.run_dir().join("metrics.jsonl")).unwrap(),
        rows
    );
    let mut anew = toy(&scratch);
    anew.arg("--fresh");
    succeeds(anew);
    let old = scratch.path().join("runs/x.old-1/metrics.jsonl");
    assert_eq!(fs::read(old).unwrap(), rows);
}

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_over() {
    let scratch = Scratch::new();
    kill_halfway(&scratch, toy(&scratch));
    let run_dir = scratch.run_dir();
    fs::remove_dir_all(run_dir.join("checkpoints/step-00000020")).unwrap();
    fs::remove_file(run_dir.join("saved.json")).unwrap();
    let path = run_dir.join("metrics.jsonl");
    let rows = fs::read_to_string(&path).unwrap();
    let before = rows.split_inclusive('\n').take(3).collect::<String>();
    fs::write(&path, before).unwrap();
    let ended = succeeds(toy(&scratch));
    assert!(
        ended
            .stdout
            .contains("runs/x (begins again: no checkpoint was written yet)"),
        "{}",
        ended.stdout
    );
    assert!(!ended.stderr.contains("continued"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(&path).unwrap(), rows);
}

#[test]
fn a_damaged_newest_checkpoint_loses_only_its_steps() {
    let scratch = Scratch::new();
    succeeds(toy(&scratch));
    let straight = results(&scratch);
    fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
    let checkpoints = scratch.run_dir().join("checkpoints");
    flip(&checkpoints.join("step-00000040/tensors.safetensors"));
    let ended = succeeds(toy(&scratch));
    assert!(
        ended.stdout.contains("runs/x (continued from step 20)"),
        "{}",
        ended.stdout
    );
    assert!(
        ended
            .stderr
            .contains("step 20: checkpoint set aside as runs/x/checkpoints/step-00000040.bad: "),
        "{}",
        ended.stderr
    );
    assert!(results(&scratch) == straight);
}

/// The values of an evaluation among others.
fn evaluation(values: &serde_json::Value) -> Vec<(String, serde_json::Value)> {
    let values = values.as_object().unwrap().iter();
    let values = values.filter(|(name, _)| name.starts_with("eval/"));
    let mut values: Vec<_> = values.map(|(name, x)| (name.clone(), x.clone())).collect();
    values.sort_by(|a, b| a.0.cmp(&b.0));
    values
}

#[test]
fn a_damaged_summary_is_written_again_of_the_last_row() {
    let scratch = Scratch::new();
    succeeds(toy(&scratch));
    let straight = results(&scratch);
    let path = scratch.run_dir().join("summary.json");
    let whole = fs::read_to_string(&path).unwrap();
    let rows = fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
    let row: serde_json::Value = serde_json::from_str(rows.lines().last().unwrap()).unwrap();
    let of_row = evaluation(&row);
    let measured = |text: &str| {
        let summary: serde_json::Value = serde_json::from_str(text).unwrap();
        evaluation(&summary["values"])
    };
    assert!(of_row.len() > 9 && measured(&whole) == of_row, "{whole}");
    for (damage, why) in [
        (
            "",
            "is not JSON: EOF while parsing a value at line 1 column 0",
        ),
        ("{}", "does not have the form of a summary; was it edited?"),
        (&whole[..whole.len() / 2], "is not JSON: "),
    ] {
        fs::write(&path, damage).unwrap();
        let ended = succeeds(toy(&scratch));
        assert!(
            ended.stdout.contains("runs/x (continued from step 40)"),
            "{}",
            ended.stdout
        );
        let note = ended.stderr.lines().next().unwrap();
        assert!(
            note.starts_with(&format!("runs/x/summary.json: {why}"))
                && note.ends_with("; it is made again from the newest checkpoint"),
            "{note}"
        );
        assert!(results(&scratch) == straight);
        assert_eq!(measured(&fs::read_to_string(&path).unwrap()), of_row);
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(
        refused(&scratch, || toy(&scratch)),
        "runs/x/summary.json: expected a file for the summary, found something else; move it away, and the same \
         command makes it again"
    );
}

#[test]
fn a_damaged_config_of_a_run_is_refused_with_a_remedy() {
    let scratch = Scratch::new();
    kill_halfway(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("config.toml");
    for (text, first) in [
        ("", "runs/x/config.toml:1:1: missing key `name`; "),
        ("name = \u{0}", "runs/x/config.toml:1:"),
    ] {
        fs::write(&path, text).unwrap();
        let error = refused(&scratch, || toy(&scratch));
        assert!(
            error.starts_with(first)
                && error.ends_with(
                    "; runs/x cannot be continued without its config.toml: put it back, or start over with --fresh, \
                     which moves runs/x aside, or with --out"
                ),
            "{error}"
        );
    }
    let mut anew = toy(&scratch);
    anew.arg("--fresh");
    succeeds(anew);
}

#[test]
fn a_resume_rewrites_the_shared_frozen_tensors() {
    let scratch = Scratch::new();
    succeeds(toy(&scratch));
    let straight = results(&scratch);
    let checkpoints = scratch.run_dir().join("checkpoints");
    let shared: Vec<String> = names(&checkpoints)
        .into_iter()
        .filter(|name| name.starts_with("frozen-"))
        .collect();
    let [shared] = shared.try_into().unwrap();
    let file = checkpoints.join(&shared);
    let whole = fs::read(&file).unwrap();
    let has_target = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains("target_model.");
    assert!(has_target(&whole) && !has_target(&straight[0]));
    for damage in [flip, |path: &Path| fs::remove_file(path).unwrap()] {
        fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
        fs::remove_dir_all(checkpoints.join("step-00000040")).unwrap();
        damage(&file);
        for arguments in [
            vec!["figures", "runs/x"],
            vec!["export", "runs/x", "--out", "out"],
            vec!["inspect", "runs/x/checkpoints/step-00000020"],
        ] {
            let ended = launch(scratch.launcher(&arguments));
            let error = ended.error();
            assert!(
                ended.code == Some(2)
                    && error.starts_with(&format!("runs/x/checkpoints/{shared}: "))
                    && error
                        .ends_with("; put it back, or go on with the run, which writes it again"),
                "{arguments:?}: {error}"
            );
        }
        succeeds(toy(&scratch));
        assert!(results(&scratch) == straight);
        assert!(fs::read(&file).unwrap() == whole);
        succeeds(scratch.launcher(&["figures", "runs/x"]));
        succeeds(scratch.launcher(&["export", "runs/x", "--out", "out"]));
    }
}

#[test]
fn rows_that_disagree_with_the_checkpoint_are_set_aside_and_rewritten() {
    let scratch = Scratch::new();
    kill_halfway(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("metrics.jsonl");
    let aside = scratch.run_dir().join("metrics.jsonl.bad");
    let rows = fs::read_to_string(&path).unwrap();
    succeeds(toy(&scratch));
    let tensors = || {
        fs::read(
            scratch
                .run_dir()
                .join("checkpoints/step-00000040/tensors.safetensors"),
        )
        .unwrap()
    };
    let straight = tensors();
    for (damaged, left) in [
        (Some(rows.replacen("\"kind\"", "\"king\"", 1)), 1),
        (Some(rows.replacen("\"step\":0", "\"step\":1", 1)), 0),
        (None, 4),
    ] {
        fs::remove_file(scratch.run_dir().join("summary.json")).unwrap();
        fs::remove_dir_all(scratch.run_dir().join("checkpoints/step-00000040")).unwrap();
        for name in ["starts.jsonl", "system.jsonl", "metrics.jsonl.bad"] {
            // Only this test resumes several runs in one directory.
            let _ = fs::remove_file(scratch.run_dir().join(name));
        }
        match &damaged {
            Some(damaged) => fs::write(&path, damaged).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let ended = succeeds(toy(&scratch));
        let said = format!(
            "written again from the {} of 4 rows that can be read",
            4 - left
        );
        let lines = ended.stderr.lines().filter(|line| line.contains(&said));
        assert_eq!(lines.count(), 1, "{}", ended.stderr);
        assert_eq!(fs::read_to_string(&aside).ok(), damaged);
        let now = fs::read_to_string(&path).unwrap();
        assert_eq!(now.lines().count(), rows.lines().count() - left);
        assert!(tensors() == straight);
    }
}

#[test]
fn a_damaged_record_of_starts_is_set_aside() {
    let scratch = Scratch::new();
    succeeds(toy(&scratch));
    let straight = results(&scratch);
    fs::remove_dir_all(scratch.run_dir()).unwrap();
    kill_halfway(&scratch, toy(&scratch));
    let path = scratch.run_dir().join("starts.jsonl");
    let mut starts = fs::read(&path).unwrap();
    starts[30] ^= 0x80;
    fs::write(&path, &starts).unwrap();
    let ended = succeeds(toy(&scratch));
    let said = "step 20: runs/x/starts.jsonl: 1 of its 1 lines cannot be read; the file is kept as runs/x/starts.jsonl.bad, \
                and written again without them";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    assert!(results(&scratch) == straight);
}

#[test]
fn a_run_with_rows_and_without_checkpoints_does_not_start_over_silently() {
    let scratch = Scratch::new();
    kill_halfway(&scratch, toy(&scratch));
    let run_dir = scratch.run_dir();
    fs::remove_dir_all(run_dir.join("checkpoints")).unwrap();
    fs::remove_file(run_dir.join("saved.json")).unwrap();
    assert_eq!(
        refused(&scratch, || toy(&scratch)),
        "runs/x: its rows go up to step 40, it saves every 20 steps, and runs/x/checkpoints holds none; put the checkpoints back, \
         or start over with --fresh, which moves runs/x aside, or with --out"
    );
    let mut fresh = toy(&scratch);
    fresh.arg("--fresh");
    succeeds(fresh);
}

#[test]
fn a_damaged_sweep_file_is_rewritten_or_refused_with_a_remedy() {
    let scratch = Scratch::new();
    let sweep = || {
        let mut command = scratch.real("tms_5-2.toml", "runs/s", &TOY);
        command.args(["--seeds", "0..2", "--threads", "1"]);
        command
    };
    succeeds(sweep());
    let path = scratch.path().join("runs/s/sweep.json");
    let whole = fs::read(&path).unwrap();
    for damage in ["", "{"] {
        fs::write(&path, damage).unwrap();
        succeeds(sweep());
        assert!(fs::read(&path).unwrap() == whole);
    }
    fs::remove_file(&path).unwrap();
    let ended = launch(sweep());
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "runs/s: holds files and no sweep.json, so it is not a sweep; try --out, or, if it is one, put an \
             empty file of that name there: it is written again"
        )
    );
    fs::write(&path, "").unwrap();
    succeeds(sweep());
    assert!(fs::read(&path).unwrap() == whole);
}
