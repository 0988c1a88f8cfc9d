//! A process that saves in a loop is killed repeatedly.

use std::env;
use std::io::{BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use spd_checkpoint::{Lock, Writer, newest};

use crate::sample;

/// Environment variable of the child: its run directory.
const RUN: &str = "SPD_TEST_KILLED_RUN";

const KILLS: u64 = 20;

#[test]
fn after_every_kill_the_newest_is_good_and_no_reported_save_is_lost() {
    let run = tempfile::tempdir().unwrap();
    let mut newest_step = 0;
    for kill in 0..KILLS {
        // Coprime with the range, so that the kills spread over the duration of a write.
        let life = Duration::from_micros(kill * 17_389 % 60_000);
        // On a busy machine a child saves nothing in so short a life.
        let saved = run_and_kill(run.path(), kill % 4 == 3, life);
        let _lock = Lock::take(run.path()).unwrap();
        let found = newest(&run.path().join("checkpoints")).unwrap();
        assert!(
            found.set_aside.is_empty(),
            "kill {kill}: {:?}",
            found.set_aside
        );
        let step = found.snapshot.as_ref().map_or(0, |snapshot| snapshot.step);
        assert!(
            found
                .snapshot
                .is_none_or(|snapshot| snapshot == sample(step)),
            "kill {kill}"
        );
        assert!(
            step >= newest_step && step >= saved,
            "kill {kill}: step {step} after {newest_step}, {saved} was reported"
        );
        newest_step = step;
    }
    assert!(newest_step > 0, "no child saved anything");
}

/// Runs the child for `life` after it has begun, or after its first report where `has_saved`; returns
/// the last step that it reported.
fn run_and_kill(run: &Path, has_saved: bool, life: Duration) -> u64 {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "killed::saves_until_it_is_killed", "--nocapture"])
        .env(RUN, run)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    assert!(
        lines.any(|line| line.ends_with("has begun")),
        "the child did not start"
    );
    let step = |line: String| line.strip_prefix("saved ")?.parse().ok();
    let first = if has_saved {
        lines.find_map(step)
    } else {
        None
    };
    thread::sleep(life);
    child.kill().unwrap();
    child.wait().unwrap();
    lines.filter_map(step).last().or(first).unwrap_or(0)
}

/// The child process; does nothing in an ordinary run of the tests.
#[test]
fn saves_until_it_is_killed() {
    let Ok(run) = env::var(RUN) else { return };
    let run = Path::new(&run);
    let root = run.join("checkpoints");
    let lock = Lock::take(run).unwrap();
    lock.sweep(&root).unwrap();
    let mut step = newest(&root)
        .unwrap()
        .snapshot
        .map_or(0, |snapshot| snapshot.step);
    let mut writer = Writer::spawn(&root, NonZeroUsize::new(2).unwrap(), None).unwrap();
    let mut reported = step;
    println!("\nhas begun");
    loop {
        step += 1;
        writer.submit(|to| *to = sample(step), |_| Ok(()));
        while let Some(outcome) = writer.poll() {
            outcome.unwrap();
            reported += 1;
            println!("saved {reported}");
        }
    }
}
