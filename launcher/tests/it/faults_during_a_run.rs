//! Faults during a run: numbers that are not finite, full disks.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use spd_checkpoint::newest;

use crate::scratch::{Scratch, end, launch, names, start, wait_for_file, wait_until};

const SHORT: [&str; 8] = [
    "train.steps=40",
    "train.batch_size=64",
    "train.faithfulness_warmup.steps=2",
    "target.train.steps=20",
    "target.train.batch_size=64",
    "eval.batches=1",
    "eval.batch_size=64",
    "log.every=1",
];

/// The first error of a short run with further `set`s, without the process id.
fn error(scratch: &Scratch, config: &str, set: &[&str]) -> String {
    let mut command = scratch.real(config, "runs/x", &[&SHORT, set].concat());
    command.args(["--threads", "1"]);
    let ended = launch(command);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let error = ended.error().split_once(") ").unwrap().1;
    error.to_owned()
}

#[test]
fn a_loss_that_is_not_finite_stops_before_the_update() {
    let scratch = Scratch::new();
    let found = error(
        &scratch,
        "tms_5-2.toml",
        &["train.lr=1e30", "checkpoint.every=1"],
    );
    assert_eq!(
        found,
        "failed after step 1 (decomposing): step 1: loss/importance_minimality is NaN, \
         loss/stochastic_recon is NaN, loss/stochastic_recon_layerwise is NaN; the first that is not finite: the \
         importances of site `linear1`; nothing was updated since, and every checkpoint is of before it; try a smaller \
         learning rate, or clip_components and clip_importance in [train]"
    );
    let saved = newest(&scratch.run_dir().join("checkpoints")).unwrap();
    let saved = saved.snapshot.unwrap();
    assert_eq!(saved.step, 1);
    let finite = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap()).is_finite();
    assert!(
        saved
            .tensors
            .iter()
            .all(|tensor| tensor.bytes.chunks(4).all(finite))
    );
    // The same step stops it again.
    let again = error(
        &scratch,
        "tms_5-2.toml",
        &["train.lr=1e30", "checkpoint.every=1"],
    );
    assert_eq!(again, found);
}

#[test]
fn a_target_that_cannot_be_trained_says_so() {
    let found = error(&Scratch::new(), "tms_5-2.toml", &["target.train.lr=1e30"]);
    // Whether a huge loss is still infinite depends on the order of its sums.
    assert_eq!(
        found.replace("loss/total is inf", "loss/total is NaN"),
        "failed after step 1 (training target): step 1: loss/total is NaN, grad_norm/target is NaN; the first \
         that is not finite: the gradient of `linear1.weight` of the target; nothing was updated since, and every checkpoint is of before it; try a smaller learning rate, or clip, in [target.train]"
    );
}

/// tms_5-2 with weights from a file.
///
/// - `size`: value of all weights except those of the last feature
/// - `last`: values of the last feature in `linear1`
pub(crate) fn with_weights(scratch: &Scratch, size: f32, last: f32) -> String {
    let tensors: [(&str, &[usize], Vec<f32>); 3] = [
        (
            "linear1.weight",
            &[2, 5],
            [[size; 4].as_slice(), &[last]].concat().repeat(2),
        ),
        ("linear2.weight", &[5, 2], vec![size; 10]),
        ("linear2.bias", &[5], vec![size; 5]),
    ];
    let bytes = tensors.each_ref().map(|(_, _, values)| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        bytes.collect::<Vec<_>>()
    });
    let views = tensors.iter().zip(&bytes).map(|((name, dims, _), bytes)| {
        (
            *name,
            TensorView::new(Dtype::F32, dims.to_vec(), bytes).unwrap(),
        )
    });
    fs::write(
        scratch.path().join("w.safetensors"),
        safetensors::serialize(views, None).unwrap(),
    )
    .unwrap();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/tms_5-2.toml");
    let text = fs::read_to_string(text).unwrap();
    let (before, rest) = text.split_once("[target.train]").unwrap();
    let (_, after) = rest.split_once("[data]").unwrap();
    let path = scratch.path().join("run.toml");
    fs::write(
        &path,
        format!("{before}weights = \"w.safetensors\"\n[data]{after}"),
    )
    .unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn overflowing_weights_are_named() {
    for (size, warmup, expected) in [
        (
            1e30,
            "train.faithfulness_warmup.steps=2",
            "faithfulness warm-up, update 1: loss/faithfulness is inf; the first that is not finite: the gradient of \
             `_components.linear1.V`; nothing was updated since, and every checkpoint is of before it; look at the weights of \
             the target and at lr in [train.faithfulness_warmup]",
        ),
        (
            1e30,
            "train.faithfulness_warmup.steps=0",
            "step 0: loss/importance_minimality is inf, loss/stochastic_recon is NaN, loss/stochastic_recon_layerwise is \
             NaN; the first that is not finite: the output of the target itself; nothing was updated since, and every checkpoint is of before it; look at the weights of the target and at the data",
        ),
        (
            3e38,
            "train.faithfulness_warmup.steps=0",
            "step 0: loss/importance_minimality is NaN, loss/stochastic_recon is NaN, loss/stochastic_recon_layerwise is \
             NaN; the first that is not finite: what the target feeds to site `linear2`; nothing was updated since, and every checkpoint is of before it; look at the weights of the target and at the data",
        ),
    ] {
        let scratch = Scratch::new();
        let config = with_weights(&scratch, size, size);
        let mut command = scratch.launcher(&[&config, "--out", "runs/x"]);
        for set in SHORT
            .iter()
            .filter(|set| !set.starts_with("target.") && !set.contains("warmup"))
        {
            command.args(["--set", set]);
        }
        command.args(["--set", warmup]);
        let ended = launch(command);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        let found = ended.error().split_once("(decomposing): ").unwrap().1;
        assert_eq!(found, expected);
        assert!(names(&scratch.run_dir().join("checkpoints")).is_empty());
    }
}

