//! Inputs of `tokenize`: text, JSON lines and parquet, packed or not, by name, directory and
//! pattern.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use spd_dataloader::{CheckedFiles, DataError, Dataset, Tokenize, Watch};

use crate::tokenizing::{contents, ids};
use crate::{fresh, put, tokenize};

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

/// A parquet file of a column `text`, in row groups of two.
fn parquet_texts(path: &Path, texts: &[Option<&str>]) -> PathBuf {
    let schema = parse_message_type("message rows { optional binary text (UTF8); }").unwrap();
    let properties = WriterProperties::builder()
        .set_compression(parquet::basic::Compression::SNAPPY)
        .build();
    let mut bytes = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::new(properties)).unwrap();
    for group in texts.chunks(2) {
        let mut rows = writer.next_row_group().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        let values: Vec<_> = group
            .iter()
            .flatten()
            .map(|&text| ByteArray::from(text))
            .collect();
        let levels: Vec<_> = group.iter().map(|text| i16::from(text.is_some())).collect();
        column
            .typed::<ByteArrayType>()
            .write_batch(&values, Some(&levels), None)
            .unwrap();
        column.close().unwrap();
        rows.close().unwrap();
    }
    writer.close().unwrap();
    put(path, &bytes)
}

/// A parquet file of a column `ids` of lists.
fn parquet_ids(path: &Path, lists: &[&[i32]]) -> PathBuf {
    let schema = "message rows { required group ids (LIST) { repeated group list { required int32 element; } } }";
    let schema = parse_message_type(schema).unwrap();
    let mut bytes = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::default()).unwrap();
    let mut rows = writer.next_row_group().unwrap();
    let mut column = rows.next_column().unwrap().unwrap();
    let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
    for list in lists {
        values.extend(*list);
        defined.extend(list.iter().map(|_| 1));
        repeated.extend((0..list.len()).map(|place| i16::from(place > 0)));
        if list.is_empty() {
            defined.push(0);
            repeated.push(0);
        }
    }
    column
        .typed::<Int32Type>()
        .write_batch(&values, Some(&defined), Some(&repeated))
        .unwrap();
    column.close().unwrap();
    rows.close().unwrap();
    writer.close().unwrap();
    put(path, &bytes)
}

/// Options without held-out text, bytes as ids.
fn options(inputs: Vec<PathBuf>, dir: &Path) -> Tokenize {
    Tokenize {
        held_out: 0.0,
        overwrite: true,
        ..Tokenize::new(inputs, dir.join("out"))
    }
}

/// Text and document count of the dataset of these inputs.
fn made(inputs: Vec<PathBuf>, dir: &Path) -> (String, u64) {
    tokenize(&options(inputs, dir)).unwrap();
    let train = dir.join("out/train");
    let bytes: Vec<u8> = ids(&train)
        .into_iter()
        .map(|id| u8::try_from(id).unwrap())
        .collect();
    let dataset = Dataset::open_as(&train, None).unwrap();
    dataset.check(256, &mut CheckedFiles::default()).unwrap();
    (
        String::from_utf8(bytes).unwrap(),
        dataset.documents().unwrap(),
    )
}

const LINES: &[u8] = b"{\"id\": 1, \"text\": \"one \\u20ac\"}\n\n{\"text\": \"two\", \"more\": {\"text\": 3}}\r\n{\"text\": \"\"}\n{\"text\": [51, 52]}";

