//! Probes of a GPU: an emulated one, with and without faults, and none.

use std::process::Command;

use crate::gpu::is_there;
use crate::gpus::nccl;
use crate::scratch::{Ended, Scratch, end, launch, start};

/// `doctor --deep` with the emulated GPU; the test is skipped without a compiler for it.
fn deep(scratch: &Scratch, wrong: &str) -> Option<Command> {
    let mut command = scratch.launcher(&["doctor", "--deep"]);
    command.env("SPD_PROBES_GO_WRONG", wrong);
    is_there().then_some(command)
}

/// Outcome, name and finding of each probe.
fn rows(ended: &Ended) -> Vec<(&str, &str, &str)> {
    let (_, table) = ended.stdout.split_once("\nProbes of GPU 0:\n").unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("  "));
    rows.map(|row| {
        let (outcome, row) = row.trim().split_once(' ').unwrap();
        let (seconds, row) = row.split_once(" s  ").unwrap();
        assert!(seconds.trim().parse::<f64>().is_ok(), "{seconds}");
        let (name, said) = row.split_once(' ').unwrap();
        (outcome, name, said.trim())
    })
    .collect()
}

const NAMES: [&str; 12] = [
    "libraries",
    "open",
    "twice",
    "copies",
    "cp.async",
    "ldmatrix",
    "mma",
    "philox",
    "exp",
    "graph",
    "products",
    "nccl",
];

#[test]
fn every_probe_of_a_working_gpu_reports_its_finding() {
    let scratch = Scratch::with_emulated_gpu();
    let (Some(mut command), Some(libraries)) = (deep(&scratch, ""), nccl()) else {
        return;
    };
    command.env("SPD_CUDA_LIBRARIES", libraries.path());
    let ended = end(start(command));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (Some(0), ""),
        "{}",
        ended.stdout
    );
    let rows = rows(&ended);
    let found = [
        "libnccl.so.2 0.0.1 (",
        "the emulated GPU; 4096 of 4096 MiB free",
        "opened five times, dropped in both orders, with unchanged copies each time",
        " GB/s, unchanged",
        "512 numbers as on the CPU, bit for bit",
        "256 numbers as on the CPU, bit for bit",
        "128 numbers as on the CPU, within 2^-19 of the sum of their terms' sizes",
        "256 numbers as on the CPU, bit for bit",
        "4096 numbers as on the CPU, within 2^-22 of themselves",
        "3 steps, two of them graph launches, and the state staged between those match the CPU bit for bit",
        // A busy machine reaches fewer kinds in the time of the probe.
        " kinds by cublasLt, 0 by our own kernels",
        "NCCL 0.0.1 added up 262144 numbers of two ranks, and exchanged them to be added along the tree, op by op and in 3 launches of a graph, bit for bit",
    ];
    assert_eq!(rows.len(), NAMES.len());
    for (&(outcome, name, said), (expected, part)) in rows.iter().zip(NAMES.into_iter().zip(found))
    {
        assert_eq!((outcome, name), ("ok", expected), "{said}");
        assert!(said.contains(part), "{name}: {said}");
    }
    assert!(
        ended.stdout.contains("libnvrtc.so.13") && ended.stdout.ends_with("\nNo probe failed.\n")
    );
    assert!(scratch.names().is_empty());
}

#[test]
fn failing_hanging_and_crashing_probes_do_not_affect_others() {
    let scratch = Scratch::with_emulated_gpu();
    let Some(mut command) = deep(&scratch, "twice=fails copies=hangs philox=crashes") else {
        return;
    };
    command.env_remove("SPD_CUDA_LIBRARIES");
    let ended = end(start(command));
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (Some(1), ""),
        "{}",
        ended.stdout
    );
    let rows = rows(&ended);
    assert_eq!(rows[2], ("failed", "twice", "it was told to fail"));
    assert_eq!(rows[3], ("hung", "copies", "killed after 1 s"));
    assert_eq!(rows[7], ("crashed", "philox", "SIGABRT"));
    let (outcome, _, said) = rows[11];
    assert_eq!(outcome, "skipped");
    assert!(
        said == "the emulated GPU has no NCCL"
            || said == "libnccl.so.2 was not found: pip install nvidia-nccl-cu13",
        "{said}"
    );
    for at in [0, 1, 4, 5, 6, 8, 9, 10] {
        assert_eq!(rows[at].0, "ok", "{:?}", rows[at]);
    }
    assert!(ended.stdout.ends_with("\n3 of 12 probes failed.\n"));
}

