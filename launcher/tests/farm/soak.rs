//! Runs under faults from start to end: ranks and launchers are killed, stopped, asked to exit,
//! slowed down or started again with another number of ranks, and newest checkpoints are damaged.
//! Each run ends with the bits of an undisturbed one, and launchers do not grow. Scale 1 takes some
//! five minutes; `SPD_FARM_MINUTES=60` an hour.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::both::children;
use crate::launch::{LIMIT, MOST_KIB, held_kib, wait, wait_until_gone};
use crate::runs::{RUN, SHARED_TEXT, SHARED_TMS, SHARED_TOY, Small, Uninterrupted, send, steps};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "soak",
    cases: 60,
    columns: &[
        "rank killed",
        "rank aborted",
        "rank stopped",
        "rank slowed",
        "launcher killed",
        "launcher stopped",
        "asked",
        "damaged",
        "starts",
        "bit-equal",
    ],
};

/// Runs of some ten seconds on one rank.
const RUNS: [Small; 3] = [
    SHARED_TMS.with(&[
        "train.shards=4",
        "train.steps=6000",
        "checkpoint.every=100",
        "eval.every=1000",
    ]),
    SHARED_TOY.with(&["train.steps=1500", "checkpoint.every=25", "eval.every=500"]),
    SHARED_TEXT.with(&[
        "train.batch_size=4",
        "train.shards=4",
        "eval.batch_size=4",
        "train.steps=2500",
        "checkpoint.every=50",
        "eval.every=500",
    ]),
];

/// Maximum faults of a run.
const FAULTS: usize = 12;

/// Maximum time between two faults.
const PAUSE: Duration = Duration::from_secs(2);

/// Maximum open files of a launcher.
const MOST_FILES: usize = 64;

#[test]
#[ignore = "minutes; run with --ignored"]
fn runs_under_faults_give_the_same_bits() {
    let straight = Uninterrupted::of_each(&RUNS);
    FIELD.run(|case| {
        let straight = &straight[case.number as usize % straight.len()];
        case.kind(straight.small.config);
        straight.furnish(case.dir(), true);
        for fault in 0..FAULTS {
            if !life(case, straight, fault)? {
                break;
            }
        }
        case.launch(straight.small.command(case.dir()), &[0])?;
        straight.compare(case.dir())?;
        case.count("bit-equal");
        Ok(())
    });
}

/// A launch until a fault ends it; returns whether the run is unfinished.
fn life(case: &mut Case, straight: &Uninterrupted, fault: usize) -> Result<bool, String> {
    let mut command = straight.small.command(case.dir());
    let ranks = straight.small.ranks(&mut case.random);
    command.args(["--cpus", &ranks.to_string(), "--restarts", "9"]);
    let mut running = case.start(command);
    case.count("starts");
    for _ in fault..FAULTS {
        thread::sleep(PAUSE.mul_f64(case.random.part()));
        if running.child.try_wait().unwrap().is_some() {
            break;
        }
        let launcher = running.child.id();
        let mut of_run = children(launcher);
        of_run.sort_unstable();
        check_growth(launcher)?;
        let Some(&rank) = of_run.get(case.random.below(ranks)) else {
            continue;
        };
        match case.random.below(8) {
            // The launcher restarts the ranks.
            0 => {
                case.count("rank killed");
                send(rank, Signal::KILL);
            }
            1 => {
                case.count("rank aborted");
                send(rank, Signal::ABORT);
            }
            2 => {
                case.count("rank stopped");
                pause(rank, Duration::from_secs(1));
            }
            3 => {
                case.count("rank slowed");
                for _ in 0..40 {
                    pause(rank, Duration::from_millis(20));
                    thread::sleep(Duration::from_millis(5));
                }
            }
            4 => {
                case.count("launcher stopped");
                pause(launcher, Duration::from_secs(1));
            }
            5 => {
                case.count("asked");
                send(launcher, Signal::TERM);
                return match case.end(running, LIMIT)?.code()? {
                    3 => Ok(true),
                    0 => Ok(false),
                    code => Err(format!("leaves with code {code} when it is asked to")),
                };
            }
            kind => {
                send(launcher, Signal::KILL);
                wait(&mut running.child, LIMIT);
                of_run.into_iter().for_each(wait_until_gone);
                thread::sleep(Duration::from_millis(20));
                case.count("launcher killed");
                if kind == 7 && damage_newest(&case.dir().join(RUN)) {
                    case.count("damaged");
                }
                return Ok(true);
            }
        }
    }
    match case.end(running, Duration::from_secs(90))?.code()? {
        0 => Ok(false),
        // Without a new checkpoint it is restarted only once.
        1 => Ok(true),
        code => Err(format!("leaves with code {code}")),
    }
}

fn pause(pid: u32, time: Duration) {
    send(pid, Signal::STOP);
    thread::sleep(time);
    send(pid, Signal::CONT);
}

/// Changes a byte of the newest of several checkpoints; returns whether there were several.
fn damage_newest(run: &Path) -> bool {
    let checkpoints = run.join("checkpoints");
    let [.., _, newest] = &steps(&checkpoints)[..] else {
        return false;
    };
    let path = checkpoints.join(newest).join("tensors.safetensors");
    let mut bytes = spd_files::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    true
}

fn check_growth(launcher: u32) -> Result<(), String> {
    let files = fs::read_dir(format!("/proc/{launcher}/fd")).map_or(0, Iterator::count);
    let held = held_kib(launcher).unwrap_or(0);
    if files > MOST_FILES || held > MOST_KIB {
        return Err(format!("its launcher holds {files} files and {held} KiB"));
    }
    Ok(())
}
