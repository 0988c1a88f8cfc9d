//! SIGKILL to the launcher, a rank or all of them, at random times and repeatedly, with one, two or
//! four ranks: the run ends with the bits of an undisturbed one.

use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::both::children;
use crate::launch::{LIMIT, wait_until_gone};
use crate::runs::{
    SHARED_MODERN, SHARED_TEXT, SHARED_TMS, SHARED_TOY, TEXT, TOY, Uninterrupted, send,
};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "kills",
    cases: 40,
    columns: &[
        "launcher killed",
        "rank killed",
        "both killed",
        "started again",
        "bit-equal",
    ],
};

/// Maximum kills of one run.
const KILLS: u32 = 8;

#[test]
#[ignore = "minutes; run with --ignored"]
fn killed_runs_give_the_same_bits() {
    let runs = [
        TOY,
        TEXT,
        SHARED_TMS,
        SHARED_TOY,
        SHARED_TEXT,
        SHARED_MODERN,
    ];
    let straight = Uninterrupted::of_each(&runs);
    FIELD.run(|case| {
        let straight = &straight[case.number as usize % straight.len()];
        let cached = case.random.one_in(2);
        case.kind(format!(
            "{}, target {}",
            straight.small.config,
            if cached {
                "trained before"
            } else {
                "trained too"
            }
        ));
        straight.furnish(case.dir(), cached);
        killed(case, straight, |_| {})
    });
}

/// Kills a run repeatedly, until it ends with the bits of the undisturbed one.
///
/// - `more`: arguments of every launch
pub(crate) fn killed(
    case: &mut Case,
    straight: &Uninterrupted,
    more: impl Fn(&mut Command),
) -> Result<(), String> {
    for _ in 0..KILLS {
        let again = case.random.one_in(3);
        let mut command = straight.small.command(case.dir());
        more(&mut command);
        let of_run = straight.small.ranks(&mut case.random);
        command.args(["--cpus", &of_run.to_string()]);
        if again {
            command.args(["--restarts", "3"]);
        }
        let mut running = case.start(command);
        // Short enough that several lives fit into a run.
        thread::sleep(straight.took.mul_f64(0.7 * case.random.part()));
        let launcher = running.child.id();
        let mut ranks = children(launcher);
        // In the order in which they were started.
        ranks.sort_unstable();
        let victim = case.random.below(3);
        let guilty = case.random.below(of_run);
        match victim {
            0 => {}
            1 => ranks
                .iter()
                .skip(guilty)
                .take(1)
                .for_each(|&rank| send(rank, Signal::KILL)),
            _ => ranks.iter().for_each(|&rank| send(rank, Signal::KILL)),
        }
        if victim != 1 {
            send(launcher, Signal::KILL);
            running.child.wait().unwrap();
            ranks.into_iter().for_each(wait_until_gone);
            // A process that was being started when its launcher died is not visible as its child.
            thread::sleep(Duration::from_millis(20));
            case.count(if victim == 0 {
                "launcher killed"
            } else {
                "both killed"
            });
            continue;
        }
        let ended = case.end(running, LIMIT)?;
        match (ended.code()?, ranks.get(guilty).is_none()) {
            (0, false) if ended.stderr.contains("started again") => {
                case.count("rank killed");
                case.count("started again");
            }
            (0, _) => break,
            (1, false) => {
                case.count("rank killed");
                let error = ended.error()?;
                // Earlier ones may have exited by themselves.
                let who = format!("(pid {}) was killed", ranks[guilty]);
                if !error.contains(&who) || !error.contains("SIGKILL") {
                    return Err(format!("expected what killed {who}, found {error}"));
                }
            }
            (code, _) => return Err(format!("leaves with code {code} when its rank is killed")),
        }
    }
    let mut command = straight.small.command(case.dir());
    more(&mut command);
    case.launch(command, &[0])?;
    straight.compare(case.dir())?;
    case.count("bit-equal");
    Ok(())
}
