//! Two nodes in two network namespaces whose connection breaks and recovers, works in one direction
//! only, or never recovers. For delays and lost packets, the connection uses TUN devices and
//! `relay.py`, since few kernels have `sch_netem`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, process};

use tempfile::TempDir;

use crate::both::Guarded;
use crate::launch::BINARY;

/// A run of about half a minute on two nodes.
const SET: &[&str] = &[
    "train.steps=20000",
    "train.batch_size=64",
    "train.shards=2",
    "target.train.steps=50",
    "eval.every=5000",
    "eval.batches=1",
    "eval.batch_size=64",
    "checkpoint.every=1000",
];

/// What happens to the connection some seconds after the start.
struct Fault {
    name: &'static str,
    /// Whether it needs the relay.
    needs_relay: bool,
    begins: fn(&Wire) -> bool,
    heals: Option<fn(&Wire) -> bool>,
}

const FAULTS: &[Fault] = &[
    Fault {
        name: "nothing",
        needs_relay: false,
        begins: |_| true,
        heals: Some(|_| true),
    },
    Fault {
        name: "50 ms late, and one packet of twenty lost",
        needs_relay: true,
        begins: |wire| fs::write(wire.slow(), "").is_ok(),
        heals: Some(|wire| fs::remove_file(wire.slow()).is_ok()),
    },
    Fault {
        name: "a partition of 20 s",
        needs_relay: false,
        begins: |wire| wire.in_b("ip link set DEV down"),
        heals: Some(|wire| wire.in_b("ip link set DEV up")),
    },
    Fault {
        name: "20 s without a way back",
        needs_relay: false,
        begins: |wire| wire.in_b("ip route add blackhole 10.77.0.1/32"),
        heals: Some(|wire| wire.in_b("ip route del blackhole 10.77.0.1/32")),
    },
    Fault {
        name: "a partition for ever",
        needs_relay: false,
        begins: |wire| wire.in_b("ip link set DEV down"),
        heals: None,
    },
];

/// Two connected namespaces, which are removed on drop.
struct Wire {
    names: [String; 2],
    /// The relay process between them, if any, and the folder of its sockets.
    relays: Vec<Child>,
    folder: TempDir,
}

fn ip(arguments: &str) -> bool {
    let words = arguments.split(' ');
    let status = Command::new("ip")
        .args(words)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

impl Wire {
    /// Two namespaces; `None` where this process may not create them.
    fn bare(kind: &str) -> Option<Self> {
        let wire = Self {
            names: ["a", "b"].map(|name| format!("spd{}{kind}{name}", process::id())),
            relays: Vec::new(),
            folder: tempfile::tempdir().unwrap(),
        };
        let mut names = wire.names.iter();
        let made = names.all(|name| {
            ip(&format!("netns add {name}")) && ip(&format!("-n {name} link set lo up"))
        });
        made.then_some(wire)
    }

    /// Connected by the kernel.
    fn new() -> Option<Self> {
        let wire = Self::bare("v")?;
        let [a, b] = &wire.names;
        let made = ip(&format!(
            "link add veth0 netns {a} type veth peer name veth0 netns {b}"
        )) && [(a, 1), (b, 2)].iter().all(|(name, number)| {
            ip(&format!("-n {name} addr add 10.77.0.{number}/24 dev veth0"))
                && ip(&format!("-n {name} link set veth0 up"))
        });
        made.then_some(wire)
    }

    /// Connected by a relay that can be made [slow](Self::slow); `None` without Python or TUN
    /// devices.
    fn relayed() -> Option<Self> {
        let mut wire = Self::bare("t")?;
        let folder = wire.folder.path();
        let ends = ["a", "b"].map(|name| folder.join(name));
        for (at, name) in wire.names.iter().enumerate() {
            let mut relay = Command::new("ip");
            relay
                .args(["netns", "exec", name, "python3"])
                .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/farm/relay.py"))
                .args([&ends[at], &ends[1 - at]])
                .arg(format!("10.77.0.{}/24", at + 1))
                // One end is slow, as one device would be.
                .arg(folder.join(if at == 0 { "slow" } else { "never" }))
                .stderr(Stdio::null());
            wire.relays.push(relay.spawn().ok()?);
        }
        let [a, _] = &wire.names;
        let answers = |_| {
            sleep(Duration::from_millis(200));
            ip(&format!("netns exec {a} ping -c 1 -W 1 10.77.0.2"))
        };
        (0..50).any(answers).then_some(wire)
    }

    /// While this file exists, the connection is slow.
    fn slow(&self) -> PathBuf {
        self.folder.path().join("slow")
    }

    fn in_b(&self, command: &str) -> bool {
        let command = command.replace("DEV", "veth0");
        ip(&format!("netns exec {} {command}", self.names[1]))
    }

    fn node(&self, dir: &Path, node: usize, out: &str) -> Guarded {
        let mut command = Command::new("ip");
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/tms_5-2.toml");
        command.args(["netns", "exec", &self.names[node], BINARY, config]);
        command.args(["--out", out, "--threads", "1"]);
        for set in SET {
            command.args(["--set", set]);
        }
        let stderr = fs::File::create_new(dir.join(format!("{out}.{node}"))).unwrap();
        command
            .current_dir(dir)
            .env("SPD_CACHE", dir.join("cache"))
            .env("RANK", node.to_string())
            .env("WORLD_SIZE", "2")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr);
        Guarded(command.spawn().unwrap())
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for relay in &mut self.relays {
            // It may have exited.
            let _ = relay.kill();
            let _ = relay.wait();
        }
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
    }
}

