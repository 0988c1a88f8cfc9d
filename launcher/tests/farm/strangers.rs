//! Strangers that connect to every port of a run of several nodes, during the join and while ranks
//! connect, many at once and at random times; and nodes that die while they join, and come back.
//! The run ends with the bits of an undisturbed one, and a request to stop works.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::both::children;
use crate::launch::{MOST_KIB, Running, held_kib};
use crate::random::Random;
use crate::runs::{SHARED_TMS, Uninterrupted, send};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "strangers",
    cases: 24,
    columns: &["connections", "came back", "asked", "stopped", "bit-equal"],
};

/// Time limit of a run, whose launchers and ranks share two cores with those of another.
const LIMIT: Duration = Duration::from_secs(120);

/// Time limit from a request to stop to the end.
const LEAVING: Duration = Duration::from_secs(40);

/// Concurrent connections of strangers, of all kinds and to all ports; and their total number.
const HELD: usize = 500;
const MADE: u32 = 3000;

/// What the strangers of a case send.
#[derive(Debug, Clone, Copy)]
enum Stranger {
    /// Nothing.
    Silent,
    /// A valid greeting, a byte at a time.
    Drips,
    /// Junk.
    Garbage,
    /// A valid greeting, then the longest possible name, or nothing.
    Greets,
    /// Nothing; they disconnect at once.
    Scans,
    /// A random choice of these.
    All,
}

const STRANGERS: [Stranger; 6] = [
    Stranger::Silent,
    Stranger::Drips,
    Stranger::Garbage,
    Stranger::Greets,
    Stranger::Scans,
    Stranger::All,
];

const GREETING: &[u8] = b"spd-launch nodes";

#[test]
#[ignore = "minutes; run with --ignored"]
fn strangers_disturb_no_run() {
    let straight = Uninterrupted::of(SHARED_TMS);
    FIELD.run(|case| {
        let stranger = STRANGERS[case.number as usize % STRANGERS.len()];
        case.kind(format!("{stranger:?}").to_lowercase());
        straight.furnish(case.dir(), true);
        let launchers = Mutex::new(Vec::new());
        let (is_over, made) = (AtomicBool::new(false), AtomicU32::new(0));
        let random = Random::new(case.random.word(), "stranger", case.number);
        let found = thread::scope(|scope| {
            scope.spawn(|| harass(stranger, random, &launchers, &is_over, &made));
            let _over = Over(&is_over);
            harassed(case, &straight, &launchers)
        });
        (0..made.into_inner()).for_each(|_| case.count("connections"));
        found
    });
}

/// Ends the strangers when a case ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn harassed(
    case: &mut Case,
    straight: &Uninterrupted,
    launchers: &Mutex<Vec<u32>>,
) -> Result<(), String> {
    let nodes = *case.random.one(&[2, 4]);
    let is_local = case.random.one_in(2);
    let start = |case: &mut Case, node: usize| {
        let mut command = straight.small.command(case.dir());
        command
            .args(["--join-seconds", "100"])
            .env("RANK", node.to_string())
            .env("WORLD_SIZE", nodes.to_string());
        if is_local {
            command.env("MASTER_ADDR", "127.0.0.1");
        }
        let running = case.start(command);
        launchers.lock().unwrap().push(running.child.id());
        running
    };
    let is_asked = case.random.one_in(4);
    let mut running: Vec<Running> = (0..nodes - 1).map(|node| start(case, node)).collect();
    // One of four nodes dies before the last one joins.
    if nodes == 4 {
        thread::sleep(Duration::from_secs_f64(1.5 * case.random.part()));
        let dies = 1 + case.random.below(2);
        running[dies].child.kill().unwrap();
        running[dies].child.wait().unwrap();
        running[dies] = start(case, dies);
        case.count("came back");
    }
    thread::sleep(Duration::from_secs_f64(case.random.part()));
    running.push(start(case, nodes - 1));
    let mut limit = LIMIT;
    if is_asked {
        thread::sleep(Duration::from_secs_f64(2.0 * case.random.part()));
        case.count("asked");
        limit = LEAVING;
        // The process has exited by itself.
        for node in &running {
            send(node.child.id(), Signal::TERM);
        }
    }
    let held = held_kib(running[0].child.id()).unwrap_or(0);
    // All of them are ended before one is reported.
    let ended: Vec<_> = running
        .into_iter()
        .map(|node| case.end(node, limit))
        .collect();
    let mut codes = Vec::new();
    for ended in ended {
        let ended = ended?;
        // It may be asked before it handles signals.
        let is_early = is_asked && ended.status.signal() == Some(Signal::TERM.as_raw());
        codes.push(if is_early { 3 } else { ended.code()? });
    }
    launchers.lock().unwrap().clear();
    if held > MOST_KIB {
        return Err(format!("node 0 holds {held} KiB"));
    }
    match &codes[..] {
        codes if codes.iter().all(|&code| code == 0) => {}
        // A node that notices the end of node 0 before it is asked itself has lost it.
        codes if is_asked && codes.iter().all(|code| [0, 1, 3].contains(code)) => {
            case.count("stopped");
            let mut command = straight.small.command(case.dir());
            command.args(["--cpus", &nodes.to_string()]);
            case.launch(command, &[0])?;
        }
        codes => return Err(format!("the launchers leave with {codes:?}")),
    }
    straight.compare(case.dir())?;
    case.count("bit-equal");
    Ok(())
}

