//! Several nodes, all of them this machine: one launcher each, the same results, and failures
//! reported by the first.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use spd_checkpoint::atomic::write_file;

use crate::both::children;
use crate::scratch::{
    Ended, Running, Scratch, assert_goes, end, send, start, wait_for_file, wait_until,
    wait_until_it_catches, wait_until_it_trains,
};

const SHORT: &[&str] = &[
    "train.steps=60",
    "train.batch_size=64",
    "train.shards=4",
    "train.faithfulness_warmup.steps=5",
    "target.train.steps=50",
    "eval.every=20",
    "eval.batches=2",
    "eval.batch_size=64",
    "checkpoint.every=20",
    "log.every=5",
];

const LONG: &[&str] = &["train.steps=200000", "eval.every=100000"];

/// A run that three nodes can share.
const THREE: [&str; 6] = [
    "--set",
    "train.shards=3",
    "--set",
    "train.batch_size=66",
    "--set",
    "eval.batch_size=66",
];

/// A launcher on node `node` of `nodes`.
fn node(scratch: &Scratch, (node, nodes): (usize, usize), more: &[&str]) -> Running {
    let mut command = scratch.real("tms_5-2.toml", "r", SHORT);
    command
        .args(more)
        .env("RANK", node.to_string())
        .env("WORLD_SIZE", nodes.to_string());
    start(command)
}

/// A launcher on each of `count` nodes.
fn nodes(scratch: &Scratch, count: usize, more: &[&str]) -> Vec<Running> {
    let all = (0..count).map(|index| node(scratch, (index, count), more));
    all.collect()
}

fn end_all(nodes: Vec<Running>) -> Vec<Ended> {
    nodes.into_iter().map(end).collect()
}

fn set<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values.iter().flat_map(|value| ["--set", value]).collect()
}

/// A run of several nodes after its first step, and the ranks of each.
fn at_work(scratch: &Scratch, count: usize, more: &[&str]) -> (Vec<Running>, Vec<Vec<u32>>) {
    let more = [&set(LONG)[..], more].concat();
    let nodes = nodes(scratch, count, &more);
    wait_until_it_trains(&scratch.path().join("r"));
    let ranks = nodes.iter().map(|node| children(node.id())).collect();
    (nodes, ranks)
}

/// The bits of a run's results: its newest checkpoint and its rows.
fn remains(scratch: &Scratch) -> (Vec<u8>, Vec<u8>) {
    let dir = scratch.path().join("r");
    let newest = crate::scratch::names(&dir.join("checkpoints"))
        .pop()
        .unwrap();
    let tensors = dir
        .join("checkpoints")
        .join(newest)
        .join("tensors.safetensors");
    (
        fs::read(tensors).unwrap(),
        fs::read(dir.join("metrics.jsonl")).unwrap(),
    )
}

#[test]
fn any_number_of_nodes_gives_the_same_bits() {
    let alone = Scratch::new();
    assert_eq!(end_all(nodes(&alone, 1, &[]))[0].code, Some(0));
    for (count, cpus) in [(2, "1"), (2, "2"), (4, "1")] {
        let scratch = Scratch::new();
        let ended = end_all(nodes(&scratch, count, &["--cpus", cpus]));
        for (index, node) in ended.iter().enumerate() {
            assert_eq!(node.code, Some(0), "{}", node.stderr);
            // Only the first one prints messages.
            assert_eq!(node.stdout.is_empty(), index > 0, "{}", node.stdout);
        }
        assert!(ended[0].stdout.contains("RANK=0 of WORLD_SIZE="));
        assert!(ended[0].stderr.contains("node 1 ("), "{}", ended[0].stderr);
        assert!(remains(&scratch) == remains(&alone), "{count} x {cpus}");
        // The rendezvous file is removed at the end.
        assert_eq!(scratch.names(), ["cache", "r"]);
        // A finished run is finished on all nodes.
        let again = end_all(nodes(&scratch, count, &["--cpus", cpus]));
        assert!(again.iter().all(|node| node.code == Some(0)));
    }
}

