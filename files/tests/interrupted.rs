//! Writes that are stopped before each of their operations.
#![cfg(test)]

use std::fs;
use std::io;
use std::path::Path;

use spd_files::atomic::{
    NewFile, cut_file, names, remove, unfinished, write_dir, write_file, write_shared,
};
use spd_testing::faults::{self, Then};

fn files(content: &[u8]) -> Vec<NewFile<'_>> {
    vec![
        NewFile {
            name: "a",
            pieces: vec![content, content],
        },
        NewFile {
            name: "b",
            pieces: vec![content],
        },
    ]
}

// A rename may reach the disk before the bytes do, and a name survives only by its directory's
// sync.
#[test]
fn content_is_synced_before_the_rename_and_the_directory_after() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dir");
    let ((), first) = faults::record(|| write_dir(&path, &files(b"old")).unwrap());
    assert_eq!(
        first,
        [
            "create directory",
            "create file",
            "write",
            "write",
            "sync file",
            "create file",
            "write",
            "sync file",
            "sync directory",
            "rename",
            "sync directory",
        ]
    );
    let ((), again) = faults::record(|| write_dir(&path, &files(b"new")).unwrap());
    assert_eq!(
        again[8..],
        [
            "sync directory",
            "rename",
            "exchange",
            "sync directory",
            "remove"
        ]
    );
    assert_eq!(fs::read(path.join("b")).unwrap(), b"new");
    assert_eq!(names(folder.path()).unwrap(), ["dir"]);
}

#[test]
fn an_interrupted_write_leaves_the_old_or_the_new_file() {
    type Write = fn(&Path) -> io::Result<()>;
    let writes: [Write; 3] = [
        |path| write_file(path, &[b"new"]),
        |path| write_shared(path, &[b"ne", b"w"]),
        |path| cut_file(path, 3),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for (write, then) in writes
        .iter()
        .flat_map(|write| [(write, Then::Fail), (write, Then::Crash)])
    {
        for operation in 0.. {
            write_file(&path, &[b"new ", b"and more"]).unwrap();
            let (outcome, fired) = faults::at(operation, then, || write(&path));
            let found = fs::read(&path).unwrap();
            assert!(
                found == b"new and more" || found == b"new",
                "{operation}: {found:?}"
            );
            assert_eq!(outcome.is_err(), fired);
            if !fired {
                assert_eq!(found, b"new");
                break;
            }
            let left = unfinished(folder.path()).unwrap();
            assert!(
                then == Then::Crash || left.is_empty(),
                "{operation}: {left:?}"
            );
            left.iter().for_each(|path| remove(path).unwrap());
        }
    }
}
