//! Writes that are stopped before each of their operations.
#![cfg(test)]

use std::fs;
use std::io;
use std::path::Path;
use std::process::{self, Command};
use std::thread;
use std::time::Duration;

use spd_files::atomic::{cut_file, names, remove, unfinished, write_dir, write_file, write_shared};
use spd_files::fault::HOOK;
use spd_testing::faults::{self, Then};

// A rename may reach the disk before the bytes do, and a name survives only by its directory's
// sync.
#[test]
fn content_is_synced_before_the_rename_and_the_directory_after() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dir");
    let write = |content: &[u8]| {
        write_dir(&path, &[("a", &[content, content]), ("b", &[content])]).unwrap();
    };
    let ((), first) = faults::record(|| write(b"old"));
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
    let ((), again) = faults::record(|| write(b"new"));
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

/// In the environment of a process that ends while it writes: where it writes.
const ENDING: &str = "SPD_TEST_ENDING";

#[test]
fn a_process_that_settles_leaves_nothing_half_made() {
    if let Some(folder) = std::env::var_os(ENDING) {
        ends_while_it_writes(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_that_settles_leaves_nothing_half_made"])
        .env(ENDING, folder.path())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(5), "{ended:?}");
    assert_eq!(names(folder.path()).unwrap(), ["file"]);
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"whole");
}

/// Ends this process while a thread writes to a slow disk.
fn ends_while_it_writes(folder: &Path) -> ! {
    let file = folder.join("file");
    thread::spawn(move || {
        HOOK.set(|operation| {
            if operation == "sync file" {
                thread::sleep(Duration::from_millis(300));
            }
            None
        });
        write_shared(&file, &[b"whole"]).unwrap();
    });
    while unfinished(folder).unwrap().is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
    spd_files::settle();
    process::exit(5);
}