#[test]
fn each_node_samples_its_machine_and_its_ranks() {
    let scratch = Scratch::new();
    let (nodes, _) = at_work(&scratch, 2, &["--cpus", "2"]);
    let dir = scratch.path().join("r");
    let files = ["machine.jsonl", "machine-1.jsonl"];
    let text = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
    wait_until("samples of both nodes", || {
        files.iter().all(|file| text(file).contains("/rss_bytes"))
    });
    send(nodes[1].id(), Signal::TERM);
    let ended = end_all(nodes);
    assert!(ended.iter().all(|node| node.code == Some(3)), "{ended:?}");
    let names = files.map(|file| {
        let rows = text(file);
        let rows = rows.lines().map(serde_json::from_str::<serde_json::Value>);
        let names = rows.flat_map(|row| row.unwrap().as_object().unwrap().clone());
        let names = names.map(|(name, _)| name);
        names
            .filter(|name| name.starts_with("system/"))
            .collect::<std::collections::BTreeSet<_>>()
    });
    for (node, names) in names.iter().enumerate() {
        for of in [
            format!("node{node}"),
            format!("rank{}", 2 * node),
            format!("rank{}", 2 * node + 1),
        ] {
            let cpu = format!("system/{of}/cpu_percent");
            assert!(names.contains(&cpu), "{cpu}: {names:?}");
        }
    }
    assert!(names[0].is_disjoint(&names[1]), "{names:?}");
}

#[test]
fn a_dead_rank_on_another_node_is_named_with_its_host() {
    let scratch = Scratch::new();
    let (nodes, ranks) = at_work(&scratch, 2, &["--cpus", "2"]);
    assert!(ranks.iter().all(|of_node| of_node.len() == 2));
    send(ranks[1][0], Signal::KILL);
    ranks.iter().flatten().for_each(|&rank| assert_goes(rank));
    let ended = end_all(nodes);
    assert!(ended.iter().all(|node| node.code == Some(1)), "{ended:?}");
    let error = ended[0].error();
    let who = format!("rank 2 (pid {} on ", ranks[1][0]);
    assert!(error.starts_with(&who), "{error}");
    assert!(
        error.contains(") was killed by signal 9 (SIGKILL) after step "),
        "{error}"
    );
    // The other launcher prints nothing more.
    assert_eq!(ended[1].error(), "");
}

#[test]
fn a_dead_launcher_ends_its_ranks_and_the_run() {
    let scratch = Scratch::new();
    let (mut nodes, ranks) = at_work(&scratch, 2, &["--cpus", "2", "--restarts", "3"]);
    nodes[1].kill().unwrap();
    ranks.iter().flatten().for_each(|&rank| assert_goes(rank));
    let first = end_all(nodes).remove(0);
    assert_eq!(first.code, Some(1), "{}", first.stderr);
    let error = first.error();
    assert!(error.starts_with("rank 2 is lost after step "), "{error}");
    assert!(error.contains(", as the launcher of its node ("), "{error}");
}

#[test]
fn no_process_outlives_the_first_launcher() {
    let scratch = Scratch::new();
    let (mut nodes, ranks) = at_work(&scratch, 2, &["--cpus", "2"]);
    nodes[0].kill().unwrap();
    ranks.iter().flatten().for_each(|&rank| assert_goes(rank));
    let other = end_all(nodes).remove(1);
    assert_eq!(other.code, Some(1), "{}", other.stderr);
    let error = other.error();
    assert!(
        error.starts_with("node 0 (") && error.contains("is lost: "),
        "{error}"
    );
    // The leftover file of the first one does no harm.
    let short = ["--cpus", "2", "--set", "train.steps=60"];
    let again = end_all(self::nodes(
        &scratch,
        2,
        &[&short[..], &["--fresh"]].concat(),
    ));
    assert!(again.iter().all(|node| node.code == Some(0)), "{again:?}");
}

#[test]
fn a_request_to_stop_works_on_any_node() {
    let alone = Scratch::new();
    assert_eq!(end_all(nodes(&alone, 1, &[]))[0].code, Some(0));
    let scratch = Scratch::new();
    let slow = [
        "--cpus",
        "2",
        "--set",
        "train.steps=60",
        "--set",
        "checkpoint.every=2",
    ];
    for asked in [0, 1] {
        let nodes = nodes(&scratch, 2, &slow);
        nodes[0].has_said(") has joined");
        send(nodes[asked].id(), Signal::TERM);
        let ended = end_all(nodes);
        let codes: Vec<_> = ended.iter().map(|node| node.code).collect();
        assert!(
            [[Some(3), Some(3)], [Some(0), Some(0)]]
                .iter()
                .any(|both| codes == both),
            "{ended:?}"
        );
    }
    let ended = end_all(nodes(&scratch, 2, &slow));
    assert!(ended.iter().all(|node| node.code == Some(0)), "{ended:?}");
    assert!(remains(&scratch).1 == remains(&alone).1);
}

