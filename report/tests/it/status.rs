//! States of runs, from their directories.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use spd_checkpoint::Lock;
use spd_report::{LastWord, Listed, Listing, State, Status};
use spd_tracker::{Kind, Mark, Row, Spool, now};

use crate::sample::{behind, make, run, sweep, train};

fn word(state: State, note: &str) -> String {
    LastWord {
        state,
        note: note.to_owned(),
        began: 1e9,
        ended: 1e9 + 90.0,
    }
    .line()
}

/// Adds an event as a rank does, at a time.
fn event(run: &Path, note: &str, is_stop: bool, time: f64) {
    let row = Row::new(40, Kind::Event).with_note(note);
    let row = if is_stop {
        row.with("stopped", 1.0)
    } else {
        row
    };
    let spool = Spool::system(run).unwrap();
    spool.append(row.with("time", time));
    spool.sync().unwrap();
}

#[test]
fn state_comes_from_lock_summary_and_last_word() {
    let (_dir, run) = run("x");
    let state = || {
        let status = Status::of(&run);
        (status.state, status.note)
    };
    let logs = run.join("logs");
    let lock = Lock::take(&logs).unwrap();
    let (now_state, note) = state();
    assert_eq!(now_state, State::Running);
    // Its rows are from 2001.
    assert!(note.unwrap().starts_with("silent for "));
    lock.leave(&word(State::Failed, "loss is NaN")).unwrap();
    // From its last line on it is over, though its launcher still ships rows.
    let failed = (State::Failed, Some("loss is NaN".to_owned()));
    assert!(state() == failed && Status::of(&run).is_leaving);
    drop(lock);
    assert!(state() == failed && !Status::of(&run).is_leaving);
    let status = Status::of(&run);
    assert_eq!((status.began, status.seconds), (Some(1e9), Some(90.0)));
    // The next launch leaves no line.
    drop(Lock::take(&logs).unwrap());
    let killed = format!(
        "its launcher (process {}) exited without a message: it was killed, or its machine went down; the same command begins again",
        std::process::id()
    );
    assert_eq!(state(), (State::Killed, Some(killed)));
    fs::create_dir_all(run.join("checkpoints/step-00000030")).unwrap();
    assert!(
        state()
            .1
            .unwrap()
            .ends_with("; the same command goes on from step 30")
    );
    Lock::take(&logs)
        .unwrap()
        .leave(&word(State::Stopped, ""))
        .unwrap();
    let goes_on = "the same command goes on from step 30".to_owned();
    assert_eq!(state(), (State::Stopped, Some(goes_on)));
    fs::write(run.join("summary.json"), "{}").unwrap();
    assert_eq!(state(), (State::Done, None));
}

#[test]
fn stop_of_a_rank_counts_if_its_launcher_left_no_line() {
    let (_dir, run) = run("x");
    event(&run, "stopped long ago", true, 1e9);
    drop(Lock::take(&run.join("logs")).unwrap());
    assert_eq!(Status::of(&run).state, State::Killed);
    event(
        &run,
        "stopped after step 40, which is saved",
        true,
        now() + 1.0,
    );
    let status = Status::of(&run);
    let note = status.note.as_deref();
    assert_eq!(
        (status.state, note),
        (
            State::Stopped,
            Some("stopped after step 40, which is saved")
        )
    );
    event(&run, "continued", false, now() + 2.0);
    assert_eq!(Status::of(&run).state, State::Killed);
}

#[test]
fn numbers_are_those_of_the_last_rows() {
    let (_dir, run) = run("x");
    let status = Status::of(&run);
    assert_eq!((status.step, status.steps), (39, Some(40)));
    assert_eq!((status.phase.as_str(), status.of_phase), ("train", None));
    assert_eq!(status.loss, Some(100.0 / 40.0));
    // The last row is the event.
    assert_eq!(status.heard, Some(1e9 + 7.0));
    assert!(status.problems.is_empty(), "{:?}", status.problems);
    // Long rows of an evaluation hide nothing.
    let spool = behind(&run);
    spool.append(train(40));
    (0..30).for_each(|_| spool.append(Row::new(41, Kind::Eval).with_note("x".repeat(50_000))));
    let target = Row::new(7, Kind::System).with_note("target");
    spool.append(target.with("steps", 20.0).with("steps_per_s", 2.0));
    spool.sync().unwrap();
    let status = Status::of(&run);
    assert_eq!(status.of_phase, Some((7, 20)));
    // An evaluation between the steps of the target.
    let eval = Row::new(8, Kind::System).with_note("eval");
    spool.append(eval.with("steps", 0.0).with("steps_per_s", 9.0));
    spool.sync().unwrap();
    let status = Status::of(&run);
    assert_eq!(
        (status.phase.as_str(), status.of_phase),
        ("target", Some((7, 20)))
    );
    assert_eq!(status.step, 0);
    // The next launch has no steps yet.
    spool.append(
        Row::new(0, Kind::System)
            .with_note("planning")
            .with("steps", 0.0),
    );
    spool.sync().unwrap();
    let status = Status::of(&run);
    assert_eq!((status.phase.as_str(), status.of_phase), ("planning", None));
    assert_eq!(status.loss, Some(100.0 / 41.0));
}

