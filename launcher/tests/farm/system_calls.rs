//! A system call of the rank fails, or is replaced by a kill: the run continues, or gives the
//! reason, and ends with the bits of an undisturbed one. Needs strace, without which the suite is
//! skipped.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::launch::{BINARY, LIMIT};
use crate::runs::{TOY, Uninterrupted};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "system_calls",
    cases: 160,
    columns: &["done", "failed", "refused", "bit-equal"],
};

/// System calls, with the injected results.
const INJECTED: [(&str, &str); 19] = [
    ("fdatasync", "error=EIO"),
    ("fdatasync", "signal=KILL"),
    ("flock", "error=ENOLCK"),
    ("fsync", "error=EIO"),
    ("fsync", "error=ENOSPC"),
    ("fsync", "signal=KILL"),
    ("ftruncate", "error=EIO"),
    ("mkdir", "error=ENOSPC"),
    ("openat", "error=EIO"),
    ("openat", "error=EMFILE"),
    ("read", "error=EIO"),
    ("rename", "error=EIO"),
    ("rename", "error=ENOSPC"),
    ("rename", "signal=KILL"),
    ("unlinkat", "error=EIO"),
    ("unlinkat", "signal=KILL"),
    ("write", "error=EIO"),
    ("write", "error=ENOSPC"),
    ("write", "signal=KILL"),
];

#[test]
#[ignore = "minutes; run with --ignored"]
fn failing_calls_lose_nothing() {
    if Command::new("strace").arg("-V").output().is_err() {
        println!("\nsystem_calls: skipped, as there is no strace here\n");
        return;
    }
    let straight = Uninterrupted::of(TOY);
    FIELD.run(|case| injected(case, &straight));
}

fn injected(case: &mut Case, straight: &Uninterrupted) -> Result<(), String> {
    let (call, what) = *case.random.one(&INJECTED);
    case.kind(format!("{call} {what}"));
    let cached = case.random.one_in(2);
    straight.furnish(case.dir(), cached);
    // A rank's threads make up to about a hundred calls each, mostly early ones.
    let most = 1 + case.random.below(200);
    let number = 1 + case.random.below(most);
    let rank = case.dir().join("rank");
    let script = format!(
        "#!/bin/sh\nexec strace -f -qq -o trace -e trace={call} -e inject={call}:{what}:when={number} {BINARY} \"$@\"\n"
    );
    fs::write(&rank, script).unwrap();
    fs::set_permissions(&rank, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = straight.small.command(case.dir());
    command.arg("--rank-program").arg(rank);
    let running = case.start(command);
    let ended = case.end(running, LIMIT)?;
    case.count(match ended.one_of(&[0, 1, 2])? {
        0 => "done",
        1 => "failed",
        _ => "refused",
    });
    if ended.code() != Ok(0) {
        ended.error()?;
    }
    case.launch(straight.small.command(case.dir()), &[0])?;
    straight.compare(case.dir())?;
    case.count("bit-equal");
    Ok(())
}
