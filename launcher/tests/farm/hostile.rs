//! Run files, pickles and archives designed to exhaust memory: read within a bounded multiple of
//! their length, or refused in one line.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::launch::scripted;
use crate::random::Random;
use crate::runs::{TOY, config, tree};
use crate::suite::Suite;

const FIELD: Suite = Suite {
    name: "hostile",
    cases: 240,
    columns: &["used", "refused"],
};

/// Maximum file length, without holes.
const MOST: usize = 2 << 20;

/// Limits memory to a hundred times the length of a file, plus that of the program.
fn limited(dir: &Path) -> Command {
    let kibibytes = (100 * MOST + (1 << 30)) >> 10;
    let mut command = scripted(dir, &format!("ulimit -v {kibibytes}; exec \"$@\""));
    command.env("MALLOC_ARENA_MAX", "2");
    command
}

type Make = fn(&Path, &mut Random);

const KINDS: [(&str, Make); 5] = [
    ("TOML", |path, random| {
        let times = random.below(MOST / 8);
        let text = match random.below(6) {
            0 => format!("{}a = 1\n", "a.".repeat(times)),
            1 => format!("a = {}", "[".repeat(times)),
            2 => format!("a = {}", "{ b = ".repeat(times)),
            3 => "[[loss]]\nkind = \"faithfulness\"\n".repeat(times / 8),
            4 => format!("name = \"{}\"\n", "x".repeat(8 * times)),
            _ => (0..times / 8)
                .map(|number| format!("key{number} = 1\n"))
                .collect(),
        };
        fs::write(path, text).unwrap();
    }),
    ("pickle", |path, random| {
        let pickle = pickle(random);
        put(path, &archive(&pickle, random, false));
    }),
    ("archive", |path, random| {
        let mut parts = archive(&pickle(random), random, true);
        if random.one_in(4) {
            let (_, bytes) = &mut parts[0];
            let at = random.below(bytes.len());
            bytes[at] = random.byte();
        }
        put(path, &parts);
    }),
    ("YAML of anchors", |path, random| {
        fs::write(path, anchors(random)).unwrap();
    }),
    ("YAML of the reference", |path, random| {
        let mut bytes =
            include_bytes!("../../../trainer/src/run_file/tests/reference/toy.yaml").to_vec();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            let piece = match random.below(4) {
                0 => anchors(random).into_bytes(),
                1 => "[".repeat(random.below(MOST / 2)).into_bytes(),
                2 => "- ".repeat(random.below(MOST / 2)).into_bytes(),
                _ => "k: {".repeat(random.below(MOST / 4)).into_bytes(),
            };
            bytes.splice(at..at, piece);
        }
        bytes.truncate(MOST);
        fs::write(path, bytes).unwrap();
    }),
];

#[test]
#[ignore = "minutes; run with --ignored"]
fn hostile_files_take_bounded_memory() {
    FIELD.run(|case| {
        let (name, make) = KINDS[case.number as usize % KINDS.len()];
        case.kind(name);
        let file = match name {
            "TOML" => "run.toml",
            "YAML of anchors" | "YAML of the reference" => "run.yaml",
            _ => "weights.bin",
        };
        fs::write(case.dir().join("run.toml"), with_weights()).unwrap();
        make(&case.dir().join(file), &mut case.random);
        let before = tree(case.dir());
        let tms = config(TOY.config).display().to_string();
        let words: &[&str] = match (file, case.random.below(3)) {
            ("run.yaml", _) => &["run.yaml", "--dry-run", "--out", "out"],
            ("weights.bin", 0) => &["inspect", file],
            ("weights.bin", 1) => &["import", file, "--config", &tms, "--out", "out"],
            (_, _) => &["run.toml", "--dry-run", "--out", "out"],
        };
        let mut command = limited(case.dir());
        command.args(words);
        let ended = case.launch(command, &[0, 2])?;
        if ended.code()? == 0 {
            case.count("used");
            return Ok(());
        }
        ended.error()?;
        if ended.stderr.len() > 100_000 {
            return Err(format!("is refused by {} bytes", ended.stderr.len()));
        }
        if tree(case.dir()) != before {
            return Err("is refused, and leaves something on the disk".to_owned());
        }
        case.count("refused");
        Ok(())
    });
}

/// tms_5-2 with its target from a PyTorch file.
fn with_weights() -> String {
    let text = fs::read_to_string(config(TOY.config)).unwrap();
    let (before, rest) = text.split_once("[target.train]").unwrap();
    let (_, after) = rest.split_once("[data]").unwrap();
    format!("{before}weights = \"weights.bin\"\n[data]{after}")
}

/// A string in a pickle.
fn text(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
    [b"X", &length[..], bytes].concat()
}

