//! Shipped run files with faults: refused with one line for each fault, or planned.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use crate::launch::guarded;
use crate::random::Random;
use crate::runs::{config, make_data, tree};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "run_files",
    cases: 2700,
    columns: &["planned", "refused"],
};

/// Time limit for reading a file and planning its run.
const LIMIT: Duration = Duration::from_secs(60);

const MUTATIONS: [(&str, Mutation); 10] = [
    ("number replaced", |lines, random| number(lines, random)),
    ("text replaced", |lines, random| text(lines, random)),
    ("key misspelt", |lines, random| key(lines, random)),
    ("value of another key", |lines, random| value(lines, random)),
    ("line deleted", |lines, random| {
        let at = random.below(lines.len());
        lines.remove(at);
    }),
    ("line doubled", |lines, random| {
        let line = random.one(lines).clone();
        let at = random.below(lines.len() + 1);
        lines.insert(at, line);
    }),
    ("lines swapped", |lines, random| {
        let (a, b) = (random.below(lines.len()), random.below(lines.len()));
        lines.swap(a, b);
    }),
    ("byte changed", |lines, random| {
        let line = a_line(lines, random);
        let at = random.below(line.len());
        line[at] = random.byte();
    }),
    ("bytes inserted", |lines, random| {
        let line = a_line(lines, random);
        for _ in 0..=random.below(4) {
            let at = random.below(line.len() + 1);
            line.insert(at, *random.one(b"\"'[]{}=#.,\\\0\x1b\xff\xc3\n\r\t-"));
        }
    }),
    ("truncated", |lines, random| {
        lines.truncate(1 + random.below(lines.len()));
        let line = lines.last_mut().unwrap();
        line.truncate(random.below(line.len() + 1));
    }),
];

type Mutation = fn(&mut Vec<Vec<u8>>, &mut Random);

const NUMBERS: [&str; 25] = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "16",
    "1e-3",
    "300",
    "1_000_000",
    "4294967296",
    "9223372036854775807",
    "18446744073709551616",
    "1e308",
    "1e999",
    "1e-320",
    "-0.0",
    "0.5",
    "nan",
    "inf",
    "-inf",
    "true",
    "\"7\"",
    "[1]",
    "{ start = 1e-3, shape = \"cosine\", warmup = 2.0 }",
    "2026-11-22",
];

#[test]
#[ignore = "minutes; run with --ignored"]
fn mutated_run_files_are_planned_or_refused() {
    let data = tempfile::tempdir().unwrap();
    make_data(data.path(), 1);
    let data = data.path().join("data").display().to_string();
    let shipped = shipped();
    FIELD.run(|case| {
        let random = &mut case.random;
        let text = fs::read_to_string(random.one(&shipped)).unwrap();
        let text = text.replace("\"data/", &format!("\"{data}/"));
        let mut lines: Vec<Vec<u8>> = text
            .lines()
            .map(|line| line.split('#').next().unwrap().trim_end().into())
            .filter(|line: &Vec<u8>| !line.is_empty())
            .collect();
        let (name, mutation) = MUTATIONS[case.number as usize % MUTATIONS.len()];
        // Most files have one fault, so that no other hides it.
        for _ in 0..1 + random.below(4) / 3 + random.below(8) / 7 {
            mutation(&mut lines, random);
        }
        case.kind(name);
        fs::write(case.dir().join("run.toml"), lines.join(&b'\n')).unwrap();
        planned_or_refused(case)
    });
}

fn planned_or_refused(case: &mut Case) -> Result<(), String> {
    let before = tree(case.dir());
    let mut command = guarded(case.dir());
    command.args([
        "run.toml",
        "--dry-run",
        "--threads",
        "2",
        "--memory",
        "4GiB",
    ]);
    if !case.random.one_in(4) {
        command.args(["--out", "out"]);
    }
    let running = case.start(command);
    let ended = case.end(running, LIMIT)?;
    let code = ended.one_of(&[0, 2])?;
    if tree(case.dir()) != before {
        return Err("a dry run leaves something on the disk".to_owned());
    }
    if code == 0 {
        case.count("planned");
        return Ok(());
    }
    case.count("refused");
    let mut lines = BTreeSet::new();
    for line in ended.stderr.lines() {
        let fault = line.strip_prefix("error: ").unwrap_or_default();
        if fault.trim().is_empty() {
            return Err(format!("the line {line:?} is no fault"));
        }
        if !lines.insert(fault) {
            return Err(format!("the fault {fault:?} is said twice"));
        }
    }
    if lines.is_empty() {
        return Err("is refused without a word".to_owned());
    }
    Ok(())
}

