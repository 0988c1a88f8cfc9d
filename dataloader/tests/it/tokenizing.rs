//! From text to datasets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use safetensors::SafeTensors;
use serde_json::json;
use spd_dataloader::{Batch, CheckedFiles, Dataset, Dtype, Tokenize, TokenizerChoice, TokenizerId};
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::{alone, fresh, put, token_source, tokenize};

/// A tokenizer as GPT-2's: all bytes, four merges, and an end-of-text token, number 260.
fn small_gpt2(dropout: Option<f32>) -> serde_json::Value {
    let alphabet: BTreeSet<char> = ByteLevel::alphabet().into_iter().collect();
    let mut vocab: BTreeMap<String, usize> = alphabet
        .into_iter()
        .enumerate()
        .map(|(id, letter)| (letter.to_string(), id))
        .collect();
    let merges = [["t", "h"], ["th", "e"], ["\u{120}", "the"], ["a", "n"]];
    for merge in merges {
        vocab.insert(merge.concat(), vocab.len());
    }
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [{
            "id": 260, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "BPE", "dropout": dropout, "vocab": vocab, "merges": merges}
    })
}

fn put_json(path: &Path, json: &serde_json::Value) -> PathBuf {
    put(path, json.to_string().as_bytes())
}

/// The ids of a dataset, read by the safetensors library.
pub(crate) fn ids(dataset: &Path) -> Vec<u32> {
    let mut ids = Vec::new();
    for number in 0.. {
        let Ok(file) = fs::read(dataset.join(format!("tokens-{number:05}.safetensors"))) else {
            break;
        };
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let tokens = tensors.tensor("tokens").unwrap();
        assert_eq!(
            tokens.data().as_ptr() as usize % 8,
            file.as_ptr() as usize % 8,
            "aligned in the file"
        );
        ids.extend(
            tokens
                .data()
                .chunks(2)
                .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]]))),
        );
    }
    ids
}

/// Everything under a directory, by name.
pub(crate) fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn bytes_become_their_own_ids_and_the_tail_is_held_out() {
    let dir = fresh();
    let text = put(&dir.path().join("text"), b"0123456789\xff\x00abcdefgh");
    let out = dir.path().join("new/data");
    let report = tokenize(&Tokenize::new(vec![text], out.clone())).unwrap();
    assert_eq!((report.train_tokens, report.val_tokens), (18, 2));
    assert_eq!((report.vocab, report.bytes), (256, 20));
    assert_eq!(ids(&out.join("val")), b"gh".map(u32::from));
    let train = Dataset::open_as(&out.join("train"), None).unwrap();
    train.check(u32::MAX, &mut CheckedFiles::default()).unwrap();
    assert_eq!(
        (train.tokens(), train.documents(), train.vocab_size()),
        (18, Some(1), Some(256))
    );
    assert_eq!(train.tokenizer(), Some(&TokenizerId::Bytes));
    let mut batch = Batch::default();
    let source = token_source(Arc::new(train), 17, 256).unwrap();
    source.fill(&alone(0, 1), 0, &mut batch).unwrap();
    assert_eq!(batch.tokens, b"0123456789\xff\x00abcdef".map(u32::from));
}

#[test]
fn the_index_is_the_one_of_the_format_description() {
    let dir = fresh();
    let text = put(&dir.path().join("text"), b"to be|or not to be");
    let options = Tokenize {
        separator: Some("|".to_owned()),
        held_out: 0.0,
        ..Tokenize::new(vec![text], dir.path().join("data"))
    };
    tokenize(&options).unwrap();
    let index = fs::read_to_string(dir.path().join("data/train/index.json")).unwrap();
    assert!(include_str!("../../FORMAT.md").contains(&index), "{index}");
}