/// Connects to every port of the launchers and of their ranks, until the run is over.
fn harass(
    stranger: Stranger,
    mut random: Random,
    launchers: &Mutex<Vec<u32>>,
    is_over: &AtomicBool,
    made: &AtomicU32,
) {
    let mut held: Vec<(TcpStream, Vec<u8>)> = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(random.below(60) as u64));
        // Slow strangers go on; refused ones are gone.
        held.retain_mut(|(stream, rest)| {
            rest.pop()
                .is_none_or(|byte| stream.write_all(&[byte]).is_ok())
        });
        let processes = launchers.lock().unwrap().clone();
        for port in ports(&processes) {
            let burst = if random.one_in(12) {
                400
            } else {
                random.below(12)
            };
            for _ in 0..burst {
                if made.load(Ordering::Relaxed) >= MADE {
                    break;
                }
                let address = SocketAddr::from(([127, 0, 0, 1], port));
                let limit = Duration::from_millis(200);
                let Ok(mut stream) = TcpStream::connect_timeout(&address, limit) else {
                    break;
                };
                made.fetch_add(1, Ordering::Relaxed);
                let (said, rest) = words(stranger, &mut random);
                // It may be refused in the middle.
                let _ = stream.set_write_timeout(Some(limit));
                if stream.write_all(&said).is_err() {
                    continue;
                }
                if let Some(rest) = rest {
                    held.push((stream, rest));
                }
            }
        }
        let over = held.len().saturating_sub(HELD);
        held.drain(..over);
    }
}

/// A stranger's first bytes, and those that follow one by one; `None` if it disconnects.
fn words(stranger: Stranger, random: &mut Random) -> (Vec<u8>, Option<Vec<u8>>) {
    let mut bytes = |count: usize| -> Vec<u8> { (0..count).map(|_| random.byte()).collect() };
    match stranger {
        Stranger::Silent => (vec![], Some(vec![])),
        Stranger::Drips => {
            let mut all = [GREETING, &bytes(32), &[255], &bytes(287)].concat();
            all.reverse();
            (vec![], Some(all))
        }
        Stranger::Garbage => {
            let count = usize::from(bytes(1)[0]) * 64;
            (bytes(count), Some(vec![]))
        }
        Stranger::Greets => {
            let opening = [GREETING, &bytes(32)].concat();
            let more = match bytes(1)[0] % 3 {
                0 => vec![],
                1 => vec![255],
                _ => [&[255], &bytes(287)[..]].concat(),
            };
            ([opening, more].concat(), Some(vec![]))
        }
        Stranger::Scans => (vec![], None),
        Stranger::All => {
            let kind = usize::from(bytes(1)[0]) % (STRANGERS.len() - 1);
            words(STRANGERS[kind], random)
        }
    }
}

/// The ports on which these processes and their children listen.
fn ports(launchers: &[u32]) -> BTreeSet<u16> {
    let ranks = launchers.iter().flat_map(|&launcher| children(launcher));
    let processes: BTreeSet<u32> = launchers.iter().copied().chain(ranks).collect();
    let mut sockets = BTreeSet::new();
    for process in processes {
        let files = fs::read_dir(format!("/proc/{process}/fd"));
        for file in files.into_iter().flatten().flatten() {
            sockets.extend(fs::read_link(file.path()));
        }
    }
    let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/net/{table}")));
    let lines = tables.iter().flatten().flat_map(|table| table.lines());
    let listening = lines.filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
        let is_theirs = sockets.contains(Path::new(&format!("socket:[{inode}]")));
        let (_, port) = local.rsplit_once(':')?;
        (*state == "0A" && is_theirs).then(|| u16::from_str_radix(port, 16).ok())?
    });
    listening.collect()
}
