//! The shared file of frozen tensors is written once, and damage to it costs no checkpoint.

#![expect(
    clippy::disallowed_methods,
    reason = "the damage is done in place, as a disk would do it"
)]

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use spd_checkpoint::{
    CheckpointError, Snapshot, load, look, newest, prune, step_path, verify, write, write_frozen,
};

use crate::{quick_dir, sample};

/// A checkpoint with a frozen tensor of 64 KiB, the same for all steps.
fn with_target(step: u64) -> Snapshot {
    let mut snapshot = sample(step);
    let mut target = snapshot.tensors[1].clone();
    (target.name, target.is_frozen) = ("target".into(), true);
    target.shape = vec![128, 128];
    target.bytes = (0..1 << 16)
        .map(|index: u32| index.to_le_bytes()[1])
        .collect();
    snapshot.tensors.insert(1, target);
    snapshot
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The path of the shared file.
fn shared(root: &Path) -> PathBuf {
    let mut names = names(root);
    names.retain(|name| name.starts_with("frozen-") && name.ends_with(".safetensors"));
    let [name] = names.try_into().unwrap();
    root.join(name)
}

#[test]
fn frozen_tensors_are_stored_once_for_all_checkpoints() {
    let root = quick_dir();
    for step in 1..=5 {
        write(root.path(), &with_target(step)).unwrap();
        prune(root.path(), NonZeroUsize::new(2).unwrap()).unwrap();
    }
    let file = shared(root.path());
    let frozen = fs::read(&file).unwrap();
    let read = SafeTensors::deserialize(&frozen).unwrap();
    assert_eq!(read.names(), ["target"]);
    assert_eq!(
        read.tensor("target").unwrap().data(),
        with_target(5).tensors[1].bytes
    );
    for step in [4, 5] {
        let dir = step_path(root.path(), step);
        assert_eq!(load(&dir).unwrap(), with_target(step));
        let own = fs::read(dir.join("tensors.safetensors")).unwrap();
        assert!(own.len() < 1000, "{} bytes", own.len());
        assert_eq!(SafeTensors::deserialize(&own).unwrap().len(), 4);
    }
    assert_eq!(names(root.path()).len(), 3);
}

#[test]
fn a_damaged_frozen_file_is_reported_and_rewritten() {
    type Damage = fn(&Path);
    let damages: [(Damage, &str); 4] = [
        (
            |path| {
                let mut bytes = fs::read(path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(path, bytes).unwrap();
            },
            "tensor `target` has the hash ",
        ),
        (
            |path| fs::write(path, "").unwrap(),
            "has 0 bytes, manifest.json promises ",
        ),
        (|path| fs::remove_file(path).unwrap(), "is missing"),
        (
            |path| {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
            },
            "cannot be read: ",
        ),
    ];
    for (damage, reason) in damages {
        // Both a resume and the next save have the tensors and rewrite the file.
        for mend in [write_frozen, |root: &Path, all: &Snapshot| {
            write(root, all).map(drop)
        }] {
            let root = quick_dir();
            let root = root.path();
            write(root, &with_target(1)).unwrap();
            write(root, &with_target(2)).unwrap();
            let file = shared(root);
            damage(&file);
            let begin = format!("{}: {reason}", file.display());
            let end = "; put it back, or go on with the run, which writes it again";
            for error in [
                load(&step_path(root, 2)).unwrap_err(),
                verify(&step_path(root, 2)).unwrap_err(),
                newest(root).unwrap_err(),
                prune(root, NonZeroUsize::MIN).unwrap_err(),
            ] {
                assert!(matches!(error, CheckpointError::Frozen { .. }), "{error}");
                let said = error.to_string();
                assert!(said.starts_with(&begin) && said.ends_with(end), "{said}");
            }
            let seen = look(root).unwrap();
            assert_eq!(seen.newest, Some((2, with_target(2).meta)));
            mend(root, &with_target(3)).unwrap();
            assert_eq!(shared(root), file);
            let found = newest(root).unwrap();
            assert!(found.set_aside.is_empty());
            let found = found.snapshot.unwrap();
            assert!(found == with_target(found.step) && found.step >= 2);
        }
    }
}
