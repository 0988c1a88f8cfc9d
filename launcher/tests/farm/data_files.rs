//! Faulty token datasets, weights and tokenizers: used as they are, or refused by name.
//!
//! The run accepts what a dry run accepts.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::corrupt::{ALL, Damage, names};
use crate::launch::guarded;
use crate::random::Random;
use crate::runs::{RUN, Small, TEXT, TOY, config, copy, make_data, tree};
use crate::suite::{Case, Suite};

const FIELD: Suite = Suite {
    name: "data_files",
    cases: 280,
    columns: &["used", "refused"],
};

/// Two steps each, with the faulty file.
const WITH_DATA: Small = TEXT.with(&["target.train.steps=2", "train.steps=2"]);
const WITH_WEIGHTS: Small = TOY.with(&["train.steps=2"]);

/// The required outcome of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Due {
    Use,
    Refusal,
    Either,
}

type Spoil = fn(&Path, &mut Random) -> Due;

const DATASETS: [(&str, Spoil); 6] = [
    ("dataset: header", |train, random| {
        header(&train.join(SHARD), random);
        Due::Either
    }),
    ("dataset: token", |train, random| {
        let path = train.join(SHARD);
        let mut bytes = fs::read(&path).unwrap();
        let tokens = 2 * 1000;
        let at = bytes.len() - tokens + random.below(tokens);
        bytes[at] ^= 1 << random.below(8);
        fs::write(path, bytes).unwrap();
        Due::Refusal
    }),
    ("dataset: shard", |train, random| {
        random.one(&ALL).to_file(&train.join(SHARD), random);
        Due::Either
    }),
    ("dataset: index", |train, random| {
        json_file(&train.join("index.json"), random);
        Due::Either
    }),
    ("dataset: hash", |train, random| {
        let path = train.join("index.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut index: Value = serde_json::from_str(&text).unwrap();
        let hash = format!("{:016x}{:016x}", random.word(), random.word());
        index["shards"][0]["xxh3"] = json!(hash);
        fs::write(path, index.to_string()).unwrap();
        Due::Refusal
    }),
    ("dataset: index, bytes", |train, random| {
        random.one(&ALL).to_file(&train.join("index.json"), random);
        Due::Either
    }),
];

const SHARD: &str = "tokens-00000.safetensors";

const WEIGHTS: [(&str, Spoil); 6] = [
    ("weights: header", |path, random| {
        put(path, &Tensors::of_tms());
        header(path, random);
        Due::Either
    }),
    ("weights: dtype", |path, random| {
        let (dtype, due) = *random.one(&[
            ("F16", Due::Use),
            ("BF16", Due::Use),
            ("F64", Due::Either),
            ("I32", Due::Refusal),
            ("U8", Due::Refusal),
            ("BOOL", Due::Refusal),
        ]);
        let mut tensors = Tensors::of_tms();
        // One tensor of another dtype, or all.
        let one = random.one_in(2).then(|| random.below(tensors.0.len()));
        for (at, tensor) in tensors.0.values_mut().enumerate() {
            if one.is_none_or(|one| one == at) {
                tensor.dtype = dtype;
            }
        }
        put(path, &tensors);
        due
    }),
    ("weights: shape", |path, random| {
        let mut tensors = Tensors::of_tms();
        let tensor = tensors.any(random);
        let before = tensor.shape.clone();
        match random.below(4) {
            0 => tensor.shape.reverse(),
            1 => tensor.shape.push(1),
            2 => tensor.shape[0] += 1,
            _ => tensor.shape = vec![tensor.shape.iter().product(), 0],
        }
        let same = tensor.shape == before;
        put(path, &tensors);
        if same { Due::Use } else { Due::Refusal }
    }),
    ("weights: value", |path, random| {
        let mut tensors = Tensors::of_tms();
        let value = *random.one(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
        let tensor = tensors.any(random);
        let count: usize = tensor.shape.iter().product();
        tensor.odd = Some((random.below(count), value));
        put(path, &tensors);
        Due::Refusal
    }),
    ("weights: names", |path, random| {
        let mut tensors = Tensors::of_tms();
        let name = random
            .one(&tensors.0.keys().cloned().collect::<Vec<_>>())
            .clone();
        let tensor = tensors.0.remove(&name).unwrap();
        let odd = [
            "",
            "\u{1b}[31m",
            "linear1",
            "linear1.weight\u{0}",
            "__metadata__x",
        ];
        if random.one_in(2) {
            tensors.0.insert((*random.one(&odd)).to_owned(), tensor);
        }
        put(path, &tensors);
        Due::Refusal
    }),
    ("weights: file", |path, random| {
        put(path, &Tensors::of_tms());
        let damage = *random.one(&ALL);
        damage.to_file(path, random);
        match damage {
            // A flipped bit may give another valid weight, and root may read everything.
            Damage::Flip | Damage::NoPermission => Due::Either,
            _ => Due::Refusal,
        }
    }),
];

const TOKENIZER: &str = "tokenizer.json";

#[test]
#[ignore = "minutes; run with --ignored"]
fn spoiled_data_files_are_used_or_refused() {
    let data = tempfile::tempdir().unwrap();
    make_data(data.path(), 1);
    FIELD.run(|case| {
        let kinds = DATASETS.len() + WEIGHTS.len() + 2;
        match case.number as usize % kinds {
            at if at < DATASETS.len() => {
                let (name, spoil) = DATASETS[at];
                case.kind(name);
                copy(&data.path().join("data"), &case.dir().join("data"));
                let split = *case.random.one(&["train", "val"]);
                let place = case.dir().join("data/shakespeare").join(split);
                let due = spoil(&place, &mut case.random);
                used_or_refused(
                    case,
                    &WITH_DATA,
                    &config(TEXT.config),
                    due,
                    &place.join(SHARD),
                )
            }
            at if at < DATASETS.len() + WEIGHTS.len() => {
                let (name, spoil) = WEIGHTS[at - DATASETS.len()];
                case.kind(name);
                let run = case.dir().join("run.toml");
                fs::write(&run, with_weights()).unwrap();
                let place = case.dir().join("weights.safetensors");
                let due = spoil(&place, &mut case.random);
                used_or_refused(case, &WITH_WEIGHTS, &run, due, &place)
            }
            at => {
                fs::copy(data.path().join("text.txt"), case.dir().join("text.txt")).unwrap();
                tokenized_or_refused(case, at + 1 == kinds)
            }
        }
    });
}

/// Launches a dry run and the run.
fn used_or_refused(
    case: &mut Case,
    small: &Small,
    config: &Path,
    due: Due,
    place: &Path,
) -> Result<(), String> {
    let before = tree(case.dir());
    let mut codes = [0, 0];
    for (code, dry) in codes.iter_mut().zip([true, false]) {
        let mut command = guarded(case.dir());
        command.arg(config).args(["--out", RUN, "--threads", "1"]);
        for set in small.set.iter().chain(small.more) {
            // A target that is read is not trained.
            if config.ends_with(small.config) || !set.starts_with("target.train") {
                command.args(["--set", set]);
            }
        }
        if dry {
            command.arg("--dry-run");
        }
        // Good files may hold numbers from which no run can be trained.
        let ended = case.launch(command, &[0, 1, 2])?;
        *code = ended.code()?;
        if *code == 1 && !ended.error()?.contains("not finite") {
            return Err(format!("fails by another thing: {}", ended.error()?));
        }
        if *code == 2 {
            let error = ended.error()?;
            let mut lines = ended.stderr.lines();
            if lines.any(|line| !line.starts_with("error: ")) {
                return Err("is not refused by one line a fault".to_owned());
            }
            if !names(error, place) {
                return Err(format!("the error names another thing: {error}"));
            }
            if tree(case.dir()) != before {
                return Err("is refused, and leaves something on the disk".to_owned());
            }
        }
    }
    match (codes, due) {
        ([0, 2] | [2, 0], _) => Err(format!("the dry run and the run end with codes {codes:?}")),
        ([0, _], Due::Refusal) => Err("is used as if it were good".to_owned()),
        ([_, 2], Due::Use) => Err("is refused, and is good".to_owned()),
        ([0, _], _) => {
            case.count("used");
            Ok(())
        }
        _ => {
            case.count("refused");
            Ok(())
        }
    }
}

/// Makes a dataset with a faulty tokenizer, or from a faulty text.
fn tokenized_or_refused(case: &mut Case, of_text: bool) -> Result<(), String> {
    let (tokenizer, text) = (case.dir().join(TOKENIZER), case.dir().join("text.txt"));
    fs::write(&tokenizer, a_tokenizer().to_string()).unwrap();
    let random = &mut case.random;
    if of_text {
        let damage = *random.one(&ALL);
        damage.to_file(&text, random);
        if random.one_in(3) && text.is_file() {
            fs::write(
                &text,
                (0..random.below(5000))
                    .map(|_| random.byte())
                    .collect::<Vec<u8>>(),
            )
            .unwrap();
        }
        case.kind("text");
    } else {
        if random.one_in(4) {
            random.one(&ALL).to_file(&tokenizer, random);
        } else {
            json_file(&tokenizer, random);
        }
        case.kind("tokenizer.json");
    }
    let before = tree(case.dir());
    let by = if of_text && case.random.one_in(2) {
        "bytes"
    } else {
        TOKENIZER
    };
    let mut command = guarded(case.dir());
    command.args(["tokenize", "text.txt", "--tokenizer", by, "--out", "made"]);
    let ended = case.launch(command, &[0, 2])?;
    if ended.code()? == 2 {
        ended.error()?;
        if tree(case.dir()) != before {
            return Err("is refused, and leaves something on the disk".to_owned());
        }
        case.count("refused");
        return Ok(());
    }
    case.count("used");
    Ok(())
}

/// tms_5-2 with its target from a file.
fn with_weights() -> String {
    let text = fs::read_to_string(config(TOY.config)).unwrap();
    let (before, rest) = text.split_once("[target.train]").unwrap();
    let (_, after) = rest.split_once("[data]").unwrap();
    format!("{before}weights = \"weights.safetensors\"\n[data]{after}")
}

/// The content of a weight file, by name.
struct Tensors(BTreeMap<String, Tensor>);

#[derive(Clone)]
struct Tensor {
    dtype: &'static str,
    shape: Vec<usize>,
    /// The index of the one element that differs; all others are 0.5.
    odd: Option<(usize, f32)>,
}

impl Tensors {
    fn of_tms() -> Self {
        let tensor = |name: &str, shape: &[usize]| {
            let tensor = Tensor {
                dtype: "F32",
                shape: shape.to_vec(),
                odd: None,
            };
            (name.to_owned(), tensor)
        };
        Self(BTreeMap::from([
            tensor("linear1.weight", &[2, 5]),
            tensor("linear2.weight", &[5, 2]),
            tensor("linear2.bias", &[5]),
        ]))
    }

    fn any(&mut self, random: &mut Random) -> &mut Tensor {
        let at = random.below(self.0.len());
        self.0.values_mut().nth(at).unwrap()
    }
}

impl Tensor {
    fn bytes(&self) -> Vec<u8> {
        let count = self.shape.iter().product();
        let element = |at| match self.odd {
            Some((odd, value)) if odd == at => value,
            _ => 0.5,
        };
        // 0.5 in half precision and in bfloat16.
        let bytes = |at| match self.dtype {
            "F64" => f64::from(element(at)).to_le_bytes().to_vec(),
            "F16" => 0x3800_u16.to_le_bytes().to_vec(),
            "BF16" => 0x3f00_u16.to_le_bytes().to_vec(),
            "U8" | "BOOL" => vec![1],
            _ => element(at).to_le_bytes().to_vec(),
        };
        (0..count).flat_map(bytes).collect()
    }
}

fn put(path: &Path, tensors: &Tensors) {
    let mut header = serde_json::Map::new();
    let mut data = vec![];
    for (name, tensor) in &tensors.0 {
        let start = data.len();
        data.extend(tensor.bytes());
        header.insert(
            name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]}),
        );
    }
    write_safetensors(path, Value::Object(header).to_string().as_bytes(), &data);
}

