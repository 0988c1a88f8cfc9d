//! Several ranks: what they refuse, which one is named when it dies, stops or hangs, and that none
//! survives.

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::both::children;
use crate::scratch::{
    Running, Scratch, assert_goes, end, launch, send, start, wait_until, wait_until_it_trains,
};

/// A run of some seconds in four shards.
const LONG: &[&str] = &[
    "train.steps=200000",
    "train.batch_size=64",
    "train.shards=4",
    "target.train.steps=50",
    "eval.every=100000",
    "eval.batches=1",
    "eval.batch_size=64",
];

/// Waits until a run has finished a step, and returns its ranks.
fn ranks_at_work(scratch: &Scratch, launcher: u32) -> Vec<u32> {
    wait_until_it_trains(&scratch.path().join("r"));
    children(launcher)
}

#[test]
fn numbers_of_ranks_that_cannot_share_a_batch_are_refused() {
    let scratch = Scratch::new();
    for (set, cpus, expected) in [
        (
            "train.shards=4",
            "3",
            "--cpus 3: its batches are cut into 4 shards, which 1, 2 or 4 ranks can share, and 3 cannot",
        ),
        (
            "train.shards=6",
            "2",
            "--cpus 2: its batches are cut into 6 shards, which 1 or 6 ranks can share, and 2 cannot",
        ),
        (
            "train.batch_size=30",
            "4",
            "--cpus 4: expected a divisor of the rows of a batch, batch_size = 30, found 4",
        ),
        (
            "eval.batch_size=30",
            "4",
            "--cpus 4: expected a divisor of the rows of a batch, eval.batch_size = 30, found 4",
        ),
    ] {
        let mut command = scratch.real("tms_5-2.toml", "r", &["train.batch_size=96", set]);
        command.args(["--cpus", cpus]);
        let ended = launch(command);
        assert_eq!(
            (ended.code, ended.error()),
            (Some(2), expected),
            "{}",
            ended.stderr
        );
    }
    let shards = |set: &[&str]| launch(scratch.real("tms_5-2.toml", "r", set)).stderr;
    let line = shards(&["train.shards=5", "train.batch_size=64"]);
    let expected = "expected a divisor of the rows of a batch, batch_size = 64, found 5";
    assert!(line.contains(expected), "{line}");
    let line = shards(&[
        "train.shards=8",
        "train.batch_size=64",
        "eval.batch_size=12",
    ]);
    let expected = "expected a multiple of shards = 8 in [train], found 12";
    assert!(line.contains(expected), "{line}");
    for arguments in [["--cpus", "0"], ["--cpus", "1000"]] {
        let mut command = scratch.real("tms_5-2.toml", "r", &[]);
        command.args(arguments);
        assert_eq!(launch(command).code, Some(2));
    }
    assert!(!scratch.names().contains(&"r".to_owned()));
}