#[test]
fn text_lines_and_parquet_packed_or_not_are_documents() {
    let dir = fresh();
    let at = |name: &str| dir.path().join(name);
    let lines = ("one \u{20ac}two34".to_owned(), 3);
    for (name, bytes) in [
        ("a.jsonl", LINES.to_vec()),
        ("a.jsonl.gz", gz(LINES)),
        ("a.json.zst", zst(LINES)),
        // Two gzip members in one file, as `cat` makes them.
        (
            "b.ndjson.gz",
            [
                gz(&LINES[..LINES.len() - 18]),
                gz(b"{\"text\": [51, 52]}\n"),
            ]
            .concat(),
        ),
    ] {
        assert_eq!(
            made(vec![put(&at(name), &bytes)], dir.path()),
            lines,
            "{name}"
        );
    }
    let texts = [
        Some("one "),
        Some("\u{20ac}"),
        None,
        Some(""),
        Some("two34"),
    ];
    let path = parquet_texts(&at("a.parquet"), &texts);
    assert_eq!(made(vec![path], dir.path()), lines);
    for (name, bytes) in [
        ("a.txt.gz", gz(b"some text")),
        ("b.txt.zst", zst(b"some text")),
    ] {
        assert_eq!(
            made(vec![put(&at(name), &bytes)], dir.path()),
            ("some text".to_owned(), 1)
        );
    }
    let path = parquet_ids(&at("ids.parquet"), &[&[111, 110], &[], &[101]]);
    let options = Tokenize {
        column: "ids".to_owned(),
        ..options(vec![path], dir.path())
    };
    tokenize(&options).unwrap();
    assert_eq!(ids(&at("out/train")), b"one".map(u32::from));
    assert_eq!(
        Dataset::open_as(&at("out/train"), None)
            .unwrap()
            .documents(),
        Some(2)
    );
}

#[test]
fn directories_and_patterns_are_their_files_in_order() {
    let dir = fresh();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("in/deep")).unwrap();
    put(&at("in/b.txt"), b"b");
    put(&at("in/a.jsonl.zst"), &zst(b"{\"text\": \"a\"}"));
    put(&at("in/deep/c.txt.gz"), &gz(b"c"));
    put(&at("in/notes.md"), b"not these");
    put(&at("in/.hidden.txt"), b"not these");
    assert_eq!(made(vec![at("in")], dir.path()), ("abc".to_owned(), 3));
    assert_eq!(
        made(vec![at("in/*.txt"), at("in/deep/*")], dir.path()).0,
        "bc"
    );
    let refused = |input: PathBuf| {
        tokenize(&options(vec![input], dir.path()))
            .unwrap_err()
            .to_string()
    };
    fs::create_dir(at("none")).unwrap();
    assert_eq!(
        refused(at("none")),
        format!(
            "{}: holds no file whose name ends in .txt, .jsonl, .ndjson, .json, .parquet",
            at("none").display()
        )
    );
    assert_eq!(
        refused(at("in/*.csv")),
        format!("{}: matches no file", at("in/*.csv").display())
    );
}

#[test]
fn broken_input_is_named_by_file_and_line() {
    let dir = fresh();
    let at = |name: &str| dir.path().join(name);
    let refused = |path: PathBuf, text: &str| {
        let error = tokenize(&options(vec![path.clone()], dir.path()))
            .unwrap_err()
            .to_string();
        assert_eq!(error, format!("{}: {text}", path.display()));
        assert!(!at("out").try_exists().unwrap());
    };
    let second = |line: &[u8]| [b"{\"text\": \"one\"}\n", line].concat();
    refused(
        put(&at("a.jsonl"), &second(b"{\"text\": \"tw")),
        "line 2: is not a JSON object with a text or a list of ids in \"text\": EOF while parsing a string",
    );
    refused(
        put(&at("b.jsonl.gz"), &gz(&second(b"{\"texts\": 1}"))),
        "line 2: has no \"text\"; name the key that holds the text with --column",
    );
    refused(
        put(&at("c.jsonl"), &second(b"[1]\n")),
        "line 2: is not a JSON object with a text or a list of ids in \"text\": invalid type: sequence, expected \
         an object",
    );
    refused(
        put(&at("d.jsonl"), &second(b"{\"text\": [256]}")),
        "line 2: holds the id 256, the tokenizer has 256; is it of another one?",
    );
    refused(
        put(&at("h.jsonl"), &second(b"{\"text\": true}")),
        "line 2: is not a JSON object with a text or a list of ids in \"text\": invalid type: boolean `true`, expected a text or a \
         list of ids",
    );
    let packed = gz(&[LINES, b"\n"].concat().repeat(100));
    refused(
        put(&at("e.jsonl.gz"), &packed[..packed.len() / 2]),
        "cannot be unpacked: incomplete deflate stream; was it copied whole?",
    );
    let text = parquet_texts(&at("f.parquet"), &[Some("one")]);
    let no_column = Tokenize {
        column: "words".to_owned(),
        ..options(vec![text.clone()], dir.path())
    };
    assert_eq!(
        tokenize(&no_column).unwrap_err().to_string(),
        format!(
            "{}: has no column \"words\"; name one with --column: text",
            text.display()
        )
    );
    let whole = fs::read(&text).unwrap();
    put(&text, &whole[..whole.len() - 5]);
    let error = tokenize(&options(vec![text.clone()], dir.path()))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(&format!(
            "{}: is not a complete parquet file: ",
            text.display()
        )),
        "{error}"
    );
}

