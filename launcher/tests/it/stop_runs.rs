//! `spd-launch stop`: only the right process gets a signal.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use spd_checkpoint::Lock;

use crate::both::is_gone;
use crate::scratch::{
    Running, Scratch, assert_goes, end, launch, start, wait_until, wait_until_it_trains,
};

const QUICK: &[&str] = &[
    "train.steps=100000000",
    "train.faithfulness_warmup.steps=2",
    "train.batch_size=64",
    "target.train.steps=20",
    "target.train.batch_size=64",
];

#[test]
fn a_run_saves_exits_and_continues_later() {
    let scratch = Scratch::new();
    let run = |steps: &str| {
        let mut command = scratch.real("tms_5-2.toml", "runs/x", QUICK);
        command.args(["--threads", "1", "--set", steps]);
        command
    };
    let child = start(run("checkpoint.every=1000"));
    wait_until_it_trains(&scratch.run_dir());
    let ended = launch(scratch.launcher(&["stop", "runs/x"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let said = ended
        .stdout
        .strip_prefix("runs/x: stopped after step ")
        .unwrap();
    assert!(
        said.ends_with(", which is saved; the same command goes on\n"),
        "{said}"
    );
    let step: u64 = said.split(',').next().unwrap().parse().unwrap();
    assert!(is_gone(child.id()));
    let stopped = end(child);
    assert_eq!(stopped.code, Some(3), "{}", stopped.stderr);

    let child = start(run("checkpoint.every=1000"));
    // Until its launcher holds the run, there is no process to ask.
    let asked = loop {
        let asked = launch(scratch.launcher(&["stop", "runs/x", "--no-wait"]));
        if asked.code == Some(0) {
            break asked.stdout;
        }
        assert!(
            asked
                .error()
                .starts_with("runs/x: does not run; it is stopped"),
            "{}",
            asked.stderr
        );
    };
    assert_eq!(asked, format!("runs/x: asked process {}\n", child.id()));
    let ended = end(child);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    let goes_on = format!("continued from step {step}");
    assert!(ended.stdout.contains(&goes_on), "{}", ended.stdout);
}

#[test]
fn several_runs_are_asked_and_failures_are_reported() {
    let scratch = Scratch::new();
    let children = ["runs/a", "runs/b"].map(|dir| start(scratch.run_at(dir, "polite", &[])));
    for dir in ["runs/a", "runs/b"] {
        scratch.rank_pid_of(dir);
    }
    let ended = launch(scratch.launcher(&["stop", "runs/a", "runs/none", "runs/b/"]));
    assert_eq!(ended.code, Some(2));
    let note = "stopped after step 120, which is saved; the same command goes on";
    assert_eq!(ended.stdout, format!("runs/a: {note}\nruns/b: {note}\n"));
    assert_eq!(
        ended.error(),
        "runs/none: neither a run directory (with config.toml) nor a sweep's (with sweep.json); `spd-launch runs` lists those there are"
    );
    for child in children {
        assert_eq!(end(child).code, Some(3));
    }
    let again = launch(scratch.launcher(&["stop", "runs/a"]));
    let refused = format!("runs/a: does not run; it is stopped: {note}");
    assert_eq!((again.code, again.error()), (Some(2), refused.as_str()));
}

#[test]
fn a_sweep_is_stopped_by_its_launcher() {
    let scratch = Scratch::new();
    let child = start(scratch.sweep("polite", &["--seeds", "0..3", "--threads", "2"]));
    scratch.rank_pid_of("runs/s/seed=0");
    scratch.rank_pid_of("runs/s/seed=1");
    let ended = launch(scratch.launcher(&["stop", "runs/s"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(ended.stdout, "runs/s: 2 stopped, 1 waiting\n");
    assert_eq!(end(child).code, Some(3));
}

#[test]
fn now_ends_a_run_that_does_not_exit() {
    let scratch = Scratch::new();
    let child = start(scratch.run("stubborn", &[]));
    let rank = scratch.rank_pid();
    let ended = launch(scratch.launcher(&["stop", "--now", "runs/x"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stdout
            .starts_with("runs/x: killed by a second signal (SIGTERM) "),
        "{}",
        ended.stdout
    );
    assert_goes(rank);
    assert_eq!(end(child).code, Some(143));
}

#[test]
fn another_user_reads_the_name_of_the_owner() {
    let scratch = Scratch::new();
    let as_nobody = |line: &str| {
        let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups";
        launch(scratch.shell(&format!("{nobody} \"$LAUNCHER\" {line}")))
    };
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    if as_nobody("--version").code != Some(0) {
        return spd_testing::skip("root, setpriv and a program that every user may run");
    }
    let child = start(scratch.run("polite", &[]));
    scratch.rank_pid();
    let ended = as_nobody("stop runs/x");
    let uid = rustix::process::geteuid().as_raw();
    let refused = format!(
        "runs/x: its launcher (process {}) is of user {uid}: that user can stop it, or root",
        child.id()
    );
    assert_eq!((ended.code, ended.error()), (Some(2), refused.as_str()));
    assert!(as_nobody("runs").stdout.contains("runs/x  running "));
    assert_eq!(launch(scratch.launcher(&["stop", "runs/x"])).code, Some(0));
    assert_eq!(end(child).code, Some(3));
}

/// A process that has nothing to do with any run, and a lock file's line that names it.
struct Bystander(Running);

impl Bystander {
    fn new() -> Self {
        Self(Running::of(
            Command::new("sleep").arg("600").stdin(Stdio::null()),
        ))
    }

    fn lives(&self) -> bool {
        !is_gone(self.0.id())
    }
}

// After a launcher takes the lock and before its name is in the file, the file has the line of the
// previous one.
#[test]
fn a_launcher_that_has_just_started_is_asked() {
    let scratch = Scratch::new();
    let logs = scratch.run_dir().join("logs");
    fs::create_dir_all(&logs).unwrap();
    fs::write(scratch.run_dir().join("config.toml"), "name = \"x\"\n").unwrap();
    let before = Lock::take(&logs).unwrap();
    before.leave("{}").unwrap();
    drop(before);
    let lock = logs.join("lock");
    let mut command = Command::new("flock");
    command.arg("-F").arg(&lock).args(["sleep", "600"]);
    let Ok(holds) = Running::try_of(command.stdin(Stdio::null())) else {
        return spd_testing::skip("flock");
    };
    wait_until("the lock", || Lock::holder(&logs).unwrap().unwrap().is_held);
    let named = format!("process {} on {}\n", holds.id(), Lock::host());
    let names_itself = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        let mut file = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(lock)
            .unwrap();
        file.write_all(named.as_bytes()).unwrap();
    });
    let ended = launch(scratch.launcher(&["stop", "runs/x", "--no-wait"]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let asked = format!("runs/x: asked process {}\n", holds.id());
    assert_eq!(ended.stdout, asked);
    names_itself.join().unwrap();
    assert_goes(holds.id());
}

// These lock files name wrong processes: one with a reused process id, and one of another machine.
#[test]
fn a_process_without_the_lock_gets_no_signal() {
    let scratch = Scratch::new();
    let logs = scratch.run_dir().join("logs");
    fs::create_dir_all(&logs).unwrap();
    fs::write(scratch.run_dir().join("config.toml"), "name = \"x\"\n").unwrap();
    let bystander = Bystander::new();
    let pid = bystander.0.id();
    let host = Lock::host();
    let stop = || {
        let ended = launch(scratch.launcher(&["stop", "runs/x"]));
        assert_eq!(
            (ended.code, ended.stdout.as_str()),
            (Some(2), ""),
            "{}",
            ended.stderr
        );
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        ended.error().to_owned()
    };
    assert_eq!(stop(), "runs/x: does not run; it is waiting");
    // A lock that no process holds.
    fs::write(logs.join("lock"), format!("process {pid} on {host}\n")).unwrap();
    assert_eq!(stop(), "runs/x: does not run; it is waiting");
    // A lock that this test holds, with another's name.
    let put = |text: &str| {
        let mut file = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(logs.join("lock"))
            .unwrap();
        file.write_all(text.as_bytes()).unwrap();
    };
    let _lock = Lock::take(&logs).unwrap();
    put(&format!("process {pid} on {host}\n"));
    let not_it = |pid: u32| {
        format!(
            "runs/x: process {pid}, which runs/x/logs/lock names, is not its launcher as seen from here: it may run in a container, or the \
             lock is another machine's; stop it where it was started"
        )
    };
    assert_eq!(stop(), not_it(pid));
    for gone in [4_194_304, u32::MAX, 0] {
        put(&format!("process {gone} on {host}\n"));
        assert_eq!(stop(), not_it(gone));
    }
    put(&format!("process {pid} on elsewhere\n"));
    assert_eq!(
        stop(),
        format!("runs/x: runs on elsewhere, and this is {host}: stop it there")
    );
    for nameless in ["", "\n", "process x on y\n", "\u{1b}[2J\n"] {
        put(nameless);
        let refused = stop();
        let nobody = "runs/x/logs/lock: held by an unknown process; try again";
        let elsewhere = format!("runs/x: runs on y, and this is {host}: stop it there");
        assert!(refused == nobody || refused == elsewhere, "{refused}");
    }
    assert!(bystander.lives());
}