#[test]
fn without_access_to_the_gpu_other_probes_are_skipped() {
    let scratch = Scratch::with_emulated_gpu();
    let Some(command) = deep(&scratch, "open=fails") else {
        return;
    };
    let ended = launch(command);
    assert_eq!(ended.code, Some(1), "{}", ended.stdout);
    let rows = rows(&ended);
    assert_eq!(rows[1], ("failed", "open", "it was told to fail"));
    for (row, name) in rows.iter().zip(NAMES).skip(2) {
        assert_eq!(*row, ("skipped", name, "the GPU cannot be opened"));
    }
    assert!(ended.stdout.ends_with("\n1 of 12 probes failed.\n"));
}

#[test]
fn a_failing_rank_of_a_probe_is_named() {
    let others = NAMES[1..11].iter().map(|name| format!("{name}=fails "));
    let Some(libraries) = nccl() else { return };
    for (how, who, said) in [
        (
            "wrong",
            "rank 1: ",
            "the sum over two ranks: element 5 is 84.0, expected 83.0",
        ),
        (
            "refuse",
            "rank ",
            ": NCCL cannot join 2 ranks: invalid usage: Duplicate GPU detected",
        ),
    ] {
        let scratch = Scratch::with_emulated_gpu();
        // Only NCCL is meant: the other probes fail at once, except the one that all depend on.
        let wrong: String = others.clone().skip(1).collect();
        let Some(mut command) = deep(&scratch, &wrong) else {
            return;
        };
        command
            .env("SPD_CUDA_LIBRARIES", libraries.path())
            .env("STAND_IN_NCCL", how);
        let ended = launch(command);
        let (outcome, _, found) = rows(&ended)[11];
        assert_eq!((ended.code, outcome), (Some(1), "failed"), "{found}");
        assert!(found.starts_with(who) && found.ends_with(said), "{found}");
        assert!(scratch.names().is_empty());
    }
}

#[test]
fn without_a_gpu_nothing_is_probed() {
    let scratch = Scratch::new();
    let plain = launch(scratch.launcher(&["doctor"])).stdout;
    let Some((_, lacks)) = plain.split_once("--gpus 1 is refused here: ") else {
        return spd_testing::skip("a machine without GPUs");
    };
    let ended = launch(scratch.launcher(&["doctor", "--deep"]));
    let lacks = lacks.trim_end();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(1), ""));
    // Free space and disk speed differ from one measurement to the next.
    let (_, libraries) = plain.split_once("\n\n").unwrap();
    let expected = format!("\n\n{libraries}\nGPU 0 cannot be probed: {lacks}\n");
    assert!(ended.stdout.ends_with(&expected), "{}", ended.stdout);
    // A single GPU is opened without NCCL, whatever its number.
    let other = launch(scratch.launcher(&["doctor", "--deep", "--gpu", "1"]));
    let (_, other) = other
        .stdout
        .split_once("\nGPU 1 cannot be probed: ")
        .unwrap();
    assert!(!other.contains("libnccl"), "{other}");
}

#[test]
fn an_unknown_probe_is_refused_with_the_known_ones() {
    let scratch = Scratch::new();
    let ended = launch(scratch.launcher(&["doctor-probe", "soul"]));
    assert_eq!(ended.code, Some(2));
    assert_eq!(
        ended.error(),
        format!("probe soul: not known; there are {}", NAMES.join(", "))
    );
}
