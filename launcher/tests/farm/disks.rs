//! Full and read-only disks, low limits and odd environments: a run reports what fails, and
//! continues where it can.
//!
//! Disks are mounted in a namespace (`unshare`) that ends with the launch. Where that is not
//! permitted, those cases count as skipped.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::LazyLock;

use crate::launch::{BINARY, Ended, LIMIT, scripted};
use crate::random::Random;
use crate::runs::{RUN, TEXT, TOY, Uninterrupted, tree};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "disks",
    cases: 110,
    columns: &["skipped", "done", "failed", "refused", "bit-equal"],
};

/// The environment of a launch: a script that executes it, and variables.
struct Environment {
    script: String,
    set: Vec<(&'static str, OsString)>,
    unset: Vec<&'static str>,
}

impl Environment {
    fn script(script: impl Into<String>) -> Self {
        Self {
            script: script.into(),
            set: vec![],
            unset: vec![],
        }
    }

    fn variable(name: &'static str, value: impl AsRef<OsStr>) -> Self {
        Self {
            set: vec![(name, value.as_ref().to_owned())],
            ..Self::script(PLAIN)
        }
    }
}

const PLAIN: &str = "exec \"$@\"";

type Surround = fn(&mut Random) -> Environment;

/// Kilobytes of address space that the program needs: with less the kernel ends it before its first
/// line.
static LOADED: LazyLock<usize> = LazyLock::new(|| {
    let starts = |kilobytes: &usize| {
        let mut command = Command::new("sh");
        let script = format!("ulimit -v {kilobytes}; exec {BINARY} --version");
        let ended = command.args(["-c", &script]).output().unwrap();
        ended.status.signal().is_none()
    };
    let mut sizes = (10_000..100_000).step_by(500);
    sizes.find(starts).unwrap()
});

const PLACES: [(&str, Surround); 11] = [
    ("full disk: runs", |random| full("runs", random.below(1200))),
    ("full disk: cache", |random| full("cache", random.below(60))),
    ("read-only: runs", |_| read_only("runs")),
    ("read-only: cache", |_| read_only("cache")),
    ("read-only: all", |_| read_only(".")),
    ("longest file", |random| {
        // Blocks of 512 bytes; beyond them a write fails as on a full disk.
        let blocks = 8 + random.below(72);
        Environment::script(format!("trap '' XFSZ; ulimit -f {blocks}; {PLAIN}"))
    }),
    ("open files", |random| {
        Environment::script(format!("ulimit -n {}; {PLAIN}", 16 + random.below(24)))
    }),
    ("addresses", |random| {
        Environment::script(format!(
            "ulimit -v {}; {PLAIN}",
            *LOADED + random.below(30_000)
        ))
    }),
    ("streams", |random| {
        let closed = [
            "<&-",
            ">&-",
            "2>&-",
            ">&- 2>&-",
            "<&- >&- 2>&-",
            ">/dev/full",
            "2>/dev/full",
            ">/dev/full 2>&1",
        ];
        Environment::script(format!("{PLAIN} {}", random.one(&closed)))
    }),
    ("place", |random| {
        let places = [
            // The working directory has been removed.
            "mkdir gone && cd gone && rmdir ../gone && ",
            "umask 777; ",
            "umask 000; ",
            "ulimit -s 256; ",
            "ulimit -c 0; ",
            "nice ",
        ];
        let place = random.one(&places);
        Environment::script(if *place == "nice " {
            "exec nice \"$@\"".to_owned()
        } else {
            format!("{place}{PLAIN}")
        })
    }),
    ("variables", variables),
];

#[test]
#[ignore = "minutes; run with --ignored"]
fn runs_survive_limits_or_report_them() {
    let straight = Uninterrupted::of_each(&[TOY, TEXT]);
    let may_mount = may_mount();
    FIELD.run(|case| {
        let (name, surround) = PLACES[case.number as usize % PLACES.len()];
        case.kind(name);
        let around = surround(&mut case.random);
        if around.script.contains("mount") && !may_mount {
            case.count("skipped");
            return Ok(());
        }
        let straight = &straight[usize::from(case.random.one_in(3))];
        let cached = case.random.one_in(2) && !name.ends_with("cache");
        straight.furnish(case.dir(), cached);
        for name in ["runs", "cache"] {
            fs::create_dir_all(case.dir().join(name)).unwrap();
        }
        surrounded(case, straight, &around)
    });
}

/// Whether this process may mount disks in a namespace.
pub(crate) fn may_mount() -> bool {
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", "mount -t tmpfs none /mnt"]);
    command.output().is_ok_and(|output| output.status.success())
}

/// A disk of some KiB at a path; its files are kept there, so that the run can continue.
fn full(place: &str, kib: usize) -> Environment {
    let kib = 4 + kib;
    Environment::script(on_disk(place, kib, "\"$@\"; code=$?"))
}

/// Runs a command on a disk of some KiB at a path, and exits with `code`; its files are kept there.
pub(crate) fn on_disk(place: &str, kib: usize, done: &str) -> String {
    in_namespace(&format!(
        "mkdir -p full kept && mount -t tmpfs -o size={kib}k none full && mount --bind full {place} || exit 99; \
         {done}; cp -a full/. kept/; umount {place}; cp -a kept/. {place}/; exit $code"
    ))
}

fn read_only(place: &str) -> Environment {
    Environment::script(in_namespace(&format!(
        "mount --bind {place} {place} && mount -o remount,bind,ro {place} || exit 99; cd \"$PWD\"; {PLAIN}"
    )))
}

fn in_namespace(script: &str) -> String {
    let quoted = script.replace('\'', "'\\''");
    format!("exec unshare -rm sh -c '{quoted}' mount \"$@\"")
}

fn variables(random: &mut Random) -> Environment {
    let odd: [&[u8]; 7] = [
        b"",
        b"0",
        b"text.txt",
        b"a/relative/place",
        b"\xff\xfe",
        b"\x1b[2J",
        &[b'x'; 5000],
    ];
    let value = odd[random.below(odd.len())];
    let value = OsStr::from_bytes(value);
    match random.below(12) {
        0..=2 => Environment::variable("SPD_CACHE", value),
        3 => Environment {
            unset: vec!["SPD_CACHE", "HOME", "XDG_CACHE_HOME"],
            ..Environment::script(PLAIN)
        },
        4 => Environment {
            unset: vec!["SPD_CACHE", "XDG_CACHE_HOME"],
            ..Environment::variable("HOME", value)
        },
        5 => Environment {
            unset: vec!["SPD_CACHE"],
            ..Environment::variable("XDG_CACHE_HOME", value)
        },
        6 => Environment::variable("TMPDIR", "/nowhere"),
        7 => Environment {
            set: ["LANG", "LC_ALL", "TERM"]
                .map(|name| (name, value.to_owned()))
                .to_vec(),
            ..Environment::script(PLAIN)
        },
        8 => Environment {
            set: ["COLUMNS", "LINES"]
                .map(|name| (name, value.to_owned()))
                .to_vec(),
            ..Environment::script(PLAIN)
        },
        9 => Environment::variable("RAYON_NUM_THREADS", value),
        10 => Environment {
            unset: vec!["PATH"],
            ..Environment::script(PLAIN)
        },
        _ => Environment::variable("RUST_BACKTRACE", "full"),
    }
}

fn surrounded(
    case: &mut Case,
    straight: &Uninterrupted,
    around: &Environment,
) -> Result<(), String> {
    let dir = case.dir().to_owned();
    let before = tree(&dir);
    let command = |arguments: &[&str]| {
        let mut command = straight.small.complete(scripted(&dir, &around.script));
        command.args(arguments);
        for (name, value) in &around.set {
            command.env(name, value);
        }
        for name in &around.unset {
            command.env_remove(name);
        }
        command
    };
    let mut ends = vec![];
    for arguments in [&["--dry-run"][..], &[]] {
        let running = case.start(command(arguments));
        let ended = case.end(running, LIMIT)?;
        if ended.status.code() == Some(127) {
            // It could not be loaded: none of our code has run.
            case.count("skipped");
            return Ok(());
        }
        ended.one_of(&[0, 1, 2])?;
        ends.push(ended);
    }
    let [dry, ended] = &ends[..] else {
        unreachable!("there were two launches")
    };
    let code = ended.code()?;
    match code {
        0 => case.count("done"),
        1 => case.count("failed"),
        _ => case.count("refused"),
    }
    said(ended, around)?;
    // A launcher that refuses has not begun, and a dry run refuses too.
    if code == 2 && dry.code()? == 0 {
        return Err("the dry run finds nothing wrong where the run is refused".to_owned());
    }
    let left: Vec<_> = tree(&dir)
        .into_iter()
        .filter(|path| {
            !before.contains(path)
                && !path.starts_with(dir.join("kept"))
                && !path.starts_with(dir.join("full"))
        })
        .collect();
    if code == 2 && !left.is_empty() {
        return Err(format!("is refused, and leaves {left:?}"));
    }
    case.launch(straight.small.command(&dir), &[0])?;
    if dir.join(RUN).is_dir() {
        straight.compare(&dir)?;
    }
    case.count("bit-equal");
    Ok(())
}

/// Whether a run that did not finish gives the reason on a stream that can be read.
fn said(ended: &Ended, around: &Environment) -> Result<(), String> {
    let heard = !around.script.contains("2>");
    let done = ended.code()? == 0;
    if !done && heard && !around.script.contains("/dev/full 2>&1") {
        let error = ended.error()?;
        if around.script.contains("ulimit -v") && error.contains("is the disk there") {
            return Err(format!("blames the disk for addresses: {error}"));
        }
    }
    Ok(())
}
