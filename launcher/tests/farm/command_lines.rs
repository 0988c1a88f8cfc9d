//! Flags and values in random combinations: each is executed, or refused with a reason.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;

use crate::launch::guarded;
use crate::random::Random;
use crate::runs::{RUN, TOY, Uninterrupted, config, copy, tree};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "command_lines",
    cases: 600,
    columns: &["done", "failed", "refused"],
};

/// The words before the flags, and the flags with and without a value.
struct Shape {
    name: &'static str,
    words: &'static [&'static str],
    valued: &'static [&'static str],
    bare: &'static [&'static str],
}

const SHAPES: [Shape; 16] = [
    Shape {
        name: "dry run",
        words: &["CONFIG", "--dry-run"],
        valued: &RUN_FLAGS,
        bare: &["--fresh", "--dry-run", "--help", "--version", "--nonsense"],
    },
    Shape {
        name: "run",
        words: &["CONFIG"],
        valued: &[
            "--seeds",
            "--sweep",
            "--jobs",
            "--grace",
            "--restarts",
            "--set",
            "--out",
            "--memory",
        ],
        bare: &["--fresh"],
    },
    Shape {
        name: "tokenize",
        words: &[
            "tokenize",
            "text.txt",
            "--tokenizer",
            "bytes",
            "--out",
            "made",
        ],
        valued: &[
            "--tokenizer",
            "--out",
            "--val-fraction",
            "--separator",
            "--eos",
            "--shard-tokens",
            "--threads",
        ],
        bare: &["--overwrite", "--help"],
    },
    Shape {
        name: "bench",
        words: &[
            "bench", "tms_5-2", "--steps", "1", "--warmup", "0", "--batch", "8",
        ],
        valued: &["--threads", "--gpus", "--seq", "--precision", "--out"],
        bare: &["--phases", "--help"],
    },
    Shape {
        name: "profile",
        words: &["profile", "CONFIG", "--steps", "1"],
        valued: &["--threads", "--gpus", "--set", "--trace"],
        bare: &["--help"],
    },
    Shape {
        name: "runs",
        words: &["runs"],
        valued: &["RUN", "."],
        bare: &["RUN", "--json", "--help"],
    },
    Shape {
        name: "tail",
        words: &["tail", "RUN"],
        valued: &["-n", "--rows"],
        bare: &["--all", "--json", "--wait", "--help"],
    },
    Shape {
        name: "stop",
        words: &["stop", "RUN"],
        valued: &["RUN"],
        bare: &["--no-wait", "--now", "--help"],
    },
    Shape {
        name: "configs",
        words: &["configs"],
        valued: &["configs", "tms_5-2"],
        bare: &["tms_5-2", "pile-4L", "--help"],
    },
    Shape {
        name: "report",
        words: &["report", "RUN"],
        valued: &["--out", "RUN"],
        bare: &["RUN", "--help"],
    },
    // With an existing run it would serve for ever.
    Shape {
        name: "watch",
        words: &["watch", "none"],
        valued: &["--port", "RUN"],
        bare: &["RUN", "--help"],
    },
    // Without trackers on a network.
    Shape {
        name: "ship",
        words: &["ship", "RUN"],
        valued: &["--tracker", "RUN"],
        bare: &["--help"],
    },
    Shape {
        name: "export",
        words: &["export", "RUN", "--out", "made"],
        valued: &["--out", "RUN"],
        bare: &["--help"],
    },
    Shape {
        name: "figures",
        words: &["figures", "RUN"],
        valued: &["--threads", "RUN"],
        bare: &["--help"],
    },
    Shape {
        name: "inspect",
        words: &["inspect", "RUN"],
        valued: &["--dtype", "RUN"],
        bare: &["--help"],
    },
    // Without a run file, which alone is a run of a minute.
    Shape {
        name: "doctor or nothing",
        words: &[],
        valued: &[
            "--out",
            "doctor",
            "rank",
            "tokenize",
            "bench",
            "profile",
            "--run-dir",
        ],
        bare: &["doctor", "--help", "rank"],
    },
];

const RUN_FLAGS: [&str; 11] = [
    "--out",
    "--threads",
    "--memory",
    "--set",
    "--seeds",
    "--sweep",
    "--jobs",
    "--gpus",
    "--grace",
    "--hang-seconds",
    "--restarts",
];

