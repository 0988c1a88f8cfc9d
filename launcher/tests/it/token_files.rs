//! Runs on files of ids from other programs: named in the run file, recognised at resume, refused
//! with one line.
#![expect(
    clippy::disallowed_methods,
    reason = "test files need no atomic writes"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::scratch::{Ended, Scratch, end, launch, start, wait_until};

const SMALL: [&str; 15] = [
    "train.batch_size=2",
    "train.faithfulness_warmup.steps=2",
    "target.n_layer=1",
    "target.d_model=32",
    "target.d_mlp=64",
    "target.train.steps=20",
    "target.train.batch_size=4",
    "data.seq_len=32",
    "data.train=ids.bin",
    "data.eval={ held_out = 0.1 }",
    "data.dtype=u16",
    "eval.batches=1",
    "eval.batch_size=2",
    "eval.slow_every=0",
    "log.every=10",
];

/// The shipped language model on `ids.bin`, reduced.
fn run(scratch: &Scratch, out: &str, set: &[&str]) -> Command {
    let often = ["train.steps=40", "eval.every=20", "checkpoint.every=20"];
    let set = [&SMALL[..], &often, set].concat();
    scratch.real("shakespeare.toml", out, &set)
}

fn put_ids(path: &Path, ids: impl IntoIterator<Item = u16>) {
    let bytes: Vec<u8> = ids.into_iter().flat_map(u16::to_le_bytes).collect();
    fs::write(path, bytes).unwrap();
}

/// Ids below 256, an eighth of them 0, as at the end of documents.
fn ids(salt: u16) -> impl Iterator<Item = u16> {
    (0..5000_u16).map(move |place| match place % 8 {
        7 => 0,
        _ => (place.wrapping_mul(31).wrapping_add(salt) >> 3) % 255 + 1,
    })
}

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    put_ids(&scratch.path().join("ids.bin"), ids(0));
    scratch
}