fn write_safetensors(path: &Path, header: &[u8], data: &[u8]) {
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length, header, data].concat()).unwrap();
}

/// Changes the header of a safetensors file: its content, bytes or length.
fn header(path: &Path, random: &mut Random) {
    let mut bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let end = 8 + usize::try_from(length).unwrap();
    match random.below(4) {
        0 => {
            let lengths = [
                0,
                1,
                length - 1,
                length + 1,
                1 << 40,
                u64::MAX,
                u64::MAX - 7,
            ];
            bytes[..8].copy_from_slice(&random.one(&lengths).to_le_bytes());
        }
        1 => {
            let at = 8 + random.below(end - 8);
            bytes[at] = random.byte();
        }
        _ => {
            let mut header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
            spoil_json(&mut header, random);
            return write_safetensors(path, header.to_string().as_bytes(), &bytes[end..]);
        }
    }
    fs::write(path, bytes).unwrap();
}

fn json_file(path: &Path, random: &mut Random) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for _ in 0..=random.below(2) {
        spoil_json(&mut value, random);
    }
    fs::write(path, value.to_string()).unwrap();
}

/// Replaces, removes or renames an element at any depth.
fn spoil_json(value: &mut Value, random: &mut Random) {
    let stop = random.one_in(4);
    match value {
        Value::Object(map) if !map.is_empty() => {
            let key = random.one(&map.keys().cloned().collect::<Vec<_>>()).clone();
            match random.below(8) {
                0 => {
                    map.remove(&key);
                }
                1 => {
                    let inner = map.remove(&key).unwrap();
                    map.insert(format!("{key}x"), inner);
                }
                _ if !stop => spoil_json(&mut map[&key], random),
                _ => map[&key] = odd_json(random),
            }
        }
        Value::Array(items) if !items.is_empty() && !stop => {
            let at = random.below(items.len());
            match random.below(6) {
                0 => {
                    items.remove(at);
                }
                1 => items.push(items[at].clone()),
                _ => spoil_json(&mut items[at], random),
            }
        }
        value => *value = odd_json(random),
    }
}

fn odd_json(random: &mut Random) -> Value {
    match random.below(16) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(0),
        4 => json!(u64::MAX),
        5 => json!(1e308),
        6 => json!(0.5),
        7 => json!(""),
        8 => json!("x".repeat(10_000)),
        9 => json!("\u{1b}[2J"),
        10 => json!("../../text.txt"),
        11 => json!([]),
        12 => json!({}),
        13 => json!([0, u64::MAX]),
        14 => json!("F64"),
        _ => json!(1_u64 << 40),
    }
}

/// A small byte-level BPE like GPT-2's.
fn a_tokenizer() -> Value {
    let letters = (33..=126_u8).map(char::from).chain(['\u{120}', '\u{10a}']);
    let mut vocab = serde_json::Map::new();
    for letter in letters {
        let id = vocab.len();
        vocab.insert(letter.to_string(), id.into());
    }
    for more in ["li", "ne", "line", "of"] {
        let id = vocab.len();
        vocab.insert(more.to_owned(), id.into());
    }
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "vocab": vocab,
            "merges": [["l", "i"], ["n", "e"], ["li", "ne"], ["o", "f"]]
        }
    })
}