/// One row of one rank overflows, long before an evaluation. All ranks refuse that step, and a
/// restart meets it at once.
#[test]
fn an_overflow_on_one_rank_stops_all_and_recurs_after_a_restart() {
    let by = |ranks: &str| {
        let scratch = Scratch::new();
        let config = with_weights(&scratch, 1.0, 1e30);
        let set = [
            "train.shards=4",
            "train.faithfulness_warmup.steps=0",
            "data.probability=0.0005",
            "seed=2",
            "log.every=100",
            "eval.every=7",
        ];
        let attempt = || {
            let mut command = scratch.launcher(&[&config, "--out", "runs/x", "--cpus", ranks]);
            for set in SHORT.iter().filter(|set| !set.starts_with("target.")) {
                command.args(["--set", set]);
            }
            for set in set {
                command.args(["--set", set]);
            }
            let ended = launch(command);
            assert_eq!(ended.code, Some(1), "{}", ended.stderr);
            ended.stderr
        };
        let error = |stderr: &str| {
            let error = stderr.lines().find(|line| line.starts_with("error: "));
            let (_, what) = error.unwrap().split_once(") ").unwrap();
            what.to_owned()
        };
        let (first, second) = (attempt(), attempt());
        // On a slow machine progress may be printed before.
        let has = |stderr: &str, line| assert!(stderr.lines().any(|told| told == line), "{stderr}");
        has(
            &first,
            "step 33: the state before step 33 is saved; the same command meets that step again at once",
        );
        has(&second, "step 33: continued from the checkpoint of step 33");
        assert!(!first.contains("because of it"), "{first}");
        assert_eq!(error(&first), error(&second));
        let rows = fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
        let snapshot = newest(&scratch.run_dir().join("checkpoints"))
            .unwrap()
            .snapshot
            .unwrap();
        let tensors = snapshot
            .tensors
            .into_iter()
            .map(|tensor| (tensor.name, tensor.bytes));
        (error(&first), rows, tensors.collect::<Vec<_>>())
    };
    let alone = by("1");
    assert!(
        alone.0.starts_with(
            "failed after step 33 (decomposing): step 33: loss/stochastic_recon is inf, "
        ),
        "{}",
        alone.0
    );
    assert!(by("4") == alone);
}

/// The launcher with a limit on file sizes, which acts like a full disk.
fn limited(command: &Command, blocks: u32) -> Command {
    let mut limited = Command::new("sh");
    limited
        .args(["-c", &format!("ulimit -f {blocks}; exec \"$@\""), "sh"])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(command.get_current_dir().unwrap());
    for (key, value) in command.get_envs() {
        limited.env(key, value.unwrap());
    }
    limited
}