/// A run keeps the number of shards that it began with, for any number of ranks.
#[test]
fn a_run_keeps_its_shards() {
    let scratch = Scratch::new();
    let set = [
        "train.steps=20",
        "train.batch_size=64",
        "target.train.steps=50",
        "eval.batches=1",
        "checkpoint.every=5",
    ];
    let by = |ranks: &str, out: &str, more: &[&str]| {
        let mut command = scratch.real("tms_5-2.toml", out, &set);
        command.args(["--cpus", ranks]).args(more);
        launch(command)
    };
    let first = by("4", "r", &[]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert!(
        first
            .stdout
            .contains("CPU, 4 ranks of 1 thread; each batch in 4 shards"),
        "{}",
        first.stdout
    );
    let resolved = fs::read_to_string(scratch.path().join("r/config.toml")).unwrap();
    assert!(resolved.contains("\nshards = 4\n"), "{resolved}");
    assert_eq!(by("1", "r", &[]).code, Some(0));
    let refused = by("3", "r", &[]);
    assert_eq!(refused.code, Some(2));
    let line = "--cpus 3: its batches are cut into 4 shards, which 1, 2 or 4 ranks can share, and 3 cannot";
    assert_eq!(refused.error(), line);
    // A run of one rank does not mention shards.
    assert_eq!(by("1", "one", &[]).code, Some(0));
    let resolved = fs::read_to_string(scratch.path().join("one/config.toml")).unwrap();
    assert!(!resolved.contains("shards"), "{resolved}");
    assert_eq!(
        by("2", "one", &[]).error(),
        "--cpus 2: its batches are one shard, for one rank; a run by 2 begins with train.shards = 2, by --fresh or another --out"
    );
}

#[test]
fn a_dead_rank_is_named_and_the_others_are_killed() {
    for (rank, signal, name) in [
        (0, Signal::KILL, "SIGKILL"),
        (1, Signal::ABORT, "SIGABRT"),
        (3, Signal::ILL, "SIGILL"),
    ] {
        let scratch = Scratch::new();
        let mut command = scratch.real("tms_5-2.toml", "r", LONG);
        command.args(["--cpus", "4"]);
        let launcher = start(command);
        let ranks = ranks_at_work(&scratch, launcher.id());
        assert_eq!(ranks.len(), 4);
        send(ranks[rank], signal);
        ranks.iter().for_each(|&rank| assert_goes(rank));
        let ended = end(launcher);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        let who = format!("rank {rank} (pid {})", ranks[rank]);
        let error = ended.error();
        assert!(error.starts_with(&who) && error.contains(name), "{error}");
        assert!(!ended.stderr.contains("because of it"), "{}", ended.stderr);
    }
}

#[test]
fn a_failed_rank_is_named_with_its_code_or_message() {
    for (behaviour, words) in [
        (
            "one_exits",
            " exited with code 3 after step 4 (decomposing)",
        ),
        (
            "one_panics",
            " panicked after step 5 (decomposing), which is a bug in spd: index out of bounds",
        ),
        (
            "one_aborts",
            " was killed by signal 6 (SIGABRT) after step 4 (decomposing); it aborted itself, which is a bug",
        ),
    ] {
        let scratch = Scratch::new();
        let mut command = scratch.run(behaviour, &["--cpus", "4"]);
        command.args(["--set", "eval.batch_size=8"]);
        let ended = launch(command);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        let error = ended.error();
        assert!(
            error.starts_with("rank 2 (pid ") && error.contains(words),
            "{error}"
        );
        for rank in 0..4 {
            // A rank that was killed before it wrote anything is gone as well.
            let pid = fs::read_to_string(scratch.run_dir().join(format!("pid{rank}")));
            if let Ok(pid) = pid.unwrap_or_default().trim().parse() {
                assert_goes(pid);
            }
        }
    }
}

#[test]
fn no_rank_survives_its_launcher() {
    for with_a_rank in [false, true] {
        let scratch = Scratch::new();
        let mut command = scratch.real("tms_5-2.toml", "r", LONG);
        command.args(["--cpus", "4"]);
        let mut launcher = start(command);
        let ranks = ranks_at_work(&scratch, launcher.id());
        if with_a_rank {
            send(ranks[2], Signal::KILL);
        }
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        ranks.iter().for_each(|&rank| assert_goes(rank));
    }
}

/// A running launch with several ranks, and its output as JSON lines.
struct AtWork {
    scratch: Scratch,
    launcher: Running,
    ranks: Vec<u32>,
}

impl AtWork {
    fn by(ranks: &str) -> Self {
        let scratch = Scratch::new();
        let mut command = scratch.real("tms_5-2.toml", "r", LONG);
        command.args(["--cpus", ranks, "--json"]);
        let told = fs::File::create_new(scratch.path().join("told")).unwrap();
        let launcher = Running::of(command.stdout(Stdio::null()).stderr(told));
        let ranks = ranks_at_work(&scratch, launcher.id());
        Self {
            scratch,
            launcher,
            ranks,
        }
    }

    /// The lines so far that contain a text.
    fn told(&self, words: &str) -> Vec<String> {
        let told = fs::read_to_string(self.scratch.path().join("told")).unwrap();
        let lines = told.lines().filter(|line| line.contains(words));
        lines.map(str::to_owned).collect()
    }

    /// Waits until a line contains a text, and calls `meanwhile` repeatedly. On a busy machine this
    /// may take a while.
    fn until(&self, words: &str, meanwhile: impl Fn()) {
        wait_until(words, || {
            meanwhile();
            !self.told(words).is_empty()
        });
    }

    /// Asks it to stop, and waits for that.
    fn stop(&mut self) {
        send(self.launcher.id(), Signal::TERM);
        assert_eq!(self.launcher.wait().unwrap().code(), Some(3));
        assert_eq!(self.told("stopped after step ").len(), 1);
    }
}

/// The stopped rank is named, not those that wait for it; none is killed, and all stop together.
#[test]
fn a_stopped_rank_is_named_and_not_those_that_wait() {
    let mut run = AtWork::by("4");
    let look = || thread::sleep(Duration::from_millis(50));
    send(run.ranks[2], Signal::STOP);
    run.until("rank 2 is stopped", look);
    send(run.ranks[2], Signal::CONT);
    run.until("rank 2 makes progress again", look);
    run.stop();
    let named = format!("rank 2 is stopped (process {}; ", run.ranks[2]);
    assert_eq!(run.told(&named).len(), 1);
    assert!(run.told(&named)[0].contains(" (decomposing)"));
    for other in [0, 1, 3] {
        let of_other = run.told(&format!("\"rank {other} "));
        assert!(of_other.is_empty(), "{of_other:?}");
    }
}

#[test]
fn a_loss_that_is_not_finite_stops_all_ranks_at_the_same_step() {
    let scratch = Scratch::new();
    let set = [
        "train.lr=1e30",
        "train.steps=20",
        "checkpoint.every=1",
        "target.train.steps=50",
    ];
    let by = |ranks: &str| {
        let mut command = scratch.real("tms_5-2.toml", &format!("r{ranks}"), &set);
        command.args(["--set", "train.shards=4", "--set", "train.batch_size=64"]);
        command.args(["--cpus", ranks, "--restarts", "2"]);
        let ended = launch(command);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        ended.error().split_once(") ").unwrap().1.to_owned()
    };
    let alone = by("1");
    assert!(
        alone.contains(": step 1: loss/") && alone.contains(" is NaN"),
        "{alone}"
    );
    assert_eq!(by("4"), alone);
}

/// Four ranks print as fast as they can: every line is complete, logs are bounded, and all ranks
/// finish.
#[test]
fn a_flood_of_output_of_four_ranks_is_logged() {
    let scratch = Scratch::new();
    let mut command = scratch.run("flood", &["--cpus", "4", "--set", "eval.batch_size=8"]);
    command.env("FAKE_BYTES", "38000000");
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for rank in 0..4 {
        let log = fs::read(scratch.run_dir().join(format!("logs/rank{rank}.log"))).unwrap();
        let lines = log
            .strip_suffix(b"\n")
            .unwrap()
            .split(|&byte| byte == b'\n');
        let mut count = 0;
        for line in lines {
            assert_eq!(line, b"a line that is long enough to be seen");
            count += 1;
        }
        assert_eq!(count, 1_000_000);
    }
}

/// The limit of open files is the hard one, not the soft one of the shell.
#[test]
fn a_low_limit_of_open_files_is_raised() {
    let scratch = Scratch::new();
    let set = [
        "train.steps=2",
        "train.batch_size=64",
        "target.train.steps=5",
    ];
    let inner = scratch.real("tms_5-2.toml", "r", &set);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -S -n 16; exec \"$@\"", "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    command.args(["--cpus", "4"]).current_dir(scratch.path());
    let ended = launch(command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// A control group below this process's own with less of something than a run needs, if one can be
/// created.
struct Group(std::path::PathBuf);

impl Group {
    fn of_memory(bytes: usize) -> Option<Self> {
        let group = Self::of("memory", "memory.limit_in_bytes", bytes)?;
        // Kernels count kills since 4.13, and with swap there is no lack of memory.
        let counts = fs::read_to_string(group.0.join("memory.oom_control")).ok()?;
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        (counts.contains("\noom_kill ") && swaps.lines().count() < 2).then_some(group)
    }

    fn of(controller: &str, file: &str, most: usize) -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = groups
            .lines()
            .find_map(|line| line.split_once(&format!(":{controller}:/")));
        let own = std::path::Path::new("/sys/fs/cgroup")
            .join(controller)
            .join(own?.1);
        let group = own.join(format!("spd-test-{}", std::process::id()));
        fs::create_dir(&group).ok()?;
        let group = Self(group);
        let limit = fs::File::options().write(true).open(group.0.join(file));
        limit.ok()?.write_all(most.to_string().as_bytes()).ok()?;
        let entered = group.around(std::process::Command::new("true")).status();
        entered
            .is_ok_and(|status| status.success())
            .then_some(group)
    }

    /// A command in the group.
    fn around(&self, inner: std::process::Command) -> std::process::Command {
        let mut command = std::process::Command::new("sh");
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.0.display());
        command.args(["-c", &enter, "sh"]);
        command.arg(inner.get_program()).args(inner.get_args());
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes have exited.
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_lack_of_memory_is_reported() {
    let Some(group) = Group::of_memory(60 << 20) else {
        return spd_testing::skip("control groups");
    };
    let scratch = Scratch::new();
    let mut inner = scratch.real("tms_40-10.toml", "r", &["target.train.steps=50"]);
    inner.args(["--cpus", "4", "--memory", "4GiB", "--restarts", "2"]);
    let mut command = group.around(inner);
    command
        .current_dir(scratch.path())
        .env("SPD_CACHE", scratch.path().join("cache"));
    let ended = launch(command);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let error = ended.error();
    let named = "; the kernel did that for want of memory: the plan needs ";
    assert!(
        error.contains("signal 9 (SIGKILL)") && error.contains(named),
        "{error}"
    );
    assert!(!ended.stderr.contains("started again"), "{}", ended.stderr);
}

#[test]
fn a_lack_of_threads_is_reported() {
    let Some(group) = Group::of("pids", "pids.max", 3) else {
        return spd_testing::skip("control groups");
    };
    let scratch = Scratch::new();
    let mut command = group.around(scratch.real("tms_5-2.toml", "r", &["target.train.steps=50"]));
    command.current_dir(scratch.path());
    let ended = launch(command);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let error = ended.error();
    let named = " (Resource temporarily unavailable (os error 11)); is a limit of threads or memory reached \
                 (ulimit -u, ulimit -v, pids.max of the control group)?";
    assert!(error.ends_with(named), "{error}");
}

/// Only a rank that gets a tenth of its time is reported.
#[test]
fn a_slow_rank_is_reported() {
    let mut run = AtWork::by("2");
    let slow = run.ranks[1];
    run.until(" is slow: ", || {
        send(slow, Signal::STOP);
        thread::sleep(Duration::from_millis(60));
        send(slow, Signal::CONT);
        thread::sleep(Duration::from_millis(6));
    });
    run.stop();
    let who = format!("rank 1 (pid {slow}) is slow: the others wait for it ");
    assert_eq!(run.told(" is slow: "), run.told(&who));
}

/// After a request to any rank, all stop after the same step, and continue from there.
#[test]
fn a_request_to_one_rank_stops_all() {
    let scratch = Scratch::new();
    let mut command = scratch.real("tms_5-2.toml", "r", LONG);
    command.args(["--cpus", "2"]);
    let launcher = start(command);
    let ranks = ranks_at_work(&scratch, launcher.id());
    send(ranks[1], Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains(", which is saved; the same command goes on"),
        "{}",
        ended.stderr
    );
}