#[test]
fn documents_end_with_the_end_of_text_token() {
    let dir = fresh();
    let tokenizer = put_json(&dir.path().join("tokenizer.json"), &small_gpt2(None));
    let first = put(&dir.path().join("a.txt"), b"the<|sep|><|sep|> the");
    let second = put(&dir.path().join("b.txt"), b"than");
    let out = dir.path().join("data");
    let options = Tokenize {
        tokenizer: TokenizerChoice::File(tokenizer),
        separator: Some("<|sep|>".to_owned()),
        eos: Some("<|endoftext|>".to_owned()),
        held_out: 0.0,
        ..Tokenize::new(vec![first, second], out.clone())
    };
    let report = tokenize(&options).unwrap();
    // By hand: the merges make "th" 256, "the" 257, " the" 258 and "an" 259.
    assert_eq!(ids(&out.join("train")), [257, 260, 258, 260, 256, 259, 260]);
    assert_eq!((report.vocab, report.val_tokens), (261, 0));
    assert_eq!(names(&out), ["train"]);
    let kept = fs::read(out.join("train/tokenizer.json")).unwrap();
    assert_eq!(kept, small_gpt2(None).to_string().into_bytes());
    let train = Dataset::open_as(&out.join("train"), None).unwrap();
    assert_eq!(train.documents(), Some(3));
    assert!(
        matches!(train.tokenizer(), Some(TokenizerId::File { name, .. }) if name == "tokenizer.json")
    );
}

/// 700 kB of words in lines, from a small generator.
fn long_text() -> String {
    let words = [
        "the",
        "than",
        "an",
        "other",
        "\u{e9}t\u{e9}",
        "1234",
        "don't",
        "a",
    ];
    let gaps = [" ", " ", " ", ", ", ".\n", "  ", "\n\n"];
    let mut state = 1_u32;
    let mut pick = |choices: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as usize % choices as usize
    };
    let mut text = String::new();
    while text.len() < 700_000 {
        text.push_str(words[pick(8)]);
        text.push_str(gaps[pick(7)]);
    }
    text
}

// The file of the tokenizer cuts what is encoded off after 8 tokens.
#[test]
fn a_text_is_encoded_by_the_tokenizer_of_a_dataset() {
    let dir = fresh();
    let at = |name: &str| dir.path().join(name);
    let text = b"the hand and then the other one".as_slice();
    let options = Tokenize {
        tokenizer: TokenizerChoice::File(put_json(&at("t.json"), &small_gpt2(None))),
        held_out: 0.0,
        ..Tokenize::new(vec![put(&at("text"), text)], at("data"))
    };
    tokenize(&options).unwrap();
    let dataset = Dataset::open_as(&at("data/train"), None).unwrap();
    let found = dataset.encode(text).unwrap();
    assert!(
        found.len() > 8 && found == ids(&at("data/train")),
        "{found:?}"
    );
    let refused = |dataset: &Dataset, text: &[u8]| {
        let line = dataset.encode(text).unwrap_err().to_string();
        line.replace(dir.path().to_str().unwrap(), "DIR")
    };
    assert_eq!(
        refused(&dataset, b"a\xff"),
        "DIR/data/train/tokens-00000.safetensors: expected a text of UTF-8: invalid utf-8 sequence of 1 bytes from index 1"
    );
    let plain = put(&at("plain.bin"), &[1, 0, 2, 0]);
    let plain = Dataset::open_as(&plain, Some(Dtype::U16)).unwrap();
    assert_eq!(
        refused(&plain, b"a"),
        "DIR/plain.bin: the dataset keeps no tokenizer that a text could be encoded with; give token ids"
    );
    let options = Tokenize::new(vec![at("text")], at("bytes"));
    tokenize(&options).unwrap();
    let bytes = Dataset::open_as(&at("bytes/train"), None).unwrap();
    assert_eq!(bytes.encode(b"a\xff").unwrap(), [97, 255]);
}