#[test]
fn a_file_that_unpacks_without_end_is_refused() {
    let dir = fresh();
    let zeros = vec![0; 120 << 20];
    for (name, bytes) in [
        ("a.txt.zst", zst(&zeros)),
        ("b.txt.gz", gz(&zeros)),
        ("c.jsonl.zst", zst(&zeros)),
    ] {
        let path = put(&dir.path().join(name), &bytes);
        assert_eq!(
            tokenize(&options(vec![path.clone()], dir.path()))
                .unwrap_err()
                .to_string(),
            format!(
                "{}: unpacks to more than 100 times its size, as no text does; if it is meant, unpack it first",
                path.display()
            )
        );
    }
}

#[test]
fn the_last_documents_are_held_out_whole() {
    let dir = fresh();
    let lines: String = (0..10)
        .map(|n| format!("{{\"text\": \"{n}{n}\"}}\n"))
        .collect();
    let path = put(&dir.path().join("a.jsonl"), lines.as_bytes());
    for (held_out, val) in [(0.1, "99"), (0.25, "8899"), (0.03, "99")] {
        let options = Tokenize {
            held_out,
            ..options(vec![path.clone()], dir.path())
        };
        tokenize(&options).unwrap();
        let found = ids(&dir.path().join("out/val"));
        assert_eq!(
            found,
            val.bytes().map(u32::from).collect::<Vec<_>>(),
            "{held_out}"
        );
    }
}

/// Several inputs of 3 MB, and options that make 60 shards of them.
pub(crate) fn much(dir: &Path) -> Tokenize {
    let mut lines = String::new();
    for number in 0..20_000_u64 {
        let word = "word ".repeat(usize::try_from(number % 17).unwrap());
        lines += &format!("{{\"text\": \"{word}{number}\"}}\n");
    }
    Tokenize {
        shard_tokens: 25_000,
        separator: Some("4".to_owned()),
        ..Tokenize::new(
            vec![
                put(&dir.join("a.jsonl.zst"), &zst(lines.as_bytes())),
                put(&dir.join("b.txt"), lines.as_bytes()),
                put(&dir.join("c.jsonl"), lines.as_bytes()),
            ],
            dir.join("out"),
        )
    }
}

#[test]
fn stopped_tokenization_continues_and_gives_the_same_bytes() {
    let dir = fresh();
    let options = much(dir.path());
    let out = options.out.clone();
    tokenize(&options).unwrap();
    let straight = contents(&out);
    assert!(straight.len() > 60, "{} files", straight.len());
    let partial = out.join(".partial/train");
    let mut went_on = 0;
    for shards in [1, 20, 50] {
        fs::remove_dir_all(&out).unwrap();
        let watch = Watch::default();
        let seen = partial.join(format!("tokens-{shards:05}.safetensors"));
        let ended = thread::scope(|scope| {
            scope.spawn(|| {
                while !seen.try_exists().unwrap() && !out.join("train").try_exists().unwrap() {
                    thread::sleep(Duration::from_micros(200));
                }
                watch.stop.store(true, Ordering::Relaxed);
            });
            spd_dataloader::tokenize(
                &Tokenize {
                    threads: Some(1),
                    ..options.clone()
                },
                &watch,
            )
        });
        if ended.is_ok() {
            continue;
        }
        assert!(matches!(ended, Err(DataError::Asked)));
        let inode = |dir: &Path| {
            fs::metadata(dir.join("tokens-00000.safetensors"))
                .unwrap()
                .ino()
        };
        let first = inode(&partial);
        tokenize(&Tokenize {
            threads: Some(8),
            ..options.clone()
        })
        .unwrap();
        assert_eq!(inode(&out.join("train")), first, "was not written again");
        assert!(contents(&out) == straight, "files differ");
        went_on += 1;
    }
    assert!(went_on > 0, "none was ended early");
}

