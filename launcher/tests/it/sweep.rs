//! Sweeps: scheduling, output, refusals.

use std::fs;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use spd_checkpoint::atomic::write_file;

use crate::both::is_gone;
use crate::scratch::{Scratch, assert_goes, end, launch, names, start, wait_until};

fn json(scratch: &Scratch) -> Value {
    serde_json::from_slice(&fs::read(scratch.path().join("runs/s/sweep.json")).unwrap()).unwrap()
}

fn read(scratch: &Scratch, file: &str) -> String {
    fs::read_to_string(scratch.path().join("runs/s").join(file))
        .unwrap()
        .trim()
        .to_owned()
}

#[test]
fn a_failed_run_does_not_affect_the_others_and_is_repeated() {
    let scratch = Scratch::new();
    let arguments = ["--seeds", "0..4", "--threads", "3"];
    let ended = launch(scratch.sweep("sweep", &arguments));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let table = ended.stdout.split("tms_5-2: 4 runs\n").last().unwrap();
    assert_eq!(
        table,
        "
  seed  CI error    MMCS    ML2R    L0  time  solved  state
     0         0  1.0000  0.9900  0.75   7 s  yes     done
     1         3  1.0000  0.9900  0.75   7 s  no      done
     2         -       -       -     -     -  -       failed: failed after step 4 (decomposing): loss is NaN at step 5 (runs/s/seed=2/logs/rank0.log)
     3         0  1.0000  0.9900  0.75   7 s  yes     done

  solved 2 of 3 (CI error 0)

results are in runs/s; its page is runs/s/report.html
"
    );
    let told = json(&scratch);
    assert_eq!(told["solved"], "solved 2 of 3 (CI error 0)");
    assert_eq!(told["runs"][2]["values"]["seed"], 2);
    assert_eq!(told["runs"][2]["state"], "failed");
    assert_eq!(told["runs"][3]["results"]["ml2r"], 0.99);
    assert!(
        ended.stderr.contains("seed=2  failed: failed after step 4"),
        "{}",
        ended.stderr
    );

    let first = fs::metadata(scratch.path().join("runs/s/seed=0/summary.json")).unwrap();
    let again = launch(scratch.sweep("sweep_well", &arguments));
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert!(
        again.stdout.contains("3 of them finished before"),
        "{}",
        again.stdout
    );
    assert!(
        again.stdout.contains("solved 3 of 4 (CI error 0)"),
        "{}",
        again.stdout
    );
    let same = fs::metadata(scratch.path().join("runs/s/seed=0/summary.json")).unwrap();
    assert_eq!(first.modified().unwrap(), same.modified().unwrap());
    assert!(
        again
            .stderr
            .lines()
            .all(|line| line.starts_with("seed=2  "))
    );
    assert_eq!(
        names(&scratch.path().join("runs/s")),
        [
            "logs",
            "metrics.jsonl",
            "metrics.times",
            "report.html",
            "seed=0",
            "seed=1",
            "seed=2",
            "seed=3",
            "starts.jsonl",
            "sweep.json",
            "system.jsonl",
            "table.html"
        ]
    );
    let page = read(&scratch, "report.html");
    assert!(page.contains(r#""names":["seed=0","seed=1","seed=2","seed=3"]"#));
}

/// The rows of a sweep: each step, and whether it is the table.
fn rows(scratch: &Scratch) -> Vec<(u64, bool)> {
    let rows = read(scratch, "metrics.jsonl");
    let rows = rows.lines().map(|row| {
        let row: Value = serde_json::from_str(row).unwrap();
        (
            row["step"].as_u64().unwrap(),
            row["sweep/table"].is_object(),
        )
    });
    rows.collect()
}

#[test]
fn trackers_show_a_sweep_as_a_run_of_its_group() {
    let scratch = Scratch::new();
    let arguments = [
        "--seeds",
        "0..4",
        "--threads",
        "3",
        "--tracker",
        "tensorboard",
    ];
    let ended = launch(scratch.sweep("sweep", &arguments));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let said = "tensorboard: all 4 rows are sent";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    // A failed run has no row, and the table follows all others.
    assert_eq!(
        rows(&scratch),
        [(0, false), (1, false), (3, false), (4, true)]
    );
    let first = read(&scratch, "metrics.jsonl");
    assert!(
        first.starts_with(
            r#"{"step":0,"kind":"eval","sweep/seed":0.0,"ci_error":0.0,"mmcs":0.99998,"ml2r":0.99,"eval/l0/a":0.5,"eval/l0/b":0.25,"seconds":7.4,"l0":0.75}"#
        ),
        "{first}"
    );
    assert!(first.contains("| seed | CI error |") && first.contains("failed: failed after step 4"));
    assert!(read(&scratch, "system.jsonl").contains(r#""kind":"alert","note":"seed=2  failed"#));
    let config = read(&scratch, "seed=3/config.toml");
    assert!(
        config.contains("group = \"tms_5-2\"") && config.contains("name = \"tms_5-2 seed=3\""),
        "{config}"
    );

    // A failed run has its row in its position once it is done, and later rows that were sent are
    // discarded.
    let again = launch(scratch.sweep("sweep_well", &arguments));
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert!(again.stderr.contains("tensorboard: all 5 rows are sent"));
    assert_eq!(
        rows(&scratch),
        [0, 1, 2, 3, 4].map(|step| (step, step == 4))
    );
    let events = |scratch: &Scratch| {
        let dir = scratch.path().join("runs/s/tensorboard");
        let of = |name| (fs::metadata(dir.join(&name)).unwrap().len(), name);
        let files = names(&dir)
            .into_iter()
            .filter(|name| name.starts_with("events"));
        files.map(of).collect::<Vec<_>>()
    };
    let (whole, sent) = (read(&scratch, "metrics.jsonl"), events(&scratch));
    assert_eq!(sent.len(), 1, "{sent:?}");

    // A finished sweep sends nothing more, and neither does a shipped one. The ranks of this test
    // write no rows.
    let launched = launch(scratch.sweep("sweep_well", &arguments));
    let shipped = launch(scratch.launcher(&["ship", "runs/s"]));
    for (ended, code) in [(launched, 0), (shipped, 1)] {
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        let said = "tensorboard: all 5 rows were there before";
        assert!(ended.stderr.contains(said), "{}", ended.stderr);
        assert_eq!(read(&scratch, "metrics.jsonl"), whole);
        assert_eq!(events(&scratch), sent);
    }
}

#[test]
fn a_sweep_is_shipped_with_its_runs_to_given_trackers() {
    let scratch = Scratch::new();
    let set = ["train.steps=6", "train.batch_size=64", "eval.batches=1"];
    let mut command = scratch.real("tms_5-2.toml", "runs/s", &set);
    command.args(["--set", "target.train.steps=5", "--seeds", "0..2"]);
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = launch(scratch.launcher(&["ship", "runs/s"]));
    assert_eq!(ended.code, Some(2));
    assert!(
        ended
            .error()
            .starts_with("runs/s/seed=0: its config.toml names no tracker"),
        "{}",
        ended.stderr
    );
    let ended = launch(scratch.launcher(&["ship", "runs/s", "--tracker", "tensorboard"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let told = ended.stderr.matches("tensorboard: all ").count();
    assert_eq!(told, 3, "{}", ended.stderr);
    for of in ["seed=0", "seed=1", "."] {
        let events = names(&scratch.path().join("runs/s").join(of).join("tensorboard"));
        assert!(events.iter().any(|name| name.starts_with("events")), "{of}");
    }

    let file = scratch.path().join("runs/s/sweep.json");
    write_file(&file, b"{").unwrap();
    let ended = launch(scratch.launcher(&["ship", "runs/s"]));
    assert_eq!(ended.code, Some(2));
    assert_eq!(
        ended.error(),
        "runs/s/sweep.json: is not JSON: EOF while parsing an object at line 1 column 1; the command of the sweep makes it again"
    );
    let none = r#"{"name": "x", "runs": [{"directory": "seed=7"}]}"#;
    write_file(&file, none.as_bytes()).unwrap();
    let ended = launch(scratch.launcher(&["ship", "runs/s"]));
    assert_eq!(
        (ended.code, ended.error()),
        (
            Some(2),
            "runs/s/sweep.json: none of its runs has begun, so there is nothing to send"
        )
    );
}

#[test]
fn threads_are_shared_among_concurrent_runs() {
    // All need the same target: one trains it with all threads while the others wait. With
    // `--sweep`, each has its own.
    let own = "target.train.seed=0,1,2";
    for (arguments, threads, beside) in [
        (
            &["--seeds", "0..3", "--threads", "2"][..],
            "1, for the target 2",
            2,
        ),
        (
            &["--seeds", "0..3", "--threads", "5", "--jobs", "2"],
            "2, for the target 5",
            2,
        ),
        (
            &["--seeds", "0..3", "--threads", "3", "--jobs", "1"],
            "3, for the target 3",
            1,
        ),
        (
            &["--seeds", "0..3", "--threads", "9"],
            "3, for the target 9",
            3,
        ),
        (
            &["--sweep", own, "--threads", "9"],
            "3, for the target 3",
            3,
        ),
    ] {
        let scratch = Scratch::new();
        let key = if arguments[0] == "--seeds" {
            "seed"
        } else {
            "target.train.seed"
        };
        let mut command = scratch.sweep("sweep_well", arguments);
        command.env("FAKE_BESIDE", beside.to_string());
        let ended = launch(command);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        for seed in 0..3 {
            let told = read(&scratch, &format!("{key}={seed}/threads"));
            assert_eq!(told, format!("threads {threads}"));
            let found: usize = read(&scratch, &format!("{key}={seed}/beside"))
                .parse()
                .unwrap();
            assert!((1..=beside).contains(&found), "{found} at a time");
        }
        assert_eq!(
            read(&scratch, &format!("{key}=0/beside")),
            beside.to_string()
        );
    }
}

#[test]
fn every_combination_is_a_separate_run() {
    let scratch = Scratch::new();
    let arguments = [
        "--sweep",
        "train.lr=1e-3,{ start = 2e-3, shape = \"cosine\" }",
        "--seeds",
        "3,5",
    ];
    let ended = launch(scratch.sweep("done", &arguments));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let second = "train.lr=__start___2e-3__shape____cosine___";
    assert_eq!(
        names(&scratch.path().join("runs/s")),
        [
            "logs".to_owned(),
            "metrics.jsonl".to_owned(),
            "metrics.times".to_owned(),
            "report.html".to_owned(),
            "starts.jsonl".to_owned(),
            "sweep.json".to_owned(),
            "system.jsonl".to_owned(),
            "table.html".to_owned(),
            "train.lr=1e-3,seed=3".to_owned(),
            "train.lr=1e-3,seed=5".to_owned(),
            format!("{second},seed=3"),
            format!("{second},seed=5"),
        ]
    );
    let config = read(&scratch, &format!("{second},seed=5/config.toml"));
    assert!(
        config.contains("seed = 5\n") && config.contains("start = 0.002\n"),
        "{config}"
    );
    assert!(
        ended.stdout.contains("  train.lr  seed  L0  time  state\n"),
        "{}",
        ended.stdout
    );
}

#[test]
fn a_request_to_stop_reaches_all_runs_and_the_command_continues() {
    let scratch = Scratch::new();
    let arguments = ["--seeds", "0..3", "--threads", "2"];
    let launcher = start(scratch.sweep("polite", &arguments));
    let ranks = [0, 1].map(|seed| scratch.rank_pid_of(&format!("runs/s/seed={seed}")));
    let pid = Pid::from_raw(launcher.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(ranks.into_iter().all(is_gone));
    assert!(
        ended
            .stderr
            .contains("SIGTERM: the runs save and exit, 25 s at most;"),
        "{}",
        ended.stderr
    );
    let states: Vec<Value> = (0..3)
        .map(|run| json(&scratch)["runs"][run]["state"].clone())
        .collect();
    assert_eq!(states, ["stopped", "stopped", "waiting"]);
    let again = launch(scratch.sweep("done", &arguments));
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert_eq!(json(&scratch)["runs"][2]["state"], "done");
}

#[test]
fn a_second_signal_kills_all_runs() {
    let scratch = Scratch::new();
    let launcher = start(scratch.sweep("stubborn", &["--seeds", "0..2", "--threads", "2"]));
    let ranks = [0, 1].map(|seed| scratch.rank_pid_of(&format!("runs/s/seed={seed}")));
    let pid = Pid::from_raw(launcher.id().try_into().unwrap()).unwrap();
    for _ in 0..2 {
        kill_process(pid, Signal::INT).unwrap();
        thread::sleep(Duration::from_millis(400));
    }
    let ended = end(launcher);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    ranks.into_iter().for_each(assert_goes);
}

// Only Linux kills the runs.
#[cfg(target_os = "linux")]
#[test]
fn no_run_survives_the_launcher_of_a_sweep() {
    let scratch = Scratch::new();
    let mut launcher = start(scratch.sweep("stubborn", &["--seeds", "0..2", "--threads", "2"]));
    let ranks = [0, 1].map(|seed| scratch.rank_pid_of(&format!("runs/s/seed={seed}")));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    ranks.into_iter().for_each(assert_goes);
}

#[test]
fn invalid_sweeps_are_refused_before_anything_starts() {
    let scratch = Scratch::new();
    let refused = |arguments: &[&str]| {
        let ended = launch(scratch.sweep("done", arguments));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(scratch.names().is_empty(), "nothing is created");
        ended.stderr.replace("error: ", "")
    };
    assert_eq!(
        refused(&["--seeds", "4..4"]),
        "--seeds 4..4: 4..4 has no seeds; the end is excluded, so 4..5 is seed 4\n"
    );
    assert_eq!(
        refused(&["--sweep", "train.stepz=1,2", "--seeds", "0..2"]),
        "--sweep train.stepz: unknown key `stepz` in [train]; did you mean `steps`?\n"
    );
    assert_eq!(
        refused(&["--sweep", "train.steps=10,0,many", "--seeds", "0..2"]),
        "--sweep train.steps: expected a whole number of at least 1, found 0\n\
         --sweep train.steps: expected a whole number of at least 1, found the string \"many\"\n"
    );
    assert_eq!(
        refused(&["--jobs", "2"]),
        "--jobs 2: there is one run; it goes with --seeds or --sweep\n"
    );
    assert_eq!(
        refused(&["--seeds", "0..2", "--set", "seed=1"]),
        "--set seed: --seeds also gives it values; leave one of them out\n"
    );
    assert_eq!(
        refused(&["--sweep", "importance.hidden=[8],(8)"]),
        "--sweep importance.hidden: expected a list of widths of at least 1, such as [16], \
         found the string \"(8)\"\n"
    );
}

#[test]
fn equal_values_are_refused() {
    let scratch = Scratch::new();
    let arguments = [
        "--sweep",
        "train.lr=1e-3,2e-3,0.001",
        "--sweep",
        "train.steps=9,7",
        "--seeds",
        "0..2",
    ];
    let ended = launch(scratch.sweep("done", &arguments));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (
            Some(2),
            "error: --sweep train.lr: 1e-3 and 0.001 give the same run; leave one of them out\n"
        )
    );
    assert!(scratch.names().is_empty(), "nothing is created");
}

// All processes have the same version.
#[cfg(target_os = "linux")]
#[test]
fn a_sweep_survives_the_removal_of_its_executable() {
    let scratch = Scratch::new();
    let path = scratch.path().join("spd-launch");
    // By another process: one that a test beside this starts would hold the new file open for writing, and it could not be run.
    let copied = std::process::Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_spd-launch"))
        .arg(&path)
        .status();
    assert!(copied.unwrap().success());
    let set = ["train.steps=300", "train.batch_size=64", "eval.batches=1"];
    let real = scratch.real("tms_5-2.toml", "runs/s", &set);
    let mut command = std::process::Command::new(&path);
    command
        .args(real.get_args())
        .args(["--set", "target.train.steps=20", "--threads", "1"])
        .args(["--seeds", "0..2"])
        .current_dir(scratch.path())
        .env("SPD_CACHE", scratch.path().join("cache"));
    let launcher = start(command);
    let first = scratch.path().join("runs/s/logs/seed=0.log");
    while fs::metadata(&first).is_err() {
        thread::sleep(Duration::from_millis(5));
    }
    let other = scratch.path().join("other");
    fs::copy("/bin/false", &other).unwrap();
    fs::rename(&other, &path).unwrap();
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    let children = || read(format!("/proc/{0}/task/{0}/children", launcher.id()));
    let named = |child: &str| {
        let of = |what: &str| read(format!("/proc/{child}/{what}"));
        of("cmdline").starts_with("spd-launch\0") && of("comm") == "spd-launch\n"
    };
    // The fork is followed by the exec a moment later.
    wait_until("such a child", || children().split_whitespace().any(named));
    let ended = end(launcher);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn a_sweep_refuses_other_directories() {
    let scratch = Scratch::new();
    launch(scratch.run_at("runs/s", "done", &[]));
    let refused = |scratch: &Scratch| {
        let ended = launch(scratch.sweep("done", &["--seeds", "0..2"]));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        ended.stderr
    };
    assert_eq!(
        refused(&scratch),
        "error: runs/s: is the directory of a single run; try --out\n"
    );
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path().join("runs/s/thesis")).unwrap();
    assert_eq!(
        refused(&scratch),
        "error: runs/s: holds files and no sweep.json, so it is not a sweep; try --out, or, if it is one, \
         put an empty file of that name there: it is written again\n"
    );
    let scratch = Scratch::new();
    launch(scratch.sweep("done", &["--seeds", "0..2"]));
    let other = launch(scratch.sweep("done", &["--seeds", "0..2", "--set", "train.steps=3"]));
    assert_eq!(
        (other.code, other.stderr.lines().next()),
        (
            Some(2),
            Some(
                "error: runs/s/seed=0: holds a run of another config (train.steps: 3 here, 10000 there); \
                 try --out, or --fresh to move it aside"
            )
        )
    );
}

#[test]
fn a_dry_run_of_a_sweep_creates_nothing() {
    let scratch = Scratch::new();
    let arguments = ["--seeds", "0..20", "--threads", "2", "--dry-run"];
    let ended = launch(scratch.sweep("done", &arguments));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stdout.starts_with(
            "tms_5-2: 20 runs\n  run         20 of seed, seed=0 to seed=19; 2 at a time, 1 thread each\n"
        ),
        "{}",
        ended.stdout
    );
    assert!(scratch.names().is_empty());
}