/// None of them names a path outside of the case that could be written to or moved.
const VALUES: [&str; 48] = [
    "",
    " ",
    "0",
    "1",
    "2",
    "-1",
    "3.5",
    "1e9",
    "8000",
    "4294967296",
    "18446744073709551615",
    "99999999999999999999999",
    "nan",
    "0..2",
    "2..0",
    "0..0",
    "1,1",
    "0..18446744073709551615",
    "0,a",
    "train.steps=2",
    "train.steps=",
    "train.steps",
    "=",
    "train.stepz=3",
    "train.lr=1e-3,2e-3",
    "train.lr=1e-3,0.001",
    "train.lr=1e-3,\"x",
    "loss.7.coeff=1",
    "loss.99999999999999999999.coeff=1",
    "seed=1",
    "target.n_features=9,10",
    "data.probability=0.5",
    "name=\"\\u001b[31m\"",
    "1KiB",
    "4GiB",
    "99999999TiB",
    "GiB",
    "a",
    "a/",
    "a/b/c",
    ".",
    "..",
    "text.txt/",
    "text.txt/a",
    "/proc/none",
    "text.txt",
    "\u{1b}[2J\u{7}",
    "bytes",
];

#[test]
#[ignore = "minutes; run with --ignored"]
fn odd_command_lines_are_done_or_refused() {
    let made = Uninterrupted::of(TOY);
    FIELD.run(|case| {
        // A directory of its own for what `..` names.
        let cwd = case.dir().join("cwd");
        fs::create_dir(&cwd).unwrap();
        fs::copy(made.path().join("text.txt"), cwd.join("text.txt")).unwrap();
        copy(&made.path().join(RUN), &cwd.join("run"));
        let shape = &SHAPES[case.number as usize % SHAPES.len()];
        case.kind(shape.name);
        done_or_refused(case, shape)
    });
}

fn done_or_refused(case: &mut Case, shape: &Shape) -> Result<(), String> {
    let dir = case.dir().join("cwd");
    let random = &mut case.random;
    let mut words: Vec<OsString> = shape.words.iter().map(|&word| named(word)).collect();
    for _ in 0..random.below(4) {
        if random.one_in(4) {
            let word = *random.one(shape.bare);
            words.push(named(word));
        } else {
            let flag = *random.one(shape.valued);
            words.push(named(flag));
            let fits = fitting(flag);
            words.push(if fits.is_empty() || random.one_in(2) {
                a_value(random)
            } else {
                random.one(fits).into()
            });
        }
    }
    if random.one_in(12) {
        let at = random.below(words.len() + 1);
        words.insert(at, a_value(random));
    }
    let mut command = guarded(&dir);
    command.args(words);
    if shape.name == "run" {
        for set in TOY.set {
            command.args(["--set", set]);
        }
        command.args(["--set", "train.steps=2", "--set", "target.train.steps=2"]);
        command.args(["--set", "train.faithfulness_warmup.steps=2"]);
    }
    let before = tree(&dir);
    let ended = case.launch(command, &[0, 1, 2])?;
    match ended.code()? {
        0 => case.count("done"),
        1 => {
            case.count("failed");
            ended.error()?;
            return Err("leaves with code 1, where nothing happened but odd words".to_owned());
        }
        _ => {
            case.count("refused");
            if !ended.stderr.starts_with("error: ") && !ended.stderr.contains("Usage: ") {
                return Err("the first line is no error".to_owned());
            }
            if tree(&dir) != before {
                return Err("is refused, and leaves something on the disk".to_owned());
            }
        }
    }
    if shape.name == "dry run" && tree(&dir) != before {
        return Err("a dry run leaves something on the disk".to_owned());
    }
    Ok(())
}

fn named(word: &str) -> OsString {
    match word {
        "CONFIG" => config(TOY.config).into(),
        "RUN" => "run".into(),
        word => word.into(),
    }
}

/// Valid values of a flag.
fn fitting(flag: &str) -> &'static [&'static str] {
    match flag {
        "--out" | "--trace" => &["a", "a/b", "a/", "./a"],
        "--threads" | "--jobs" | "--restarts" | "--grace" | "--hang-seconds" => &["1", "2", "3"],
        "--memory" => &["4GiB", "300MiB"],
        "--set" => &[
            "train.lr=1e-4",
            "seed=1",
            "data.probability=0.5",
            "checkpoint.every=1",
        ],
        "--seeds" => &["0..2", "4", "1,2"],
        "--sweep" => &["train.lr=1e-3,2e-3", "data.probability=0.1,0.2"],
        "--gpus" => &["0"],
        "--precision" => &["fp32"],
        "--val-fraction" => &["0", "0.5"],
        "--separator" => &["\n", "line"],
        "--shard-tokens" => &["1000"],
        "-n" | "--rows" => &["0", "3", "1000"],
        "--tracker" => &["tensorboard"],
        "--dtype" => &["u16", "u32"],
        "--port" => &["0", "65535"],
        _ => &[],
    }
}

fn a_value(random: &mut Random) -> OsString {
    match random.below(30) {
        0 => OsString::from_vec(vec![b'a', 0xff, 0xfe]),
        1 => "x".repeat(1 + random.below(5000)).into(),
        2 => named("CONFIG"),
        _ => random.one(&VALUES).into(),
    }
}