#[test]
fn a_resume_refuses_changed_ids() {
    let scratch = scratch();
    let ended = launch(run(&scratch, "runs/x", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stdout
            .contains("ids.bin (held out: the last 0.1 of it), 32 tokens a row"),
        "{}",
        ended.stdout
    );
    let run_dir = scratch.run_dir();
    fs::remove_file(run_dir.join("summary.json")).unwrap();
    fs::remove_dir_all(run_dir.join("checkpoints/step-00000040")).unwrap();
    put_ids(&scratch.path().join("ids.bin"), ids(1));
    let ended = launch(run(&scratch, "runs/x", &[]));
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    let error = ended.error();
    assert!(
        error.starts_with(
            "ids.bin: not the dataset that the run was trained on: its tokens have the hash "
        ) && error.ends_with("; put that one back, or start over with --fresh or --out"),
        "{error}"
    );
    put_ids(&scratch.path().join("ids.bin"), ids(0));
    let ended = launch(run(&scratch, "runs/x", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn unreadable_files_are_refused_with_one_line() {
    let scratch = scratch();
    fs::write(scratch.path().join("odd.bin"), [1; 31]).unwrap();
    let refused = |set: &[&str], text: &str| {
        let ended = launch(run(&scratch, "runs/x", set));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        assert_eq!(ended.error(), text);
        assert!(!scratch.run_dir().try_exists().unwrap());
    };
    refused(
        &["data.train=odd.bin"],
        "odd.bin: has 31 bytes, which is no multiple of 2 (u16); was it copied whole?",
    );
    std::os::unix::fs::symlink("loop.bin", scratch.path().join("loop.bin")).unwrap();
    refused(
        &["data.train=loop.bin"],
        "loop.bin: cannot open: Too many levels of symbolic links (os error 40)",
    );
    fs::create_dir(scratch.path().join("dir.bin")).unwrap();
    refused(
        &["data.train=dir.bin"],
        "dir.bin: has no index.json, so it is no dataset; give its train or val folder",
    );
    fs::write(scratch.path().join("empty.bin"), "").unwrap();
    refused(
        &["data.train=empty.bin"],
        "empty.bin: is empty; was it still being written?",
    );
    refused(
        &["data.train=ids.bin/x"],
        "ids.bin/x: cannot open: Not a directory (os error 20)",
    );
    refused(
        &["data.eval={ held_out = 0.001 }"],
        "ids.bin: held_out = 0.001 of 156 rows of 32 tokens leaves none to evaluate on; use another part, a \
         smaller seq_len or more text",
    );
    refused(
        &["data.cross_documents=false"],
        "ids.bin: does not list where documents end; say which id ends them: [data] document_end = ID",
    );
    refused(
        &["data.cross_documents=false", "data.document_end=0"],
        "ids.bin: no window of 32 tokens and a label fits a document of a dataset of 5000 tokens; use a \
         smaller seq_len or more text",
    );
    refused(
        &["data.cross_documents=false", "data.document_end=256"],
        "[data] document_end: expected an id below the target's 256, found 256",
    );
    put_ids(&scratch.path().join("wide.bin"), ids(0).chain([256]));
    refused(
        &["data.train=wide.bin"],
        "wide.bin: token 5000 is 256, but the vocabulary has 256 ids; was the text tokenized for another \
         model?",
    );
    let plan = launch({
        let mut command = run(
            &scratch,
            "runs/x",
            &[
                "data.cross_documents=false",
                "data.document_end=0",
                "data.seq_len=7",
            ],
        );
        command.arg("--dry-run");
        command
    });
    assert!(
        plan.stdout.contains("7 tokens a row, each of one document"),
        "{} {}",
        plan.stdout,
        plan.stderr
    );
}

#[test]
fn a_run_killed_while_it_reads_ahead_gives_the_same_bits() {
    let scratch = scratch();
    let long = ["train.steps=400", "checkpoint.every=7", "eval.every=0"];
    let ended = launch(run(&scratch, "runs/straight", &long));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    // 400 steps of two rows are five and a half epochs of 140 rows, with kills within epochs.
    let mut kills = 0;
    for newest in [50, 150, 300] {
        let mut launched = start(run(&scratch, "runs/x", &long));
        let saved = |step: u64| {
            let all = fs::read_dir(scratch.run_dir().join("checkpoints"));
            all.into_iter().flatten().flatten().any(|entry| {
                let name = entry.file_name().into_string().unwrap_or_default();
                let found = name.strip_prefix("step-").and_then(|n| n.parse().ok());
                found.is_some_and(|found: u64| found >= step)
            })
        };
        wait_until("a checkpoint, or the end", || {
            saved(newest) || launched.try_wait().unwrap().is_some()
        });
        kills += usize::from(launched.try_wait().unwrap().is_none());
        launched.kill().unwrap();
        end(launched);
    }
    assert!(kills > 0, "every launch was over before it was killed");
    let ended = launch(run(&scratch, "runs/x", &long));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let remains = |out: &str| {
        let place = scratch.path().join(out);
        [
            "checkpoints/step-00000400/tensors.safetensors",
            "metrics.jsonl",
        ]
        .map(|name| fs::read(place.join(name)).unwrap())
    };
    assert!(remains("runs/x") == remains("runs/straight"));
}

/// Runs with a rank that cannot map a file of ids, and whose reads fail from number `from` on, like
/// those of a file that was removed from a network disk.
fn stale(scratch: &Scratch, file: &str, from: u32) -> Ended {
    let rank = scratch.path().join("rank");
    let place = scratch.path().join(file);
    let script = format!(
        "#!/bin/sh\nexec strace -f -qq -o trace -P {} -e trace=pread64,mmap -e inject=mmap:error=ENODEV \
         -e inject=pread64:error=ESTALE:when={from}+ {} \"$@\"\n",
        place.display(),
        env!("CARGO_BIN_EXE_spd-launch"),
    );
    fs::write(&rank, script).unwrap();
    fs::set_permissions(&rank, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = run(scratch, "runs/x", &[]);
    command.arg("--rank-program").arg(rank);
    launch(command)
}

#[test]
fn a_file_lost_on_a_network_disk_is_named_and_the_run_continues_later() {
    if Command::new("strace").arg("-V").output().is_err() {
        return spd_testing::skip("strace");
    }
    let scratch = scratch();
    let line = "ids.bin: cannot read: Stale file handle (os error 116); the server has the file that was opened no more: was it replaced \
                there? start again";
    for from in [1, 20] {
        let ended = stale(&scratch, "ids.bin", from);
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(line), "{}", ended.stderr);
    }
    let ended = launch(run(&scratch, "runs/x", &[]));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn importances_that_see_later_tokens_are_warned_of() {
    let scratch = scratch();
    let over_sites =
        "importance={ kind = 'global_shared_transformer', d_model = 8, n_layer = 1, n_head = 2 }";
    for (out, set, are_warned_of) in [("mlp", &[][..], false), ("all", &[over_sites], true)] {
        let ended = launch(run(&scratch, out, &[&["train.steps=1"], set].concat()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        for warning in [
            ", sees later tokens, so masks may give them away\n",
            "held-out rows, means; importances see later tokens and may give them away: compare KL, not CE\n",
        ] {
            assert_eq!(
                ended.stdout.contains(warning),
                are_warned_of,
                "{warning}{}",
                ended.stdout
            );
        }
    }
}
