//! Ends of runs: exit codes, messages, restarts.

use std::fs;

use serde_json::{Value, json};

use crate::scratch::{Scratch, end, launch, names, start};

#[test]
fn a_run_ends_with_its_summary() {
    let scratch = Scratch::new();
    let mut command = scratch.run("done", &[]);
    command.envs([("SLURM_PROCID", "3"), ("RANK", "0"), ("WORLD_SIZE", "1")]);
    command.env("FAKE_WATCHED", scratch.path());
    let running = start(command);
    for (seen, words) in [("seen1", "training target"), ("seen2", "decomposing")] {
        running.has_said(words);
        fs::File::create_new(scratch.path().join(seen)).unwrap();
    }
    let ended = end(running);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| !line.starts_with("[0] "))
        .collect();
    assert_eq!(
        lines,
        [
            "training target  step 3/9  loss 5.000e-1  L0 2.50  3.0 steps/s  2 seconds left",
            "step 0: target trained",
            "decomposing  step 4/9  loss 5.000e-1  L0 2.50  3.0 steps/s  2 seconds left",
        ]
    );
    assert!(
        ended
            .stdout
            .ends_with("tiny run\n\n  steps  9\n\nresults are in runs/x\n"),
        "{}",
        ended.stdout
    );
    assert!(!(ended.stdout + &ended.stderr).contains(['\u{1b}', '\r']));
    // The launcher sets the environment of a rank, whatever its own is.
    let log = fs::read_to_string(scratch.run_dir().join("logs/rank0.log")).unwrap();
    assert_eq!(
        log,
        "LOCAL_RANK=0\nMASTER_ADDR=127.0.0.1\nMASTER_PORT=0\nRANK=0\nWORLD_SIZE=1\n"
    );
    assert_eq!(
        names(&scratch.run_dir()),
        [
            "checkpoints",
            "config.toml",
            "logs",
            "machine.jsonl",
            "metrics.jsonl",
            "pid",
            "report.html",
            "summary.json",
            "system.jsonl"
        ]
    );
    assert_eq!(names(&scratch.path().join("runs")), ["x"]);
}

#[test]
fn the_last_page_has_the_result_of_the_run() {
    let failed = "failed after step 5 (decomposing): loss is NaN";
    for (rank, expected) in [
        ("done", (Some("done"), None)),
        ("not_finite", (Some("failed"), Some(failed))),
    ] {
        let scratch = Scratch::new();
        launch(scratch.run(rank, &[]));
        let page = fs::read_to_string(scratch.run_dir().join("report.html")).unwrap();
        let (_, data) = page.split_once("id=\"data\">").unwrap();
        let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
        let head = &data["runs"][0]["head"];
        // After the failed process.
        let note = head["note"].as_str().and_then(|note| note.split_once(") "));
        let found = (head["state"].as_str(), note.map(|(_, what)| what));
        assert_eq!(found, expected);
        assert!(!page.contains("not gone yet"));
    }
}

#[test]
fn a_finished_run_prints_its_summary_again() {
    let scratch = Scratch::new();
    launch(scratch.run("done", &[]));
    let again = launch(scratch.run("fail", &[]));
    assert_eq!(again.code, Some(0));
    assert_eq!(
        again.stdout,
        "tiny run\n\n  steps  9\n\nresults are in runs/x\n"
    );
    assert_eq!(
        again.stderr,
        "runs/x is finished; --fresh runs it again (the old directory is moved aside), --out elsewhere\n"
    );
}

#[test]
fn json_output_has_the_result_as_fields() {
    let scratch = Scratch::new();
    launch(scratch.run("done", &[]));
    let ended = launch(scratch.run("fail", &["--json"]));
    let line: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(
        (&line["kind"], &line["text"], &line["result"]),
        (
            &"result".into(),
            &"results are in runs/x".into(),
            &json!({"title": "tiny run", "lines": [["steps", 9]]})
        )
    );
    let ended = launch(scratch.sweep("done", &["--seeds", "0..2", "--json"]));
    let result = ended
        .stdout
        .lines()
        .find(|line| line.contains("\"kind\":\"result\""));
    let line: Value = serde_json::from_str(result.unwrap_or(&ended.stderr)).unwrap();
    let text = line["text"].as_str().unwrap();
    assert!(text.starts_with("results are in runs/s"), "{text}");
    assert_eq!(line["result"]["runs"].as_array().unwrap().len(), 2);
}

#[test]
fn quiet_may_precede_a_command() {
    let scratch = Scratch::new();
    for (arguments, note) in [
        (
            &["runs"][..],
            "no runs here: there is no directory runs; `spd-launch runs DIR` looks elsewhere\n",
        ),
        (&["-q", "runs"], ""),
        (&["runs", "-q"], ""),
        (&["--quiet", "runs"], ""),
    ] {
        let ended = launch(scratch.launcher(arguments));
        assert_eq!(
            (ended.code, ended.stderr.as_str()),
            (Some(0), note),
            "{arguments:?}"
        );
    }
    let both = launch(scratch.launcher(&["tms_5-2", "--threads", "1", "runs"]));
    let expected = "error: tms_5-2: expected a command or a run file, found both; only -q and -v may precede a command\n";
    assert_eq!((both.code, both.stderr.as_str()), (Some(2), expected));
    let quiet = launch(scratch.run("done", &["-q"]));
    assert_eq!((quiet.code, quiet.stderr.as_str()), (Some(0), ""));
}

