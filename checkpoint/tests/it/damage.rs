//! A damaged checkpoint is set aside, and the previous one is used.

#![expect(
    clippy::disallowed_methods,
    reason = "the damage is done in place, as a disk would do it"
)]

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::{CWD, Mode, mkfifoat};
use spd_checkpoint::{CheckpointError, load, look, newest, step_path, verify, write};
use xxhash_rust::xxh3::xxh3_128;

use crate::{quick_dir, sample};

const FILES: [&str; 3] = ["tensors.safetensors", "meta.json", "manifest.json"];

/// A root with checkpoints of steps 1 and 2.
fn two_steps() -> tempfile::TempDir {
    let root = quick_dir();
    write(root.path(), &sample(1)).unwrap();
    write(root.path(), &sample(2)).unwrap();
    root
}

/// Asserts that step 2 is set aside and step 1 is used, renames step 2 back, and returns the
/// reason.
fn set_aside(root: &Path, what: &str) -> String {
    let two = step_path(root, 2);
    assert!(verify(&two).is_err(), "{what}");
    let seen = look(root).unwrap();
    assert_eq!(seen.newest, Some((1, sample(1).meta)), "{what}");
    let found = newest(root).unwrap();
    assert_eq!(found.snapshot, Some(sample(1)), "{what}");
    let [(aside, reason)] = found.set_aside.as_slice() else {
        panic!("{what}: {found:?}")
    };
    assert_eq!(aside, &root.join("step-00000002.bad"));
    assert_eq!(seen.damaged, [(two.clone(), reason.clone())], "{what}");
    fs::rename(aside, &two).unwrap();
    reason.clone()
}

fn reason_after(damage: impl Fn(&Path)) -> String {
    let root = two_steps();
    damage(&step_path(root.path(), 2));
    set_aside(root.path(), "damage")
}

#[test]
fn every_flipped_byte_of_every_file_is_noticed() {
    let root = two_steps();
    for name in FILES {
        let path = step_path(root.path(), 2).join(name);
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        for index in 0..good.len() {
            bad[index] ^= 1 << (index % 8);
            fs::write(&path, &bad).unwrap();
            set_aside(root.path(), &format!("byte {index} of {name}"));
            bad[index] = good[index];
        }
        fs::write(&path, &good).unwrap();
    }
    assert_eq!(newest(root.path()).unwrap().snapshot, Some(sample(2)));
}

#[test]
fn every_shorter_file_and_a_longer_one_is_noticed() {
    let root = two_steps();
    for name in FILES {
        let path = step_path(root.path(), 2).join(name);
        let good = fs::read(&path).unwrap();
        for bytes in 0..good.len() {
            fs::write(&path, &good[..bytes]).unwrap();
            set_aside(root.path(), &format!("{name} cut to {bytes}"));
        }
        fs::write(&path, [good.as_slice(), b"\n"].concat()).unwrap();
        set_aside(root.path(), &format!("{name} and a byte"));
        fs::write(&path, &good).unwrap();
    }
}

#[test]
fn exchanged_files_of_two_steps_are_noticed() {
    for name in FILES {
        let root = two_steps();
        let [one, two] = [1, 2].map(|step| step_path(root.path(), step).join(name));
        let (old, new) = (fs::read(&one).unwrap(), fs::read(&two).unwrap());
        fs::write(&one, new).unwrap();
        fs::write(&two, old).unwrap();
        let found = newest(root.path()).unwrap();
        assert!(
            found.snapshot.is_none() && found.set_aside.len() == 2,
            "{name}: {found:?}"
        );
    }
}

#[test]
fn a_directory_under_the_name_of_another_step_is_noticed() {
    let root = two_steps();
    fs::rename(step_path(root.path(), 2), step_path(root.path(), 3)).unwrap();
    let found = newest(root.path()).unwrap();
    assert_eq!(found.set_aside[0].1, "manifest.json is that of step 2");
    assert_eq!(found.snapshot, Some(sample(1)));
}

