//! Two nodes in two network namespaces, and what networks do to them: the wire between them breaks and heals, carries one way alone, or
//! never heals. What the kernel cannot do here (delays and losses need `sch_netem`) is named.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, process};

use crate::launch::BINARY;

/// A run of half a minute or so by two nodes.
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

/// What happens to the wire some seconds after the start.
struct Fault {
    name: &'static str,
    begins: fn(&Wire) -> bool,
    heals: Option<fn(&Wire) -> bool>,
}

const FAULTS: &[Fault] = &[
    Fault {
        name: "nothing",
        begins: |_| true,
        heals: Some(|_| true),
    },
    Fault {
        name: "delay and loss",
        begins: |wire| wire.in_b("tc qdisc add dev DEV root netem delay 50ms loss 5%"),
        heals: Some(|wire| wire.in_b("tc qdisc del dev DEV root")),
    },
    Fault {
        name: "a partition of 20 s",
        begins: |wire| wire.in_b("ip link set DEV down"),
        heals: Some(|wire| wire.in_b("ip link set DEV up")),
    },
    Fault {
        name: "20 s without a way back",
        begins: |wire| wire.in_b("ip route add blackhole 10.77.0.1/32"),
        heals: Some(|wire| wire.in_b("ip route del blackhole 10.77.0.1/32")),
    },
    Fault {
        name: "a partition for ever",
        begins: |wire| wire.in_b("ip link set DEV down"),
        heals: None,
    },
];

/// Two namespaces and the wire between them, which go when this is dropped.
struct Wire {
    names: [String; 2],
}

fn ip(arguments: &str) -> bool {
    let words = arguments.split(' ');
    let status = Command::new("ip")
        .args(words)
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

impl Wire {
    /// `None` where this process may not make one.
    fn new() -> Option<Self> {
        let wire = Self {
            names: ["a", "b"].map(|name| format!("spd{}{name}", process::id())),
        };
        let [a, b] = &wire.names;
        let made = [a, b].iter().all(|name| ip(&format!("netns add {name}")))
            && ip(&format!(
                "link add veth0 netns {a} type veth peer name veth0 netns {b}"
            ))
            && [(a, 1), (b, 2)].iter().all(|(name, number)| {
                ip(&format!("-n {name} addr add 10.77.0.{number}/24 dev veth0"))
                    && ip(&format!("-n {name} link set lo up"))
                    && ip(&format!("-n {name} link set veth0 up"))
            });
        made.then_some(wire)
    }

    fn in_b(&self, command: &str) -> bool {
        let command = command.replace("DEV", "veth0");
        ip(&format!("netns exec {} {command}", self.names[1]))
    }

    fn node(&self, dir: &Path, node: usize, out: &str) -> Child {
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
            .stderr(stderr)
            .spawn()
            .unwrap()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
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
    let dir = tempfile::tempdir().unwrap();
    let rows = |out: &str| fs::read(dir.path().join(out).join("metrics.jsonl")).unwrap();
    for (index, fault) in FAULTS.iter().enumerate() {
        let out = format!("r{index}");
        let mut nodes = [0, 1].map(|node| wire.node(dir.path(), node, &out));
        sleep(Duration::from_secs(8));
        let began = Instant::now();
        if !(fault.begins)(&wire) {
            println!("skipped: network: {}: this kernel cannot", fault.name);
            nodes.iter_mut().for_each(|node| drop(node.kill()));
            nodes.iter_mut().for_each(|node| drop(node.wait()));
            continue;
        }
        if let Some(heals) = fault.heals {
            sleep(Duration::from_secs(20));
            assert!(heals(&wire), "{}", fault.name);
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
            // The pair is named on both sides.
            let named = |told: &str, words: &str| told.lines().any(|line| line.contains(words));
            assert!(named(&told[0], "rank 1 on "), "{}", told[0]);
            assert!(named(&told[0], "node 1 ("), "{}", told[0]);
            assert!(named(&told[1], "node 0 (10.77.0.1:"), "{}", told[1]);
        }
    }
}