#[test]
fn a_text_encoded_in_chunks_has_the_ids_of_the_whole() {
    let dir = fresh();
    let json = small_gpt2(None);
    let text = long_text();
    let options = Tokenize {
        tokenizer: TokenizerChoice::File(put_json(&dir.path().join("tokenizer.json"), &json)),
        held_out: 0.0,
        shard_tokens: 100_000,
        ..Tokenize::new(
            vec![put(&dir.path().join("text"), text.as_bytes())],
            dir.path().join("data"),
        )
    };
    tokenize(&options).unwrap();
    let mut whole = Tokenizer::from_bytes(json.to_string()).unwrap();
    whole.with_truncation(None).unwrap();
    let expected = whole.encode(text, false).unwrap();
    assert!(
        ids(&dir.path().join("data/train")) == expected.get_ids(),
        "ids differ"
    );
}

#[test]
fn one_thread_and_two_write_the_same_bytes() {
    let dir = fresh();
    let tokenizer = put_json(&dir.path().join("tokenizer.json"), &small_gpt2(None));
    let text = put(&dir.path().join("text"), long_text().as_bytes());
    let made: Vec<_> = [1, 2]
        .into_iter()
        .map(|threads| {
            let options = Tokenize {
                tokenizer: TokenizerChoice::File(tokenizer.clone()),
                separator: Some("\n\n".to_owned()),
                eos: Some("<|endoftext|>".to_owned()),
                shard_tokens: 30_000,
                threads: Some(threads),
                overwrite: true,
                ..Tokenize::new(vec![text.clone()], dir.path().join("data"))
            };
            tokenize(&options).unwrap();
            contents(&dir.path().join("data"))
        })
        .collect();
    assert!(made[0].len() > 10, "{} files", made[0].len());
    assert!(made[0] == made[1], "files differ");
    assert_eq!(names(dir.path()), ["data", "text", "tokenizer.json"]);
}

#[test]
fn an_existing_dataset_is_replaced_only_on_request() {
    let dir = fresh();
    let out = dir.path().join("data");
    let options =
        |text: &[u8]| Tokenize::new(vec![put(&dir.path().join("text"), text)], out.clone());
    tokenize(&options(&[b'1'; 10])).unwrap();
    let before = contents(&out);
    assert_eq!(
        tokenize(&options(&[b'2'; 10])).unwrap_err().to_string(),
        format!(
            "{}: already holds a dataset; overwrite it by request, or use another name",
            out.display()
        )
    );
    assert_eq!(contents(&out), before);
    tokenize(&Tokenize {
        overwrite: true,
        ..options(&[b'2'; 10])
    })
    .unwrap();
    assert_eq!(ids(&out.join("train")), [50; 9]);
}

const OUT: &str = "SPD_TEST_TOKENIZE_OUT";

#[test]
#[ignore = "the process that `a_killed_tokenization_leaves_nothing_or_everything` kills"]
fn tokenize_slowly() {
    let Some(out) = std::env::var_os(OUT).map(PathBuf::from) else {
        return;
    };
    let text = out.with_file_name("text");
    let options = Tokenize {
        shard_tokens: 20_000,
        ..Tokenize::new(vec![text], out)
    };
    tokenize(&options).unwrap();
}

#[test]
fn a_killed_tokenization_leaves_nothing_or_everything() {
    let dir = fresh();
    let text = long_text().repeat(2).into_bytes();
    put(&dir.path().join("text"), &text);
    let out = dir.path().join("data");
    let start = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tokenizing::tokenize_slowly", "--ignored"])
            .env(OUT, &out)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    for shard in [0, 1, 30] {
        let seen = dir
            .path()
            .join(format!("data/.partial/train/tokens-{shard:05}.safetensors"));
        let mut child = start();
        while !seen.try_exists().unwrap() && child.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if out.join("train").try_exists().unwrap() {
            Dataset::open_as(&out.join("train"), None)
                .unwrap()
                .check(u32::MAX, &mut CheckedFiles::default())
                .unwrap();
            Dataset::open_as(&out.join("val"), None)
                .unwrap()
                .check(u32::MAX, &mut CheckedFiles::default())
                .unwrap();
            fs::remove_dir_all(&out).unwrap();
        }
    }
    assert!(start().wait().unwrap().success());
    assert_eq!(names(dir.path()), ["data", "text"]);
    let made = [ids(&out.join("train")), ids(&out.join("val"))].concat();
    assert!(
        made.into_iter().eq(text.into_iter().map(u32::from)),
        "ids differ"
    );
}