#[test]
fn the_reason_names_the_file_or_the_tensor() {
    for name in FILES {
        let gone = |dir: &Path| fs::remove_file(dir.join(name)).unwrap();
        assert_eq!(reason_after(gone), format!("{name} is missing"));
        let replaced = |dir: &Path| {
            gone(dir);
            fs::create_dir(dir.join(name)).unwrap();
        };
        let reason = reason_after(replaced);
        assert!(reason.starts_with(name), "{reason}");
        let waits = |dir: &Path| {
            gone(dir);
            let path = dir.join(name);
            mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        };
        assert_eq!(
            reason_after(waits),
            format!("{name} cannot be read: expected a file, found a named pipe")
        );
    }

    let empty = |dir: &Path| fs::write(dir.join("meta.json"), b"").unwrap();
    assert_eq!(
        reason_after(empty),
        "meta.json has 0 bytes, manifest.json promises 58"
    );

    let last_bit = |dir: &Path| {
        let path = dir.join("tensors.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
    };
    let promised = xxh3_128(&sample(2).tensors[0].bytes);
    let reason = reason_after(last_bit);
    assert!(
        reason.starts_with("tensor `routing` has the hash "),
        "{reason}"
    );
    assert!(
        reason.ends_with(&format!(", manifest.json promises {promised:032x}")),
        "{reason}"
    );

    let in_manifest = |dir: &Path| {
        let path = dir.join("manifest.json");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"step\":2", "\"step\":3")).unwrap();
    };
    assert_eq!(
        reason_after(in_manifest),
        "manifest.json does not match its own hash"
    );
}

#[test]
fn loading_a_damaged_checkpoint_is_an_error() {
    let root = two_steps();
    let two = step_path(root.path(), 2);
    fs::remove_file(two.join("meta.json")).unwrap();
    assert_eq!(
        load(&two).unwrap_err().to_string(),
        format!(
            "{}: meta.json is missing; resume from an older checkpoint",
            two.display()
        )
    );
}

#[test]
fn setting_aside_overwrites_nothing() {
    let root = two_steps();
    for bad in ["step-00000002.bad", "step-00000002.bad-2"] {
        fs::remove_file(step_path(root.path(), 2).join("meta.json")).unwrap();
        assert_eq!(
            newest(root.path()).unwrap().set_aside[0].0,
            root.path().join(bad)
        );
        write(root.path(), &sample(2)).unwrap();
    }
    assert_eq!(newest(root.path()).unwrap().snapshot, Some(sample(2)));
}

/// Gives step 2 a manifest with this body and a valid hash.
fn forge(root: &Path, body: &str) {
    let hash = xxh3_128(body.as_bytes());
    let text = format!("{{\"manifest\":{body},\"xxh3_128\":\"{hash:032x}\"}}\n");
    fs::write(step_path(root, 2).join("manifest.json"), text).unwrap();
}

fn body(root: &Path) -> String {
    let text = fs::read_to_string(step_path(root, 2).join("manifest.json")).unwrap();
    let end = text.rfind(",\"xxh3_128\"").unwrap();
    text["{\"manifest\":".len()..end].to_owned()
}

// All hashes hold; only the shape differs.
#[test]
fn a_manifest_and_a_header_that_disagree_are_noticed() {
    let root = two_steps();
    forge(root.path(), &body(root.path()).replace("[3,2]", "[2,3]"));
    assert_eq!(
        set_aside(root.path(), "another shape"),
        "the header of tensors.safetensors is not that of its manifest"
    );
}

#[test]
fn an_unknown_format_is_an_error_and_is_not_renamed() {
    let root = two_steps();
    forge(
        root.path(),
        &body(root.path()).replace("\"format\":1", "\"format\":3"),
    );
    let two = step_path(root.path(), 2);
    assert_eq!(
        newest(root.path()).unwrap_err().to_string(),
        format!(
            "{}: written in checkpoint format 3, this build reads formats up to 2; \
             resume with the build that wrote it or move the directory away",
            two.display()
        )
    );
    assert!(two.is_dir());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    // A forged manifest with a valid hash, one number of which is replaced by any number.
    #[test]
    fn a_forged_manifest_is_damage(at in any::<prop::sample::Index>(), lie in any::<u64>()) {
        let root = two_steps();
        let body = body(root.path());
        let digits = |c: char| c.is_ascii_digit();
        let numbers: Vec<usize> = body
            .match_indices(digits)
            .map(|(index, _)| index)
            .filter(|&index| matches!(body.as_bytes()[index - 1], b':' | b'[' | b','))
            .collect();
        let begin = numbers[at.index(numbers.len())];
        let end = begin + body[begin..].find(|c| !digits(c)).unwrap();
        prop_assume!(body[begin..end] != lie.to_string());
        forge(root.path(), &format!("{}{lie}{}", &body[..begin], &body[end..]));
        let error = load(&step_path(root.path(), 2)).unwrap_err();
        let expected =
            matches!(error, CheckpointError::Damaged { .. } | CheckpointError::Format { .. });
        prop_assert!(expected, "{}", error);
    }

    #[test]
    fn junk_is_damage(name in 0..FILES.len(), junk in any::<Vec<u8>>()) {
        let root = two_steps();
        fs::write(step_path(root.path(), 2).join(FILES[name]), junk).unwrap();
        set_aside(root.path(), "junk");
    }
}
