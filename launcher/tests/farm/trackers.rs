//! Slow, wrong or dead trackers, and launchers and ranks killed while they ship: the run is not
//! affected, and after `spd-launch ship` each tracker has the data of an undisturbed run, every row
//! once.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value as Json;

use crate::both::children;
use crate::disks::{may_mount, on_disk};
use crate::gate::{Fate, Gate};
use crate::kills::killed;
use crate::launch::{LIMIT, MOST_KIB, Running, held_kib, launcher, scripted, wait_until_gone};
use crate::runs::{RUN, SHARED_TMS, Small, TOY, Uninterrupted, send};
use crate::servers::{Server, Servers, difference};
use crate::suite::{Case, Suite};

const KILLED: Suite = Suite {
    name: "trackers_killed",
    cases: 60,
    columns: &[
        "launcher killed",
        "rank killed",
        "both killed",
        "started again",
        "shipper killed",
        "bit-equal",
    ],
};

const FAULTY: Suite = Suite {
    name: "trackers_faulty",
    cases: 24,
    columns: &["skipped", "warned", "not sent at the end"],
};

/// Time limit of `ship`, which waits for busy servers.
const SHIPPED: Duration = Duration::from_secs(180);

#[test]
#[ignore = "minutes; run with --ignored"]
fn killed_runs_are_shipped_completely() {
    let servers = Servers::start(KILLED.name);
    if servers.names().is_empty() {
        return;
    }
    let straight = Uninterrupted::of_each(&[TOY, SHARED_TMS]);
    let expected: Vec<Json> = straight.iter().map(|run| expected(run, &servers)).collect();
    KILLED.run(|case| {
        let which = case.number as usize % straight.len();
        let straight = &straight[which];
        case.kind(straight.small.config);
        straight.furnish(case.dir(), true);
        let names = servers.names();
        killed(case, straight, |command| {
            command.args(["--tracker", &names]);
            servers.tell(command, None, None);
        })?;
        // `ship` is killed too.
        for _ in 0..case.random.below(3) {
            let running = case.start(ship(case, &servers));
            thread::sleep(Duration::from_secs_f64(case.random.part()));
            kill(running);
            case.count("shipper killed");
        }
        shipped(case, &servers, &expected[which])
    });
}

/// A run of some seconds.
const LONG: Small = TOY.with(&[
    "train.steps=20000",
    "log.every=50",
    "eval.every=4000",
    "checkpoint.every=1000",
]);

/// The fault of a server during the run. It is mended after the run; in the last cases, before its
/// end.
const FATES: [(&str, Fate); 9] = [
    ("refused", Fate::Refused),
    ("black hole", Fate::Silence),
    ("500", Fate::Answered(500, "")),
    (
        "429 with Retry-After",
        Fate::Answered(429, "Retry-After: 3\r\n"),
    ),
    ("401", Fate::Answered(401, "")),
    ("404", Fate::Answered(404, "")),
    ("slow", Fate::Late(Duration::from_secs(4))),
    ("half an answer", Fate::Halved),
    ("lost answer", Fate::Lost),
];

/// Faults that no proxy simulates.
const OTHERS: [&str; 3] = ["no such name", "disk full", "restarted"];

#[test]
#[ignore = "minutes; run with --ignored"]
fn faulty_servers_do_not_affect_the_run() {
    let servers = Servers::start(FAULTY.name);
    if servers.names().is_empty() {
        return;
    }
    let straight = Uninterrupted::of(LONG);
    let expected = expected(&straight, &servers);
    FAULTY.run(|case| {
        let kinds = FATES.len() + OTHERS.len();
        let which = case.number as usize % kinds;
        straight.furnish(case.dir(), true);
        let Some((name, fate)) = FATES.get(which) else {
            let name = OTHERS[which - FATES.len()];
            case.kind(name);
            match name {
                "disk full" => return full(case, &servers, &straight, &expected),
                "restarted" => return restarted(case, &straight, &expected),
                _ => {}
            }
            let nowhere = "http://no-such-host.invalid";
            hindered(case, &servers, (nowhere, nowhere), || {}, None)?;
            straight.compare(case.dir())?;
            return shipped(case, &servers, &expected);
        };
        // In the second half of the cases the server recovers before the run ends.
        let mends = case.number as usize >= kinds;
        case.kind(format!("{name}{}", if mends { ", mended" } else { "" }));
        let (gates, [wandb, mlflow]) = gates(&servers, *fate);
        let mended = || gates.iter().for_each(|gate| gate.set(Fate::Through));
        let after = mends.then(|| straight.took / 2);
        hindered(case, &servers, (&wandb, &mlflow), mended, after)?;
        straight.compare(case.dir())?;
        shipped(case, &servers, &expected)
    });
}

/// Servers that are killed during the run, and return with their stored data.
fn restarted(case: &mut Case, straight: &Uninterrupted, expected: &Json) -> Result<(), String> {
    let servers = Servers::start(FAULTY.name);
    let (gates, [wandb, mlflow]) = gates(&servers, Fate::Through);
    let restart = || {
        // Data that a killed recorder was about to write is not tested.
        gates.iter().for_each(|gate| gate.set(Fate::Refused));
        thread::sleep(Duration::from_millis(300));
        let servers = [&servers.wandb, &servers.mlflow];
        servers.into_iter().flatten().for_each(Server::restart);
        gates.iter().for_each(|gate| gate.set(Fate::Through));
    };
    let after = Some(straight.took / 2);
    hindered(case, &servers, (&wandb, &mlflow), restart, after)?;
    straight.compare(case.dir())?;
    shipped(case, &servers, expected)
}