#[test]
fn bad_requests_are_refused_by_name() {
    let dir = fresh();
    let path = |name: &str| dir.path().join(name);
    let good = put(&path("good.txt"), b"some words of text");
    let tokenizer = put_json(&path("tokenizer.json"), &small_gpt2(None));
    let options = Tokenize {
        tokenizer: TokenizerChoice::File(tokenizer.clone()),
        ..Tokenize::new(vec![good.clone()], path("data"))
    };
    let refused = |options: Tokenize, text: String| {
        assert_eq!(tokenize(&options).unwrap_err().to_string(), text);
        assert!(!path("data").try_exists().unwrap(), "{text}");
    };
    let input = |input: PathBuf| Tokenize {
        inputs: vec![good.clone(), input],
        ..options.clone()
    };
    let with = |tokenizer: PathBuf| Tokenize {
        tokenizer: TokenizerChoice::File(tokenizer),
        ..options.clone()
    };
    let shown = |name: &str| path(name).display().to_string();

    refused(
        input(path("nowhere")),
        format!(
            "{}: cannot open: No such file or directory (os error 2)",
            shown("nowhere")
        ),
    );
    refused(
        input(put(&path("empty.txt"), b"")),
        format!(
            "{}: is empty; there is nothing to tokenize",
            shown("empty.txt")
        ),
    );
    refused(
        input(put(&path("latin1.txt"), b"caf\xe9 au lait, noir")),
        format!(
            "{}: byte 3: is not UTF-8; convert the text, or take bytes as ids",
            shown("latin1.txt")
        ),
    );
    refused(
        with(put(&path("bad.json"), b"{\"model\": 3}")),
        format!(
            "{}: is not a usable tokenizer.json: data did not match any variant of untagged enum ModelUntagged \
             at line 1 column 12",
            shown("bad.json")
        ),
    );
    refused(
        with(put(
            &path("no_json.json"),
            b"{\"decoder\": {\"type\": truu}}",
        )),
        format!(
            "{}: is not a usable tokenizer.json: expected ident at line 1 column 25",
            shown("no_json.json")
        ),
    );
    refused(
        with(put_json(&path("dropout.json"), &small_gpt2(Some(0.1)))),
        format!(
            "{}: is not a usable tokenizer.json: its dropout makes ids random; set it to null",
            shown("dropout.json")
        ),
    );
    refused(
        Tokenize {
            eos: Some("<eos>".to_owned()),
            ..options.clone()
        },
        format!(
            "{}: has no token <eos> to end documents with; name one of its own",
            tokenizer.display()
        ),
    );
    refused(
        Tokenize { eos: Some("<eos>".to_owned()), tokenizer: TokenizerChoice::Bytes, ..options.clone() },
        "bytes as ids leave none for the end-of-text token <eos>; leave it out, or use a tokenizer.json"
            .to_owned(),
    );
    refused(
        Tokenize {
            out: good.join("data"),
            ..options.clone()
        },
        format!(
            "{}: cannot create: Not a directory (os error 20)",
            good.join("data").display()
        ),
    );
    refused(
        Tokenize {
            held_out: 1.0,
            ..options.clone()
        },
        "held-out part is 1, must be at least 0 and below 1".to_owned(),
    );
    refused(
        Tokenize {
            held_out: 0.001,
            ..options.clone()
        },
        format!(
            "{}: the val split would have no tokens with 0.001 of the text held out; use more text or \
             another part",
            shown("data")
        ),
    );
    refused(
        Tokenize {
            inputs: Vec::new(),
            ..options.clone()
        },
        "no text files were given; name at least one".to_owned(),
    );
    refused(
        Tokenize {
            separator: Some(String::new()),
            ..options
        },
        "the separator is empty; leave it out, or give its text".to_owned(),
    );
}