#[test]
fn a_disk_that_stays_full_fails_the_run_at_its_end() {
    let scratch = Scratch::new();
    let set = [
        "checkpoint.every=10",
        "log.every=20",
        "train.faithfulness_warmup.steps=2",
    ];
    let set = [&SHORT[..7], &set].concat();
    let command = || {
        let mut command = scratch.real("tms_5-2.toml", "runs/x", &set);
        command.args(["--threads", "1"]);
        command
    };
    // 16 KiB hold the target and the rows, but not the 25 KiB of a checkpoint.
    let ended = launch(limited(&command(), 32));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    for step in [10, 20, 30, 40] {
        let warning = format!("step {step}: the checkpoint of step {step} was not written: ");
        let lines = ended.stderr.lines();
        let said: Vec<&str> = lines.filter(|line| line.starts_with(&warning)).collect();
        // The last checkpoint is tried twice, and training does not go on without it.
        assert_eq!(
            said.len(),
            if step == 40 { 2 } else { 1 },
            "{}",
            ended.stderr
        );
        let goes_on = said.iter().filter(|line| line.contains("training goes on"));
        assert!(step < 40 || goes_on.count() == 0, "{said:?}");
    }
    let error = ended.error();
    assert!(
        error.contains("the state after step 40 is not saved: ")
            && error.ends_with("; the same command goes on from the beginning"),
        "{error}"
    );
    // The weights of the target, which checkpoints would share, had room.
    let left = names(&scratch.run_dir().join("checkpoints"));
    assert!(
        left.iter().all(|name| name.starts_with("frozen-")),
        "{left:?}"
    );

    let ended = launch(command());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let straight = scratch.real("tms_5-2.toml", "runs/straight", &set);
    assert_eq!(launch(straight).code, Some(0));
    let tensors = |run: &str| {
        let newest = format!("runs/{run}/checkpoints/step-00000040/tensors.safetensors");
        fs::read(scratch.path().join(newest)).unwrap()
    };
    assert!(tensors("x") == tensors("straight"));
}

#[test]
fn a_run_whose_directory_is_removed_ends_soon_and_creates_nothing() {
    for cpus in ["1", "2"] {
        let scratch = Scratch::new();
        let set = ["train.steps=4000000", "checkpoint.every=50", "log.every=10"];
        let set = [&SHORT[1..7], &set].concat();
        let mut command = scratch.real("tms_5-2.toml", "runs/x", &set);
        command.args(["--cpus", cpus]);
        let launcher = start(command);
        let checkpoints = scratch.run_dir().join("checkpoints");
        wait_until("a checkpoint", || {
            fs::read_dir(&checkpoints).is_ok_and(|mut all| all.next().is_some())
        });
        // Renamed first, so that nothing is written into it while it is emptied.
        let away = scratch.path().join("away");
        fs::rename(scratch.run_dir(), &away).unwrap();
        fs::remove_dir_all(&away).unwrap();
        let ended = end(launcher);
        assert_eq!(
            (ended.code, ended.error()),
            (
                Some(1),
                "runs/x: the run directory was removed or renamed during the run; the run ends, since nothing more of it \
                 would be kept"
            )
        );
        assert!(names(&scratch.path().join("runs")).is_empty());
    }
}

#[test]
fn a_failed_write_is_repeated() {
    let scratch = Scratch::new();
    let set = ["train.steps=4000", "checkpoint.every=1000", "log.every=500"];
    let launcher = start(scratch.real("tms_5-2.toml", "runs/x", &[&SHORT[1..7], &set].concat()));
    let checkpoints = scratch.run_dir().join("checkpoints");
    wait_for_file(&checkpoints.join("step-00001000"));
    // A file with the name of a later directory.
    fs::write(checkpoints.join("step-00003000"), "no directory").unwrap();
    let ended = end(launcher);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("step 3000: the checkpoint of step 3000 was not written: "),
        "{}",
        ended.stderr
    );
    assert_eq!(newest(&checkpoints).unwrap().snapshot.unwrap().step, 4000);
}

#[test]
fn a_run_without_room_for_its_rows_fails() {
    let scratch = Scratch::new();
    let set = [
        &SHORT[1..],
        &["train.steps=150", "checkpoint.every=50", "log.every=1"],
    ]
    .concat();
    let command = |scratch: &Scratch| {
        let mut command = scratch.real("tms_5-2.toml", "runs/x", &set);
        command.args(["--threads", "1"]);
        command
    };
    let rows =
        |scratch: &Scratch| fs::read_to_string(scratch.run_dir().join("metrics.jsonl")).unwrap();
    let straight = Scratch::new();
    assert_eq!(launch(command(&straight)).code, Some(0));
    // 32 KiB hold the target and the 25 KiB of a checkpoint, but not all rows.
    assert!(
        rows(&straight).len() > 40 << 10,
        "{}",
        rows(&straight).len()
    );
    let ended = launch(limited(&command(&scratch), 64));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(
        ended.error().contains("metrics.jsonl: "),
        "{}",
        ended.stderr
    );
    let end = "; the same command goes on from the checkpoint of step 50";
    assert!(ended.error().ends_with(end), "{}", ended.stderr);
    assert!(!scratch.run_dir().join("summary.json").exists());
    let ended = launch(command(&scratch));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(rows(&scratch) == rows(&straight));
}