/// Proxies before the servers, and their addresses.
fn gates(servers: &Servers, fate: Fate) -> ([Gate; 2], [String; 2]) {
    let gates = [&servers.wandb, &servers.mlflow].map(|server| {
        let address = server.as_ref().map(|server| server.address);
        Gate::before(address.unwrap_or_else(|| ([127, 0, 0, 1], 9).into()), fate)
    });
    let urls = [0, 1].map(|at: usize| format!("http://{}", gates[at].address));
    (gates, urls)
}

/// The trackers' content of an undisturbed run.
fn expected(straight: &Uninterrupted, servers: &Servers) -> Json {
    let dir = tempfile::tempdir().unwrap();
    straight.furnish(dir.path(), true);
    let mut command = straight.small.command(dir.path());
    command.args(["--tracker", &servers.names()]);
    servers.tell(&mut command, None, None);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut command = launcher(dir.path());
    command.args(["ship", RUN]);
    servers.tell(&mut command, None, None);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    servers.held(&dir.path().join(RUN)).unwrap()
}

/// A run with trackers at these addresses, which are faulty until they are mended.
///
/// - `after`: when they are mended; `None` for after the run
fn hindered(
    case: &mut Case,
    servers: &Servers,
    (wandb, mlflow): (&str, &str),
    mended: impl Fn(),
    after: Option<Duration>,
) -> Result<(), String> {
    let mut command = LONG.command(case.dir());
    command.args(["--tracker", &servers.names()]);
    servers.tell(&mut command, Some(wandb), Some(mlflow));
    let mut running = case.start(command);
    let (begun, mut most_kib, mut is_mended) = (Instant::now(), 0, false);
    while running.child.try_wait().unwrap().is_none() && begun.elapsed() < LIMIT {
        most_kib = most_kib.max(held_kib(running.child.id()).unwrap_or(0));
        if !is_mended && after.is_some_and(|after| begun.elapsed() >= after) {
            mended();
            is_mended = true;
        }
        thread::sleep(Duration::from_millis(250));
    }
    let ended = case.end(running, LIMIT)?;
    ended.one_of(&[0])?;
    if !is_mended {
        mended();
    }
    for name in ["wandb", "mlflow"] {
        let said = |line: &&str| {
            line.starts_with(&format!("{name}: ")) && line.contains("the run goes on")
        };
        match ended.stderr.lines().filter(said).count() {
            0 => {}
            1 => case.count("warned"),
            many => return Err(format!("{many} warnings of {name} in seconds")),
        }
        let owed = |line: &str| {
            line.starts_with(&format!("{name}: ")) && line.contains("rows are not sent")
        };
        if ended.stderr.lines().any(owed) {
            case.count("not sent at the end");
        }
    }
    if most_kib > MOST_KIB {
        return Err(format!("its launcher holds {most_kib} KiB"));
    }
    Ok(())
}

/// A disk without room for some seconds of a run: rows wait in memory, and trackers wait too.
fn full(
    case: &mut Case,
    servers: &Servers,
    straight: &Uninterrupted,
    expected: &Json,
) -> Result<(), String> {
    if !may_mount() {
        case.count("skipped");
        return Ok(());
    }
    fs::create_dir_all(case.dir().join("runs")).unwrap();
    let (from, to) = (straight.took / 3, straight.took / 3);
    let done = format!(
        "\"$@\" & launcher=$!; sleep {}; cat /dev/zero > full/ballast; sleep {}; rm full/ballast; wait $launcher; code=$?",
        from.as_secs_f64(),
        to.as_secs_f64()
    );
    let mut command = LONG.complete(scripted(case.dir(), &on_disk("runs", 8 << 10, &done)));
    command.args(["--tracker", &servers.names()]);
    servers.tell(&mut command, None, None);
    let running = case.start(command);
    case.end(running, LIMIT)?.one_of(&[0])?;
    straight.compare(case.dir())?;
    shipped(case, servers, expected)
}

fn ship(case: &Case, servers: &Servers) -> Command {
    let mut command = launcher(case.dir());
    command.args(["ship", RUN, "--tracker", &servers.names()]);
    servers.tell(&mut command, None, None);
    command
}

/// Ships the rest, twice, and compares.
fn shipped(case: &mut Case, servers: &Servers, expected: &Json) -> Result<(), String> {
    for _ in 0..2 {
        let running = case.start(ship(case, servers));
        case.end(running, SHIPPED)?.one_of(&[0])?;
        let held = servers.held(&case.dir().join(RUN))?;
        if let Some(difference) = difference(expected, &held, "") {
            return Err(difference);
        }
    }
    Ok(())
}

fn kill(mut running: Running) {
    let launcher = running.child.id();
    let of_launcher = children(launcher);
    send(launcher, Signal::KILL);
    running.child.wait().unwrap();
    of_launcher.into_iter().for_each(wait_until_gone);
}
