//! Files of every format with a few bytes changed: each is read, or refused with an error that
//! names one of them.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use spd_dataloader::{Tokenize, Watch};
use spd_testing::mutation::{Dice, rounds};

use crate::inputs::much;
use crate::spoiled::{FORMATS, all_rows};
use crate::tokenizing::contents;
use crate::{fresh, put, tokenize};

/// Changes the files of a format many times, their headers more often than their ids.
#[expect(clippy::print_stdout, reason = "with --nocapture the counts are seen")]
fn change(name: &str, in_suite: u64) {
    let format = FORMATS.iter().find(|format| format.name == name).unwrap();
    let (dir, mut dice) = (fresh(), Dice::new(1));
    let path = (format.make)(dir.path());
    let files: Vec<_> = [Some(format.data), format.index]
        .into_iter()
        .flatten()
        .map(|file| dir.path().join(file))
        .map(|place| (fs::read(&place).unwrap(), place))
        .collect();
    let (mut read, mut refused) = (0, 0);
    for _ in rounds(in_suite) {
        let (whole, place) = dice.one(&files);
        let head = *dice.one(&[40, 300, 1100, whole.len()]);
        let (head, rest) = whole.split_at(head.min(whole.len()));
        let mut bytes = dice.mutated(head);
        if dice.below(8) > 0 {
            bytes.extend(rest);
        }
        put(place, &bytes);
        match all_rows(&path, format.dtype) {
            Ok(_) => read += 1,
            Err(line) => {
                let is_named = line.starts_with(&format!("{}/", dir.path().display()));
                assert!(is_named && !line.contains('\n'), "{name}: {line:?}");
                refused += 1;
            }
        }
        put(place, whole);
    }
    println!("{name}: {read} read, {refused} refused");
    assert!(refused > in_suite / 4, "{name}: {refused} refused");
}

#[test]
fn changed_files_of_ours_are_read_or_named() {
    change("ours", 60);
}

#[test]
fn changed_files_of_nanogpt_are_read_or_named() {
    change("nanoGPT", 60);
}

#[test]
fn changed_files_of_llm_c_are_read_or_named() {
    change("llm.c", 60);
}

#[test]
fn changed_files_of_megatron_are_read_or_named() {
    change("Megatron", 60);
}

/// Copies a directory of files and directories.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn a_changed_journal_changes_no_byte_of_a_dataset() {
    let (dir, mut dice) = (fresh(), Dice::new(2));
    let options = Tokenize {
        threads: Some(1),
        ..much(dir.path())
    };
    let out = &options.out;
    tokenize(&options).unwrap();
    let straight = contents(out);
    fs::remove_dir_all(out).unwrap();
    let watch = Watch::default();
    let seen = out.join(".partial/train/tokens-00020.safetensors");
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            while !seen.try_exists().unwrap() && !out.join("train").try_exists().unwrap() {
                thread::sleep(Duration::from_micros(200));
            }
            watch.stop.store(true, Ordering::Relaxed);
        });
        spd_dataloader::tokenize(&options, &watch)
    });
    if ended.is_ok() {
        return;
    }
    let kept = dir.path().join("kept");
    copy(out, &kept);
    let journal = out.join(".partial/journal.json");
    let whole = fs::read(&journal).unwrap();
    let mut refused = 0;
    for round in rounds(4) {
        fs::remove_dir_all(out).unwrap();
        copy(&kept, out);
        // Digits too: a changed journal.
        let bytes = match round % 2 {
            0 => dice.mutated(&whole),
            _ => {
                let mut bytes = whole.clone();
                let digits = bytes
                    .iter()
                    .enumerate()
                    .filter(|(_, byte)| byte.is_ascii_digit());
                let digits: Vec<usize> = digits.map(|(at, _)| at).collect();
                bytes[*dice.one(&digits)] = b'0' + u8::try_from(dice.below(10)).unwrap();
                bytes
            }
        };
        put(&journal, &bytes);
        match tokenize(&options) {
            Ok(_) => {
                let changed = String::from_utf8_lossy(&bytes);
                assert!(contents(out) == straight, "{changed}");
            }
            Err(error) => {
                let line = error.to_string();
                assert!(
                    line.starts_with(&dir.path().display().to_string()),
                    "{line}"
                );
                refused += 1;
            }
        }
    }
    println!("journal: {refused} refused");
}