#[test]
fn a_restart_is_on_all_nodes() {
    let scratch = Scratch::new();
    let more = [
        "--cpus",
        "2",
        "--restarts",
        "1",
        "--set",
        "checkpoint.every=50",
    ];
    let (nodes, ranks) = at_work(&scratch, 2, &more);
    send(ranks[1][1], Signal::KILL);
    wait_until("other ranks", || {
        let now = children(nodes[1].id());
        now.iter().any(|rank| !ranks[1].contains(rank))
    });
    send(nodes[1].id(), Signal::TERM);
    let ended = end_all(nodes);
    assert!(ended.iter().all(|node| node.code == Some(3)), "{ended:?}");
    let said = &ended[0].stderr;
    assert!(said.contains("started again"), "{said}");
}

#[test]
fn a_stopped_rank_on_another_node_is_reported_by_the_first() {
    let scratch = Scratch::new();
    let (nodes, ranks) = at_work(&scratch, 2, &[]);
    send(ranks[1][0], Signal::STOP);
    nodes[0].has_said("rank 1 is stopped ");
    send(ranks[1][0], Signal::CONT);
    nodes[0].has_said("rank 1 makes progress again");
    send(nodes[0].id(), Signal::TERM);
    let ended = end_all(nodes);
    assert!(ended.iter().all(|node| node.code == Some(3)), "{ended:?}");
    let said = &ended[0].stderr;
    let named = format!("rank 1 is stopped (process {}; ", ranks[1][0]);
    assert!(
        said.contains(&named) && said.contains("rank 1 makes progress again"),
        "{said}"
    );
}

#[test]
fn missing_nodes_are_named() {
    let scratch = Scratch::new();
    let soon = ["--join-seconds", "1"];
    let first = end(node(&scratch, (0, 4), &soon));
    assert_eq!(first.code, Some(1));
    let error = first.error();
    assert!(
        error.starts_with("nodes 1, 2, 3 of 4: did not join within 1 s; ")
            && error.contains("r.nodes"),
        "{error}"
    );
    let other = end(node(&scratch, (1, 4), &soon));
    assert_eq!(other.code, Some(1));
    let error = other.error();
    assert!(
        error.starts_with("node 0 of 4 did not answer within 1 s: ") && error.contains("r.nodes"),
        "{error}"
    );
    // A launcher that is asked to stop meanwhile says so.
    let waiting = node(&scratch, (0, 2), &[]);
    wait_for_file(&scratch.path().join("r.nodes"));
    send(waiting.id(), Signal::TERM);
    let waiting = end(waiting);
    assert_eq!(waiting.code, Some(3), "{}", waiting.stderr);
    let line = "stopped while it waited for node 1 of 2; nothing new is saved, and the same command goes on";
    assert!(waiting.stderr.contains(line), "{}", waiting.stderr);
}

#[test]
fn nodes_that_cannot_share_a_batch_are_refused() {
    let scratch = Scratch::new();
    let refused = end(node(&scratch, (1, 3), &["--cpus", "2"]));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert_eq!(
        refused.error(),
        "--cpus 2 on 3 nodes: its batches are cut into 4 shards, which 1, 2 or 4 ranks can share, and 6 cannot"
    );
}

#[test]
fn a_late_node_is_waited_for() {
    let scratch = Scratch::new();
    let first = node(&scratch, (0, 2), &[]);
    thread::sleep(Duration::from_millis(700));
    let late = node(&scratch, (1, 2), &[]);
    let ended = end_all(vec![first, late]);
    assert!(ended.iter().all(|node| node.code == Some(0)), "{ended:?}");
}