#[test]
#[ignore = "minutes; run with --ignored"]
fn network() {
    let Some(wire) = Wire::new() else {
        println!("skipped: network: this process may make no network namespaces");
        return;
    };
    let relayed = Wire::relayed();
    let dir = tempfile::tempdir().unwrap();
    let rows = |out: &str| fs::read(dir.path().join(out).join("metrics.jsonl")).unwrap();
    for (index, fault) in FAULTS.iter().enumerate() {
        let wire = match (&relayed, fault.needs_relay) {
            (_, false) => &wire,
            (Some(relayed), true) => relayed,
            (None, true) => {
                let name = fault.name;
                println!("skipped: network: {name}: needs python3, ping and /dev/net/tun");
                continue;
            }
        };
        let out = format!("r{index}");
        let mut nodes = [0, 1].map(|node| wire.node(dir.path(), node, &out));
        sleep(Duration::from_secs(8));
        let began = Instant::now();
        assert!((fault.begins)(wire), "{}", fault.name);
        if let Some(heals) = fault.heals {
            sleep(Duration::from_secs(20));
            assert!(heals(wire), "{}", fault.name);
        }
        let codes = nodes.each_mut().map(|node| node.wait().unwrap().code());
        let told = |node: usize| fs::read_to_string(dir.path().join(format!("{out}.{node}")));
        let told = [0, 1].map(|node| told(node).unwrap());
        println!(
            "{}: {codes:?} after {:.1} s",
            fault.name,
            began.elapsed().as_secs_f64()
        );
        if fault.heals.is_some() {
            assert_eq!(codes, [Some(0); 2], "{told:?}");
            assert!(rows(&out) == rows("r0"), "{}", fault.name);
        } else {
            assert_eq!(codes, [Some(1); 2], "{told:?}");
            assert!(began.elapsed() < Duration::from_secs(100));
            // Both nodes name the pair.
            let named = |told: &str, words: &str| told.lines().any(|line| line.contains(words));
            assert!(named(&told[0], "rank 1 on "), "{}", told[0]);
            assert!(named(&told[0], "node 1 ("), "{}", told[0]);
            assert!(named(&told[1], "node 0 (10.77.0.1:"), "{}", told[1]);
        }
    }
}