#[test]
fn a_run_of_another_machine_is_reported_as_far_as_known() {
    let (_dir, run) = run("x");
    let logs = run.join("logs");
    fs::create_dir(&logs).unwrap();
    fs::write(logs.join("lock"), "process 7 on elsewhere\n").unwrap();
    let status = Status::of(&run);
    assert_eq!(status.state, State::Killed);
    assert!(
        status
            .note
            .unwrap()
            .starts_with("its launcher (process 7 on elsewhere) exited without a message")
    );
    let machine = format!("{{\"step\":3,\"kind\":\"system\",\"time\":{}}}\n", now());
    fs::write(run.join("machine.jsonl"), machine).unwrap();
    let status = Status::of(&run);
    assert_eq!(status.state, State::Running);
    let note = "it seems to run on elsewhere; its lock cannot be seen from here";
    assert_eq!(status.note.as_deref(), Some(note));
}

#[test]
fn unreadable_files_are_named_and_the_rest_is_read() {
    let (_dir, run) = run("x");
    fs::write(run.join("config.toml"), "name = ").unwrap();
    fs::write(run.join("metrics.jsonl"), "junk\n\n{}\n").unwrap();
    fs::remove_file(run.join("system.jsonl")).unwrap();
    fs::create_dir(run.join("system.jsonl")).unwrap();
    fs::create_dir_all(run.join("logs/lock")).unwrap();
    fs::write(run.join("summary.json"), "").unwrap();
    let status = Status::of(&run);
    assert_eq!(
        (status.state, status.loss, status.steps),
        (State::Done, None, None)
    );
    let problems = status.problems.join("\n");
    for part in [
        "config.toml: is not a readable run file",
        "metrics.jsonl: no row can be read: ",
        "system.jsonl: ",
        "logs/lock: ",
    ] {
        assert!(problems.contains(part), "{part}: {problems}");
    }
    // A pipe without a writer does not block.
    fs::remove_file(run.join("metrics.jsonl")).unwrap();
    rustix_fifo(&run.join("metrics.jsonl"));
    let problems = Status::of(&run).problems.join("\n");
    assert!(problems.contains("metrics.jsonl: "), "{problems}");
}

fn rustix_fifo(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status();
    assert!(made.unwrap().success());
}

#[test]
fn runs_are_found_where_they_lie_and_once() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    make(&root.join("b"), 0);
    make(&root.join("deep/er/a"), 0);
    make(&root.join("too/deep/to/be/looked/for"), 0);
    make(&root.join(".hidden"), 0);
    fs::create_dir(root.join("foreign")).unwrap();
    fs::write(root.join("foreign/file"), "").unwrap();
    fs::write(root.join("file"), "").unwrap();
    symlink(root.join("b"), root.join("a-link")).unwrap();
    symlink(root, root.join("loop")).unwrap();
    let (_sweep, path) = sweep();
    fs::rename(path, root.join("s")).unwrap();
    let listing = Listing::of(root).unwrap();
    let found: Vec<String> = listing
        .found
        .iter()
        .map(|listed| match listed {
            Listed::Run(run) => run.path.strip_prefix(root).unwrap().display().to_string(),
            Listed::Sweep(sweep) => {
                let names = sweep
                    .members
                    .iter()
                    .map(|run| run.path.file_name().unwrap());
                let names: Vec<_> = names.map(|name| name.to_str().unwrap()).collect();
                format!(
                    "{}: {}",
                    sweep.path.file_name().unwrap().display(),
                    names.join(" ")
                )
            }
        })
        .collect();
    assert_eq!(found, ["b", "deep/er/a", "s: seed=0 seed=1 seed=2"]);
    assert!(listing.problems.is_empty(), "{:?}", listing.problems);
    assert_eq!(Listing::of(&root.join("b")).unwrap().found.len(), 1);
    for (name, found) in [("file", "a file"), ("none", "nothing")] {
        let path = root.join(name);
        assert_eq!(
            Listing::of(&path).unwrap_err().to_string(),
            format!(
                "{}: expected a directory with runs, found {found}; give one, like runs",
                path.display()
            )
        );
    }
}

#[test]
fn a_sweep_counts_its_runs() {
    let (_dir, path) = sweep();
    let sweep = || match Listing::of(&path).unwrap().found.pop() {
        Some(Listed::Sweep(sweep)) => sweep,
        other => panic!("{other:?}"),
    };
    fs::write(path.join("seed=0/summary.json"), "{}").unwrap();
    let killed = sweep();
    assert_eq!(killed.state, State::Killed);
    assert!(
        killed
            .note
            .unwrap()
            .starts_with("1 done, 1 killed, 1 waiting; its launcher exited without a message")
    );
    let lock = Lock::take(&path.join("logs")).unwrap();
    let running = sweep();
    assert_eq!(running.state, State::Running);
    assert_eq!(running.note.as_deref(), Some("1 done, 1 killed, 1 waiting"));
    lock.leave(&word(State::Stopped, "")).unwrap();
    drop(lock);
    assert_eq!(sweep().state, State::Stopped);
    fs::write(path.join("sweep.json"), "").unwrap();
    let damaged = sweep();
    assert_eq!((damaged.members.len(), damaged.problems.len()), (0, 1));
}

#[test]
fn a_word_that_is_too_long_is_cut() {
    let line = word(State::Failed, &"é".repeat(10_000));
    assert!(line.len() < 2000, "{}", line.len());
    assert!(serde_json::from_str::<LastWord>(&line).is_ok());
    let dir = tempfile::tempdir().unwrap();
    let spool = Spool::start(dir.path(), &Mark::default(), 0).unwrap();
    drop(spool);
    fs::write(dir.path().join("config.toml"), "name = \"x\"\n").unwrap();
    Lock::take(&dir.path().join("logs"))
        .unwrap()
        .leave("no word of a launcher")
        .unwrap();
    assert_eq!(Status::of(dir.path()).state, State::Killed);
}
