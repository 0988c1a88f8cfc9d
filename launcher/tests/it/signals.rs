//! Signals to the launcher, and its death.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use spd_checkpoint::newest;

use crate::both::is_gone;
use crate::scratch::{
    Ended, Running, Scratch, assert_goes, end, launch, names, start, wait_for_file, wait_until,
    wait_until_it_catches,
};

/// Longer than the time within which a second signal counts as the first.
const A_WHILE: Duration = Duration::from_millis(400);

fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// The same command, run by another program.
fn run_by(program: &[&str], inner: &Command) -> Command {
    let mut command = Command::new(program[0]);
    command
        .args(&program[1..])
        .arg(inner.get_program())
        .args(inner.get_args());
    command.current_dir(inner.get_current_dir().unwrap());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Sends a signal to a launcher whose rank is up, and waits for the end of both.
fn interrupted(behaviour: &str, arguments: &[&str], signals: &[Signal]) -> (Scratch, Ended) {
    let scratch = Scratch::new();
    // The tests may run with SIGHUP ignored, as under nohup.
    let launcher = start(run_by(
        &["env", "--default-signal=HUP"],
        &scratch.run(behaviour, arguments),
    ));
    let rank = scratch.rank_pid();
    for (at, signal) in signals.iter().enumerate() {
        if at > 0 {
            // Since the first signal was handled.
            launcher.has_said("25 s at most; ");
            thread::sleep(A_WHILE);
        }
        send(launcher.id(), *signal);
    }
    let ended = end(launcher);
    assert!(is_gone(rank));
    (scratch, ended)
}

#[test]
fn a_request_to_stop_is_passed_on_and_the_run_continues_later() {
    for signal in [Signal::INT, Signal::TERM, Signal::USR1, Signal::HUP] {
        let (scratch, ended) = interrupted("polite", &[], &[signal]);
        assert_eq!(ended.code, Some(3), "{}", ended.stderr);
        assert!(
            ended
                .stderr
                .contains(": the rank saves and exits, 25 s at most;"),
            "{}",
            ended.stderr
        );
        // The saved step is one, not that of the last heartbeat. An earlier row may be printed
        // meanwhile.
        let told: Vec<&str> = ended
            .stderr
            .lines()
            .skip_while(|line| !line.starts_with("SIG"))
            .filter(|line| !line.starts_with("decomposing"))
            .collect();
        assert_eq!(
            told[1..],
            ["stopped after step 120, which is saved; the same command goes on"]
        );
        assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
    }
}

// Ten thousand runs are checked for a second or more before the first starts.
#[test]
fn a_request_to_stop_works_while_runs_are_prepared() {
    for after in [Duration::ZERO, Duration::from_millis(50), A_WHILE] {
        let scratch = Scratch::new();
        let launcher = start(scratch.sweep("polite", &["--seeds", "0..10000"]));
        wait_until_it_catches(launcher.id(), Signal::TERM);
        thread::sleep(after);
        send(launcher.id(), Signal::TERM);
        let ended = end(launcher);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(3), ""));
        assert_eq!(
            ended.stderr,
            "stopped during preparation; nothing new is saved, and the same command goes on\n"
        );
        assert!(scratch.names().is_empty(), "{:?}", scratch.names());
    }
}

#[test]
fn a_request_to_stop_works_while_text_is_tokenized() {
    let scratch = Scratch::new();
    let text = fs::File::create_new(scratch.path().join("text")).unwrap();
    text.set_len(4 << 30).unwrap();
    let words = ["tokenize", "text", "--tokenizer", "bytes", "--out", "data"];
    let launcher = start(scratch.launcher(&words));
    wait_for_file(&scratch.path().join("data/.partial/train"));
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(3), ""));
    // It may have printed progress before.
    let last = "stopped; the same command goes on\n";
    assert!(ended.stderr.ends_with(last), "{}", ended.stderr);
    assert!(!scratch.path().join("data/train").try_exists().unwrap());
}