/// Tensor data, then a few repeated instructions.
fn pickle(random: &mut Random) -> Vec<u8> {
    let key = vec![b'0'; *random.one(&[1, 1, 1, 300, 60_000, MOST / 2])];
    let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((".to_vec();
    bytes.extend(text(b"storage"));
    bytes.extend(b"ctorch\nFloatStorage\n");
    bytes.extend(text(&key));
    bytes.extend(b"X\x03\x00\x00\x00cpuK\x01tQq\x02K\x00");
    // Dimensions and strides of 0 to 9 numbers.
    for dims in [random.below(10), random.below(10)] {
        bytes.push(b'(');
        for _ in 0..dims {
            bytes.extend([b'K', *random.one(&[0, 1, 2, 255])]);
        }
        bytes.push(b't');
    }
    bytes.extend(b"tq\x01");
    if random.one_in(2) {
        bytes.extend(b"}(");
    }
    let pieces: [&[u8]; 20] = [
        b"(",
        b"}",
        b")",
        b"N",
        b"]",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x94",
        b"0",
        b"t",
        b"u",
        b"s",
        b"h\x00",
        b"h\x01",
        b"h\x00h\x01R",
        b"h\x02",
        b"K\x07",
        b"ccollections\nOrderedDict\n)R",
        b"X\x01\x00\x00\x00n",
    ];
    let mut unit = Vec::new();
    for _ in 0..=random.below(4) {
        unit.extend(*random.one(&pieces));
        if random.one_in(3) {
            unit.extend(text(&vec![b'n'; random.below(40)]));
        }
    }
    let times = random.below(MOST - MOST / 4) / unit.len();
    let is_named = random.one_in(3);
    for number in 0..times {
        if bytes.len() + unit.len() + 64 > MOST {
            break;
        }
        if is_named {
            bytes.extend(text(format!("{number:x}").as_bytes()));
        }
        bytes.extend(&unit);
    }
    if random.one_in(2) {
        bytes.push(b'u');
    }
    bytes.push(b'.');
    bytes
}

/// Parts of a file with their offsets: an archive of a pickle and a storage. A lying archive states
/// wrong lengths and offsets, and has holes for data.
fn archive(pickle: &[u8], random: &mut Random, lies: bool) -> Vec<(u64, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut list = Vec::new();
    let hole = if lies && random.one_in(2) {
        1_u64 << *random.one(&[24, 32, 36, 40])
    } else {
        0
    };
    let mut lie = |number: u64| {
        let odd = [
            0,
            1,
            46,
            0xffff,
            u64::from(u32::MAX),
            1 << 33,
            1 << 39,
            hole,
            u64::MAX,
        ];
        if lies && random.one_in(12) {
            *random.one(&odd)
        } else {
            number
        }
    };
    for (name, content) in [("a/data.pkl", pickle), ("a/data/0", &[0; 64])] {
        let start = bytes.len() as u64;
        let (length, named) = (content.len() as u64, name.len() as u64);
        bytes.extend(b"PK\x03\x04");
        bytes.extend([0; 22]);
        bytes.extend(&lie(named).to_le_bytes()[..2]);
        bytes.extend([0; 2]);
        bytes.extend(name.as_bytes());
        bytes.extend(content);
        list.extend(b"PK\x01\x02");
        list.extend([0; 16]);
        list.extend([0xff; 8]);
        list.extend(&lie(named).to_le_bytes()[..2]);
        list.extend(&lie(28).to_le_bytes()[..2]);
        list.extend([0; 10]);
        list.extend([0xff; 4]);
        list.extend(name.as_bytes());
        list.extend([1, 0, 24, 0]);
        list.extend(
            [lie(length), lie(length), lie(start)]
                .map(u64::to_le_bytes)
                .concat(),
        );
    }
    let at = bytes.len() as u64 + hole;
    let length = list.len() as u64;
    let end = at + length;
    list.extend(b"PK\x06\x06");
    list.extend(44_u64.to_le_bytes());
    list.extend([0; 12]);
    list.extend(
        [lie(2), lie(2), lie(length), lie(at)]
            .map(u64::to_le_bytes)
            .concat(),
    );
    list.extend(b"PK\x06\x07\0\0\0\0");
    list.extend(lie(end).to_le_bytes());
    list.extend([1, 0, 0, 0]);
    list.extend(b"PK\x05\x06\0\0\0\0");
    list.extend([0xff; 12]);
    list.extend([0; 2]);
    vec![(0, bytes), (at, list)]
}

fn put(path: &Path, parts: &[(u64, Vec<u8>)]) {
    let file = File::create(path).unwrap();
    for (at, bytes) in parts {
        file.write_all_at(bytes, *at).unwrap();
    }
}

/// Lists of aliases of earlier ones, which may be long.
fn anchors(random: &mut Random) -> String {
    let long = "x".repeat(*random.one(&[1, 100, 10_000, 200_000]));
    let mut text = match random.below(3) {
        0 => format!("a0: &a0 {long}\n"),
        1 => format!("a0: &a0 [{long}, {long}]\n"),
        _ => {
            let depth = 1 + random.below(80);
            let open: String = (0..depth).map(|number| format!("&b{number} [")).collect();
            format!("a0: &a0 {open}{long}{}\n", "]".repeat(depth))
        }
    };
    let times = *random.one(&[1, 2, 9, 1000, 20_000]);
    for level in 1..1 + random.below(40) {
        let aliases = format!("*a{}, ", level - 1).repeat(times);
        if text.len() + aliases.len() > MOST / 4 {
            break;
        }
        text += &format!("a{level}: &a{level} [{aliases}]\n");
    }
    text
}