#[test]
fn launchers_of_other_runs_are_refused_with_the_difference() {
    for (more, expected) in [
        (
            &["--set", "seed=7"][..],
            ") would do another run: seed: 0 here, 7 there",
        ),
        (&["--cpus", "2"], "another run: "),
    ] {
        let scratch = Scratch::new();
        let other = node(&scratch, (1, 2), more);
        // A launcher that finds the new directory of the first one refuses by itself, and the first
        // one waits in vain.
        wait_until_it_catches(other.id(), Signal::CHILD);
        let first = node(&scratch, (0, 2), &[]);
        for ended in end_all(vec![first, other]) {
            assert_eq!(ended.code, Some(2), "{}", ended.stderr);
            let error = ended.error();
            assert!(error.starts_with("node 1 ("), "{error}");
            assert!(
                error.contains(expected) || error.contains("--cpus"),
                "{error}"
            );
        }
    }
}

#[test]
fn nodes_that_round_differently_are_refused() {
    let scratch = Scratch::new();
    let start_as = |index: usize, bf16: &str| {
        let mut command = scratch.real("tms_5-2.toml", "r", SHORT);
        command
            .env("SPD_BF16_PRODUCTS", bf16)
            .env("RANK", index.to_string())
            .env("WORLD_SIZE", "2");
        start(command)
    };
    let ended = end_all(vec![start_as(0, "on"), start_as(1, "off")]);
    for ended in ended {
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let error = ended.error();
        let end =
            "they round differently, and ranks would diverge; start the run on nodes of one kind";
        assert!(error.starts_with("node 1 ("), "{error}");
        assert!(
            error.contains(") computes with ") && error.ends_with(end),
            "{error}"
        );
    }
}

/// The address of the first node in the rendezvous file.
fn first_address(scratch: &Scratch) -> SocketAddr {
    let file = scratch.path().join("r.nodes");
    wait_for_file(&file);
    let text = fs::read_to_string(&file).unwrap();
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    let last = found["addresses"].as_array().unwrap().last().unwrap();
    last.as_str().unwrap().parse().unwrap()
}

/// A stranger that sends a handshake slowly. Returns the bytes it sent before it was refused.
fn dripping(address: SocketAddr) -> thread::JoinHandle<usize> {
    let mut stream = TcpStream::connect(address).unwrap();
    thread::spawn(move || {
        let words = [&b"spd-launch nodes"[..], &[b'x'; 400]].concat();
        let said = words.iter().take_while(|&&byte| {
            thread::sleep(Duration::from_millis(500));
            stream.write_all(&[byte]).is_ok()
        });
        said.count()
    })
}

#[test]
fn strangers_at_the_ports_are_ignored() {
    let scratch = Scratch::new();
    let first = node(&scratch, (0, 2), &[]);
    let address = first_address(&scratch);
    let mut strangers = Vec::new();
    for at in 0..300 {
        let words: [&[u8]; 4] = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            &[0; 100],
            b"spd-launch nodes",
        ];
        let mut stranger = TcpStream::connect(address).unwrap();
        // It may be refused already.
        let _ = stranger.write_all(words[at % 4]);
        strangers.push(stranger);
    }
    let drips = dripping(address);
    let ended = end_all(vec![first, node(&scratch, (1, 2), &[])]);
    assert!(ended.iter().all(|node| node.code == Some(0)), "{ended:?}");
    assert!(drips.join().unwrap() < 48);
}

// A slow stranger is refused before it has sent half of a handshake, and blocks nothing.
#[test]
fn a_stranger_does_not_delay_signals_or_time_limits() {
    let scratch = Scratch::new();
    let first = node(&scratch, (0, 2), &[]);
    let drips = dripping(first_address(&scratch));
    thread::sleep(Duration::from_millis(600));
    send(first.id(), Signal::TERM);
    assert_eq!(end(first).code, Some(3));
    assert!(drips.join().unwrap() < 48);
    let first = node(&scratch, (0, 2), &["--join-seconds", "2"]);
    let drips = dripping(first_address(&scratch));
    let first = end(first);
    assert!(
        first
            .error()
            .starts_with("node 1 of 2: did not join within 2 s; ")
    );
    assert!(drips.join().unwrap() < 48);
}

#[test]
fn a_node_that_dies_during_the_join_may_come_back() {
    let scratch = Scratch::new();
    let first = node(&scratch, (0, 3), &THREE);
    let mut dies = node(&scratch, (1, 3), &THREE);
    first.has_said("node 1 (");
    dies.kill().unwrap();
    first.has_said(" exited before the run began (it has ended); its slot is free again");
    let others = [1, 2].map(|at| node(&scratch, (at, 3), &THREE));
    let ended = end_all([first].into_iter().chain(others).collect());
    assert!(ended.iter().all(|node| node.code == Some(0)), "{ended:?}");
    assert_eq!(ended[0].stderr.matches(") has joined").count(), 3);
}