// Commands that cannot be continued end by the signal's default action.
#[test]
fn a_command_that_saves_nothing_dies_of_the_signal() {
    let scratch = Scratch::new();
    let words = [
        "bench",
        "tiny-tms",
        "--steps",
        "100000000",
        "--out",
        "lines",
    ];
    let mut launcher = start(scratch.launcher(&words));
    wait_for_file(&scratch.path().join("lines"));
    send(launcher.id(), Signal::TERM);
    let status = launcher.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()));
}

#[test]
fn a_stop_that_saved_nothing_says_so() {
    let (_scratch, ended) = interrupted("unsaved", &[], &[Signal::TERM]);
    assert_eq!(ended.code, Some(3));
    let last = ended.stderr.lines().last();
    assert_eq!(
        last,
        Some(
            "stopped after step 1 (decomposing); nothing new is saved, and the same command goes on"
        )
    );
}

#[test]
fn an_ignored_sighup_stays_ignored() {
    let scratch = Scratch::new();
    let ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"];
    let mut launcher = start(run_by(&ignoring, &scratch.run("polite", &[])));
    scratch.rank_pid();
    send(launcher.id(), Signal::HUP);
    thread::sleep(A_WHILE);
    assert!(launcher.try_wait().unwrap().is_none());
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3));
    assert!(!ended.stderr.contains("SIGHUP"), "{}", ended.stderr);
}