#[test]
fn tokenization_of_other_options_is_not_continued() {
    let dir = fresh();
    let options = much(dir.path());
    let watch = Watch::default();
    let partial = options.out.join(".partial");
    thread::scope(|scope| {
        scope.spawn(|| {
            while !partial
                .join("train/tokens-00001.safetensors")
                .try_exists()
                .unwrap()
                && !options.out.join("train").try_exists().unwrap()
            {
                thread::sleep(Duration::from_micros(200));
            }
            watch.stop.store(true, Ordering::Relaxed);
        });
        drop(spd_dataloader::tokenize(&options, &watch));
    });
    let other = Tokenize {
        held_out: 0.0,
        overwrite: true,
        ..options.clone()
    };
    tokenize(&other).unwrap();
    let found = contents(&options.out);
    fs::remove_dir_all(&options.out).unwrap();
    tokenize(&other).unwrap();
    assert!(contents(&options.out) == found);
}

// The whole text is one chunk: a stop is noticed inside of it.
#[test]
fn stop_is_noticed_at_the_next_shard() {
    let dir = fresh();
    let text: Vec<u8> = (0..=255).cycle().take(1000).collect();
    let options = Tokenize {
        held_out: 0.0,
        shard_tokens: 1,
        ..Tokenize::new(
            vec![put(&dir.path().join("text"), &text)],
            dir.path().join("out"),
        )
    };
    let shard = |dir: &str, number: usize| {
        let name = format!("tokens-{number:05}.safetensors");
        options.out.join(dir).join(name)
    };
    let watch = Watch::default();
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            while !shard(".partial/train", 20).try_exists().unwrap() {
                thread::sleep(Duration::from_micros(200));
            }
            watch.stop.store(true, Ordering::Relaxed);
        });
        spd_dataloader::tokenize(&options, &watch)
    });
    assert!(matches!(ended, Err(DataError::Asked)), "{ended:?}");
    assert!(
        !shard(".partial/train", 999).try_exists().unwrap(),
        "all is written"
    );
    let inode = |dir| fs::metadata(shard(dir, 20)).unwrap().ino();
    let before = inode(".partial/train");
    tokenize(&options).unwrap();
    assert_eq!(inode("train"), before, "was written again");
    let dataset = Dataset::open_as(&options.out.join("train"), None).unwrap();
    dataset.check(256, &mut CheckedFiles::default()).unwrap();
    assert_eq!(dataset.tokens(), 1000);
}

#[test]
fn any_byte_of_a_parquet_file_may_be_wrong() {
    let dir = fresh();
    let texts = [Some("one "), None, Some("two"), Some("one ")];
    let parquet = fs::read(parquet_texts(&dir.path().join("good.parquet"), &texts)).unwrap();
    for at in 0..parquet.len() {
        for change in [0x02, 0x80] {
            let mut data = parquet.clone();
            data[at] ^= change;
            let dir = fresh();
            let path = put(&dir.path().join("a.parquet"), &data);
            if let Err(error) = tokenize(&options(vec![path], dir.path())) {
                let error = error.to_string();
                assert!(
                    error.starts_with(&dir.path().display().to_string()),
                    "{error}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn damaged_inputs_never_panic(
        file in 0..4_usize, at in any::<prop::sample::Index>(), bytes in prop::collection::vec(any::<u8>(), 1..9), cut in any::<bool>()
    ) {
        let dir = fresh();
        let texts = [Some("one "), None, Some("two")];
        let parquet = fs::read(parquet_texts(&dir.path().join("good.parquet"), &texts)).unwrap();
        let mut data = vec![
            LINES.to_vec(),
            gz(LINES),
            zst(LINES),
            parquet,
        ].swap_remove(file);
        let at = at.index(data.len());
        for (old, new) in data[at..].iter_mut().zip(bytes) {
            *old = new;
        }
        if cut {
            data.truncate(at.max(1));
        }
        let name = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"][file];
        let path = put(&dir.path().join(name), &data);
        if let Err(error) = tokenize(&options(vec![path], dir.path())) {
            prop_assert!(error.to_string().starts_with(&dir.path().display().to_string()), "{}", error);
        }
    }
}