/// Two of three nodes, which wait for the third.
fn two_of_three(scratch: &Scratch, more: &[&str]) -> [Running; 2] {
    let more = [more, &THREE].concat();
    let both = [0, 1].map(|at| node(scratch, (at, 3), &more));
    both[0].has_said(") has joined");
    both
}

#[test]
fn joined_nodes_hear_the_end_of_the_join() {
    // A node is missing.
    let scratch = Scratch::new();
    for ended in two_of_three(&scratch, &["--join-seconds", "20"]).map(end) {
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        let error = ended.error();
        assert!(
            error.starts_with("node 2 of 3: did not join within 20 s; "),
            "{error}"
        );
    }
    // Any of them is asked to stop.
    for asked in [0, 1] {
        let both = two_of_three(&scratch, &[]);
        send(both[asked].id(), Signal::TERM);
        let line = "stopped while it waited for node 2 of 3; nothing new is saved, and the same command goes on";
        for ended in both.map(end) {
            assert_eq!(ended.code, Some(3), "{}", ended.stderr);
            assert!(ended.stderr.contains(line), "{}", ended.stderr);
        }
    }
    // Two have the same number.
    let [first, other] = two_of_three(&scratch, &[]);
    let again = node(&scratch, (1, 3), &THREE);
    for ended in [first, other, again].map(end) {
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        let error = ended.error();
        assert!(
            error.starts_with("node 1 (") && error.contains("): node 1 has joined already, from "),
            "{error}"
        );
    }
    // The first one dies: there are neither ranks nor checkpoints.
    let [mut first, other] = two_of_three(&scratch, &[]);
    first.kill().unwrap();
    let ended = end(other);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let line =
        " is lost: it has ended; no rank runs here, and the same command on each node goes on";
    assert!(ended.error().ends_with(line), "{}", ended.error());
}

#[test]
fn a_wrong_secret_is_reported() {
    let scratch = Scratch::new();
    let _first = node(&scratch, (0, 2), &[]);
    let address = first_address(&scratch);
    let file = scratch.path().join("r.nodes");
    let text = fs::read_to_string(&file).unwrap();
    let (at, digit) = (text.len() - 4, text.as_bytes()[text.len() - 4]);
    let digit = if digit == b'0' { "1" } else { "0" };
    let altered = [&text[..at], digit, &text[at + 1..]].concat();
    fs::remove_file(&file).unwrap();
    write_file(&file, altered.as_bytes()).unwrap();
    let other = end(node(&scratch, (1, 2), &["--join-seconds", "3"]));
    assert_eq!(other.code, Some(1));
    let error = other.error();
    let said = "r.nodes says it is, has another secret than the file: the file is of another launch, or another program has the port; ";
    let port = format!(":{}, where ", address.port());
    assert!(
        error.starts_with("node 0 of 2 did not answer within 3 s: ")
            && error.contains(&port)
            && error.contains(said),
        "{error}"
    );
}

// A run whose network is this machine listens only there, whatever its interfaces.
#[test]
fn a_run_of_one_machine_listens_only_there() {
    let scratch = Scratch::new();
    let mut command = scratch.real("tms_5-2.toml", "r", SHORT);
    command
        .envs([("RANK", "0"), ("WORLD_SIZE", "2")])
        .env("MASTER_ADDR", "127.0.0.1");
    let first = start(command);
    let address = first_address(&scratch);
    let file = fs::read_to_string(scratch.path().join("r.nodes")).unwrap();
    assert!(
        file.starts_with(&format!("{{\"addresses\":[\"{address}\"],")),
        "{file}"
    );
    let listens = |table: &str, ip: &str| {
        let table = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
        let own = format!("{ip}:{:04X} ", address.port());
        table
            .lines()
            .any(|line| line.contains(&own) && line.contains(" 0A "))
    };
    assert!(listens("tcp", "0100007F") && !listens("tcp6", &"0".repeat(32)));
    let ended = end_all(vec![first, node(&scratch, (1, 2), &[])]);
    assert!(ended.iter().all(|node| node.code == Some(0)), "{ended:?}");
}