fn shipped() -> Vec<PathBuf> {
    let mut files = tree(&config(""));
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "toml")
    });
    files.retain(|path| !path.ends_with("Cargo.toml"));
    assert!(files.len() > 10, "{files:?}");
    // Test files of the crate are broken already.
    files.retain(|path| path.parent() == Some(&config("")));
    files
}

/// A line that is not empty.
fn a_line<'a>(lines: &'a mut [Vec<u8>], random: &mut Random) -> &'a mut Vec<u8> {
    let at = random.below(lines.len());
    let line = &mut lines[at];
    if line.is_empty() {
        line.push(b' ');
    }
    line
}

fn number(lines: &mut [Vec<u8>], random: &mut Random) {
    let is_digit = |byte: u8| byte.is_ascii_digit();
    let by = *random.one(&NUMBERS);
    replace(lines, random, by.as_bytes(), |line| {
        let value = line.iter().position(|&byte| byte == b'=').unwrap_or(0);
        let mut spans = vec![];
        let mut at = value;
        while at < line.len() {
            let inside = |byte: &u8| is_digit(*byte) || b"._e-".contains(byte);
            let length = line[at..].iter().take_while(|byte| inside(byte)).count();
            if is_digit(line[at]) {
                spans.push(at..at + length);
            }
            at += length.max(1);
        }
        spans
    });
}

fn text(lines: &mut [Vec<u8>], random: &mut Random) {
    let by = match random.below(8) {
        0 => String::new(),
        1 => "x".repeat(1 + random.below(20_000)),
        2 => "\\u001b[2J\\u0007".to_owned(),
        3 => "../../..".to_owned(),
        4 => "/dev/null".to_owned(),
        5 => "\u{202e}\u{e9}\u{1f600}".to_owned(),
        6 => "*".to_owned(),
        _ => "tms".to_owned(),
    };
    replace(lines, random, by.as_bytes(), |line| {
        let quotes: Vec<usize> = (0..line.len()).filter(|&at| line[at] == b'"').collect();
        let pairs = quotes.chunks_exact(2);
        pairs.map(|pair| pair[0] + 1..pair[1]).collect()
    });
}

/// Replaces one of the spans in the lines with `by`.
fn replace(
    lines: &mut [Vec<u8>],
    random: &mut Random,
    by: &[u8],
    spans: impl Fn(&[u8]) -> Vec<Range<usize>>,
) {
    let all: Vec<(usize, Range<usize>)> = lines
        .iter()
        .enumerate()
        .flat_map(|(at, line)| spans(line).into_iter().map(move |span| (at, span)))
        .collect();
    if !all.is_empty() {
        let (at, span) = random.one(&all).clone();
        lines[at].splice(span, by.iter().copied());
    }
}

fn key(lines: &mut [Vec<u8>], random: &mut Random) {
    let line = a_line(lines, random);
    let letters: Vec<usize> = (0..line.len())
        .filter(|&at| line[at].is_ascii_alphabetic())
        .collect();
    if letters.is_empty() {
        return;
    }
    let at = *random.one(&letters[..letters.len().min(12)]);
    match random.below(3) {
        0 => line[at] = b'a' + random.byte() % 26,
        1 => {
            line.remove(at);
        }
        _ => line.insert(at, b'q'),
    }
}

fn value(lines: &mut [Vec<u8>], random: &mut Random) {
    let split = |line: &[u8]| line.iter().position(|&byte| byte == b'=');
    let with_values: Vec<usize> = (0..lines.len())
        .filter(|&at| split(&lines[at]).is_some())
        .collect();
    if with_values.is_empty() {
        return;
    }
    let (to, from) = (*random.one(&with_values), *random.one(&with_values));
    let value = lines[from][split(&lines[from]).unwrap()..].to_vec();
    let end = split(&lines[to]).unwrap();
    lines[to].splice(end.., value);
}