#[test]
fn fresh_moves_the_old_run_aside() {
    let scratch = Scratch::new();
    launch(scratch.run("done", &[]));
    let ended = launch(scratch.run("done", &["--fresh", "--set", "seed=5"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("the old runs/x is now runs/x.old-1\n"),
        "{}",
        ended.stderr
    );
    let seed = |dir: &str| {
        let config =
            fs::read_to_string(scratch.path().join("runs").join(dir).join("config.toml")).unwrap();
        config
            .lines()
            .find(|line| line.starts_with("seed"))
            .map(str::to_owned)
    };
    assert_eq!(
        (
            seed("x.old-1").unwrap().as_str(),
            seed("x").unwrap().as_str()
        ),
        ("seed = 0", "seed = 5")
    );
}

#[test]
fn a_begun_run_is_continued() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    let ended = launch(scratch.run("done", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stdout
            .contains("runs/x (begins again: no checkpoint was written yet)"),
        "{}",
        ended.stdout
    );
}

#[test]
fn a_failure_names_its_cause_first() {
    let ended = launch(Scratch::new().run("fail", &[]));
    assert_eq!(ended.code, Some(1));
    let report: Vec<&str> = ended.stderr.lines().collect();
    let first = report
        .iter()
        .position(|line| line.starts_with("error: "))
        .unwrap();
    assert!(
        report[first].ends_with(" failed after step 4 (decomposing): loss is NaN at step 5"),
        "{report:?}"
    );
    assert_eq!(
        report[first + 1..],
        [
            "its last lines (runs/x/logs/rank0.log):",
            "  warming up",
            "   [31mred [0m",
        ]
    );
}

#[test]
fn every_way_to_die_is_reported() {
    for (behaviour, code, message) in [
        (
            "panic",
            1,
            " exited with code 101 while it started: index out of bounds",
        ),
        (
            "bad_input",
            2,
            " refused its input: data/x: no such dataset",
        ),
        (
            "killed",
            1,
            " was killed by signal 9 (SIGKILL) while it started; not by the launcher, so most likely the machine \
             ran out of memory: the plan needs ",
        ),
    ] {
        let ended = launch(Scratch::new().run(behaviour, &[]));
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        assert!(
            ended.error().starts_with("rank 0 (pid "),
            "{}",
            ended.stderr
        );
        assert!(ended.error().contains(message), "{}", ended.stderr);
    }
}

#[test]
fn an_end_without_a_summary_is_a_failure() {
    let ended = launch(Scratch::new().run("silent_done", &[]));
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.error().starts_with("runs/x/summary.json: "),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_silent_rank_counts_as_hung() {
    let ended = launch(Scratch::new().run("hang", &["--hang-seconds", "1"]));
    assert_eq!(ended.code, Some(1));
    // On a busy machine it may be silent before its second step.
    let (_, silent) = ended
        .error()
        .split_once(" made no progress for 1 s ")
        .unwrap();
    let (place, outcome) = silent.split_once(": ").unwrap();
    assert!(
        place.starts_with("while it ") || place.ends_with(" (decomposing)"),
        "{}",
        ended.stderr
    );
    assert_eq!(
        outcome,
        "it counts as hung and was killed; --hang-seconds sets the limit"
    );
}

#[test]
fn a_flood_of_output_is_logged_and_mostly_omitted_on_screen() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run("flood", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(
        fs::metadata(scratch.run_dir().join("logs/rank0.log"))
            .unwrap()
            .len(),
        20_000_000
    );
    assert!(ended.stderr.len() < 20_000, "{} bytes", ended.stderr.len());
}

#[test]
fn a_crash_loop_without_progress_ends() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run("crash_loop", &["--restarts", "9"]));
    assert_eq!(ended.code, Some(1));
    assert_eq!(
        fs::read_to_string(scratch.run_dir().join("attempts"))
            .unwrap()
            .lines()
            .count(),
        2
    );
    assert!(
        ended
            .stderr
            .contains("started again; its newest checkpoint is of step 5\n"),
        "{}",
        ended.stderr
    );
    assert!(
        ended
            .stderr
            .ends_with("not started again: no new checkpoint since it died before\n")
    );
}

#[test]
fn a_crash_loop_with_progress_ends_at_the_limit() {
    let scratch = Scratch::new();
    let ended = launch(scratch.run("crash_on", &["--restarts", "3"]));
    assert_eq!(ended.code, Some(1));
    assert_eq!(
        fs::read_to_string(scratch.run_dir().join("attempts"))
            .unwrap()
            .lines()
            .count(),
        4
    );
    assert!(
        ended
            .stderr
            .ends_with("not started again: --restarts is used up\n"),
        "{}",
        ended.stderr
    );
}

#[test]
fn permanent_failures_are_not_restarted() {
    for (behaviour, code) in [("bad_input", 2), ("not_finite", 1)] {
        let ended = launch(Scratch::new().run(behaviour, &["--restarts", "3"]));
        assert_eq!(ended.code, Some(code));
        assert!(!ended.stderr.contains("started again"), "{}", ended.stderr);
    }
    let ended = launch(Scratch::new().run("code_2", &["--restarts", "3"]));
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("started again"), "{}", ended.stderr);
}

#[test]
fn a_directory_with_a_launcher_is_refused() {
    let scratch = Scratch::new();
    let mut first = start(scratch.run("stubborn", &[]));
    scratch.rank_pid();
    let second = launch(scratch.run("done", &[]));
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(second.code, Some(2));
    assert!(
        second.error().starts_with(&format!(
            "runs/x/logs/lock: held by process {} ",
            first.id()
        )),
        "{}",
        second.stderr
    );
}

#[test]
fn a_new_run_uses_an_empty_directory() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.run_dir()).unwrap();
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
}