#[test]
fn a_second_signal_kills() {
    for (second, code, name) in [(Signal::INT, 130, "SIGINT"), (Signal::TERM, 143, "SIGTERM")] {
        let (_scratch, ended) = interrupted("stubborn", &[], &[Signal::INT, second]);
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        assert!(
            ended
                .stderr
                .contains(&format!("killed by a second signal ({name})")),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn a_rank_that_ignores_the_request_is_killed_after_the_grace_period() {
    let (_scratch, ended) = interrupted("stubborn", &["--grace", "1"], &[Signal::TERM]);
    assert_eq!(ended.code, Some(1));
    assert!(
        ended
            .error()
            .contains(" did not exit within 1 s of being asked, after step 1 (decomposing), ")
    );
    assert!(
        ended
            .error()
            .ends_with("and was killed; --grace gives it longer"),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_stopped_rank_is_not_restarted() {
    let (_scratch, ended) = interrupted("polite", &["--restarts", "5"], &[Signal::TERM]);
    assert_eq!(ended.code, Some(3));
    assert!(!ended.stderr.contains("started again"));
}

/// A long real run that is asked to stop while its newest progress row contains `doing`, and its
/// result.
fn stopped_while(doing: &str, set: &[&str]) -> (Scratch, Ended) {
    let scratch = Scratch::new();
    let short = [
        "train.batch_size=64",
        "eval.batch_size=64",
        "target.train.steps=20",
    ];
    let mut command = scratch.real("tms_5-2.toml", "runs/x", &[&short[..], set].concat());
    command.args(["--threads", "1"]);
    let launcher = start(command);
    let rows = || fs::read_to_string(scratch.run_dir().join("system.jsonl")).unwrap_or_default();
    wait_until(doing, || {
        rows().lines().last().is_some_and(|row| row.contains(doing))
    });
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    (scratch, ended)
}

// Evaluations and a warm-up that would take hours. The trainer's tests check the state after a stop
// in each of them.
#[test]
fn a_request_to_stop_works_in_an_evaluation() {
    let (scratch, ended) = stopped_while("\"note\":\"eval\"", &["eval.batches=1000000000"]);
    let last = "stopped before the first step of the target, and its start is saved; the same command goes on";
    assert_eq!(ended.stderr.lines().last(), Some(last));
    assert!(!ended.stderr.contains("step 0:"), "{}", ended.stderr);
    let targets = names(&scratch.path().join("cache/targets"));
    let kept = scratch.path().join("cache/targets").join(&targets[0]);
    assert_eq!(names(&kept.join("checkpoints")), ["step-00000000"]);
}

#[test]
fn a_request_to_stop_works_in_the_warm_up() {
    let set = [
        "eval.batches=1",
        "train.faithfulness_warmup.steps=1000000000",
    ];
    let (scratch, ended) = stopped_while("\"note\":\"warmup\"", &set);
    let last = ended.stderr.lines().last().unwrap();
    let updates = last.strip_prefix("stopped after update ").and_then(|rest| {
        rest.strip_suffix(" of the warm-up, which is saved; the same command goes on")
    });
    let updates: u64 = updates.expect(last).parse().unwrap();
    let newest = newest(&scratch.run_dir().join("checkpoints")).unwrap();
    let newest = newest.snapshot.unwrap();
    assert_eq!((newest.step, &newest.meta["phase"]), (0, &"warmup".into()));
    assert_eq!(newest.meta["warmup_updates"], updates);
}

// Nothing but the channel ends this rank, since the kernel does not kill it with its parent.
#[test]
fn a_rank_exits_when_its_channel_closes() {
    let scratch = Scratch::new();
    assert_eq!(launch(scratch.run("fail", &[])).code, Some(1));
    fs::remove_file(scratch.run_dir().join("system.jsonl")).unwrap();
    let (launcher, channel) = UnixStream::pair().unwrap();
    let mut command = scratch.launcher(&["rank", "--run-dir", "runs/x", "--threads", "1"]);
    command.env("SPD_CHANNEL", "stdin").process_group(0);
    let mut rank = Running::of(command.stdin(OwnedFd::from(channel)));
    drop(command);
    wait_for_file(&scratch.run_dir().join("system.jsonl"));
    // It sends heartbeats.
    let mut beat = [0; 8];
    (&launcher).read_exact(&mut beat).unwrap();
    assert_eq!(&beat, b"{\"beat\":");
    assert!(rank.try_wait().unwrap().is_none());
    drop(launcher);
    rank.wait().unwrap();
}

#[test]
fn a_stopped_rank_is_reported_and_continues() {
    let scratch = Scratch::new();
    let launcher = start(scratch.run("polite", &[]));
    let rank = scratch.rank_pid();
    launcher.has_said("decomposing  step 1/9");
    // An earlier pause does not count.
    thread::sleep(A_WHILE);
    send(rank, Signal::STOP);
    launcher.has_said("rank 0 is stopped ");
    send(rank, Signal::CONT);
    launcher.has_said("rank 0 makes progress again");
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(3), "{}", ended.stderr);
    let named = format!(
        "rank 0 is stopped (process {rank}; `kill -CONT {rank}` lets it go on): nothing for "
    );
    let since = " seconds after step 1 (decomposing), its longest pause there before was ";
    assert!(
        ended.stderr.contains(&named) && ended.stderr.contains(since),
        "{}",
        ended.stderr
    );
}

/// The grace period is not the cause: a stopped rank cannot exit.
#[test]
fn a_stopped_rank_that_is_asked_to_exit_is_reported_as_stopped() {
    let scratch = Scratch::new();
    let launcher = start(scratch.run("polite", &["--grace", "1"]));
    let rank = scratch.rank_pid();
    send(rank, Signal::STOP);
    let stat = format!("/proc/{rank}/stat");
    wait_until("that it is stopped", || {
        fs::read_to_string(&stat).unwrap().contains(") T ")
    });
    send(launcher.id(), Signal::TERM);
    let ended = end(launcher);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let said = format!(
        "rank 0 is stopped (process {rank}; `kill -CONT {rank}` lets it go on) before it can leave"
    );
    assert!(ended.stderr.contains(&said), "{}", ended.stderr);
    let error = ended.error();
    // Its step is random.
    assert!(
        error.contains(" was stopped by a signal and could not exit within 1 s of being asked, ")
            && error.ends_with(": it was killed; `kill -CONT` lets a stopped process go on"),
        "{error}"
    );
    assert_goes(rank);
}

// Only Linux kills the ranks.
#[cfg(target_os = "linux")]
#[test]
fn no_rank_survives_its_launcher() {
    let scratch = Scratch::new();
    let mut launcher = start(scratch.run("stubborn", &[]));
    let rank = scratch.rank_pid();
    assert!(!is_gone(rank));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert_goes(rank);
    // No cleanup is needed.
    assert_eq!(launch(scratch.run("done", &[])).code, Some(0));
}
