//! Every format with every kind of damage: an error names one of its files, or the rows are right.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spd_dataloader::{Batch, CheckedFiles, Dataset, Documents, Dtype, Rows, Source, Windows};

use crate::{alone, counting_dataset, fresh, put, token_source};

/// Damages a file.
type Spoil = fn(&Path);

/// Ids of a dataset: 0 to 255, over and over.
const IDS: usize = 20_000;
const VOCAB: u32 = 256;
/// Ids of all its rows of nine and a label.
const ALL: usize = 10 * ((IDS - 1) / 9);

/// A dataset of one format.
pub(crate) struct Format {
    pub(crate) name: &'static str,
    /// Makes the dataset in a directory; returns the path to open.
    pub(crate) make: fn(&Path) -> PathBuf,
    /// The dtype of its ids, if the run file must give it.
    pub(crate) dtype: Option<Dtype>,
    /// The file with the ids, and the one that describes them.
    pub(crate) data: &'static str,
    pub(crate) index: Option<&'static str>,
    /// Offset of the first id in the file, and bytes of an id.
    first: fn(&[u8]) -> usize,
    id_bytes: usize,
}

pub(crate) const FORMATS: [Format; 5] = [
    Format {
        name: "ours",
        make: |dir| counting_dataset(dir, IDS, IDS),
        dtype: None,
        data: "data/train/tokens-00000.safetensors",
        index: Some("data/train/index.json"),
        first: |bytes| bytes.len() - 2 * IDS,
        id_bytes: 2,
    },
    Format {
        name: "nanoGPT",
        make: |dir| put(&dir.join("n.bin"), &u16s()),
        dtype: Some(Dtype::U16),
        data: "n.bin",
        index: None,
        first: |_| 0,
        id_bytes: 2,
    },
    Format {
        name: "llm.c",
        make: |dir| put(&dir.join("l.bin"), &[llm_c(20_240_520, 1), u16s()].concat()),
        dtype: None,
        data: "l.bin",
        index: None,
        first: |_| 1024,
        id_bytes: 2,
    },
    Format {
        name: "llm.c of Llama 3",
        make: |dir| {
            put(
                &dir.join("l3.bin"),
                &[llm_c(20_240_801, 7), u32s()].concat(),
            )
        },
        dtype: None,
        data: "l3.bin",
        index: None,
        first: |_| 1024,
        id_bytes: 4,
    },
    Format {
        name: "Megatron",
        make: megatron,
        dtype: None,
        data: "m.bin",
        index: Some("m.idx"),
        first: |_| 0,
        id_bytes: 2,
    },
];

fn ids() -> impl Iterator<Item = u16> {
    (0..=255).cycle().take(IDS)
}

fn u16s() -> Vec<u8> {
    ids().flat_map(u16::to_le_bytes).collect()
}

fn u32s() -> Vec<u8> {
    ids().flat_map(|id| u32::from(id).to_le_bytes()).collect()
}

fn llm_c(magic: u32, version: u32) -> Vec<u8> {
    let count = u32::try_from(IDS).unwrap();
    let words = [magic, version, count].into_iter().chain([0; 253]);
    words.flat_map(u32::to_le_bytes).collect()
}

/// Two thousand sequences of ten ids, a document each.
fn megatron(dir: &Path) -> PathBuf {
    let count = IDS as u64 / 10;
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1_u64.to_le_bytes());
    idx.push(8);
    idx.extend([count, count + 1].map(u64::to_le_bytes).concat());
    idx.extend((0..count).flat_map(|_| 10_i32.to_le_bytes()));
    idx.extend((0..count).flat_map(|sequence| (20 * sequence).to_le_bytes()));
    idx.extend((0..=count).flat_map(u64::to_le_bytes));
    put(&dir.join("m.idx"), &idx);
    put(&dir.join("m.bin"), &u16s())
}

/// Opens a dataset, checks it, and reads all of its rows.
pub(crate) fn all_rows(path: &Path, dtype: Option<Dtype>) -> Result<Vec<u32>, String> {
    let read = || {
        let dataset = Dataset::open_as(path, dtype)?;
        dataset.check(VOCAB, &mut CheckedFiles::default())?;
        let rows = Rows {
            seq_len: 9,
            vocab: VOCAB,
            documents: Documents::Joined,
        };
        let windows = Windows::new(Arc::new(dataset), rows)?;
        let count = usize::try_from(windows.samples().get()).unwrap();
        let mut batch = Batch::default();
        Source::Tokens(windows).fill(&alone(0, count), 0, &mut batch)?;
        Ok(batch.tokens)
    };
    read().map_err(|error: spd_dataloader::DataError| error.to_string())
}

/// The expected outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Refused,
    /// The file does not say that it is incomplete.
    Fewer,
}

/// Asserts the outcome of a damaged dataset; an error must name one of its files.
fn assert_due(format: &Format, what: &str, (dir, path): (&Path, &Path), due: Due) {
    let (name, found) = (format.name, all_rows(path, format.dtype));
    match (found, due) {
        (Err(line), Due::Refused) => {
            assert!(
                line.starts_with(&format!("{}/", dir.display())),
                "{name}, {what}: {line}"
            );
            assert!(!line.contains('\n'), "{name}, {what}: {line}");
        }
        (Ok(rows), Due::Fewer) => assert!(rows.len() < ALL, "{name}, {what}"),
        (found, due) => panic!(
            "{name}, {what}: {due:?} is due, and {:?}",
            found.map(|r| r.len())
        ),
    }
}

/// Makes each dataset, damages it, and asserts the outcome.
fn each(what: &str, spoil: impl Fn(&Format, &Path) -> Due) {
    for format in &FORMATS {
        let dir = fresh();
        let path = (format.make)(dir.path());
        let due = spoil(format, dir.path());
        assert_due(format, what, (dir.path(), &path), due);
    }
}

/// The files of a format.
fn files(format: &Format) -> impl Iterator<Item = &'static str> {
    [Some(format.data), format.index].into_iter().flatten()
}

/// Changes the bytes of one of the files.
fn change(dir: &Path, file: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let path = dir.join(file);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    put(&path, &bytes);
}

#[test]
fn undamaged_dataset_gives_its_rows() {
    for format in &FORMATS {
        let dir = fresh();
        let path = (format.make)(dir.path());
        let mut rows = all_rows(&path, format.dtype).unwrap();
        assert_eq!(rows.len(), ALL, "{}", format.name);
        rows.sort_unstable();
        assert_eq!((rows[0], rows.last()), (0, Some(&255)));
    }
}

#[test]
fn files_that_are_empty_of_one_byte_or_cut_at_any_page_are_named() {
    for format in &FORMATS {
        let dir = fresh();
        let path = (format.make)(dir.path());
        for file in files(format) {
            let place = dir.path().join(file);
            let whole = fs::read(&place).unwrap();
            let pages = (1..).map(|page| 4096 * page);
            let pages = pages.take_while(|end| *end < whole.len());
            for end in [0, 1].into_iter().chain(pages).chain([whole.len() - 3]) {
                put(&place, &whole[..end]);
                // Bare ids do not state their number.
                let due = match format.name {
                    "nanoGPT" if end > 0 && end % 2 == 0 => Due::Fewer,
                    _ => Due::Refused,
                };
                assert_due(
                    format,
                    &format!("{file} of {end}"),
                    (dir.path(), &path),
                    due,
                );
            }
            put(&place, &whole);
        }
    }
}

#[test]
fn an_id_beyond_the_vocabulary_is_named_wherever_it_is() {
    for at in [0, 1, IDS / 2, IDS - 1] {
        for id in [256_u16, 65_535] {
            each("an id", |format, dir| {
                change(dir, format.data, |bytes| {
                    let place = (format.first)(bytes) + at * format.id_bytes;
                    bytes[place..place + 2].copy_from_slice(&id.to_le_bytes());
                });
                Due::Refused
            });
        }
    }
}

#[test]
fn another_beginning_is_named() {
    // Any byte of the magics. Bare ids have no magic.
    for at in 0..8 {
        each("a magic number", |format, dir| {
            let (file, is_bare) = match format.name {
                "nanoGPT" => (format.data, true),
                "Megatron" => ("m.idx", false),
                _ => (format.data, false),
            };
            change(dir, file, |bytes| match is_bare {
                // Ids outside of the vocabulary.
                true => bytes[at | 1] = 0xff,
                false => bytes[at] ^= 0xff,
            });
            Due::Refused
        });
    }
}

#[test]
fn ids_of_another_size_are_named() {
    for format in &FORMATS {
        let dir = fresh();
        let path = (format.make)(dir.path());
        let other = match format.id_bytes {
            2 => Dtype::U32,
            _ => Dtype::U16,
        };
        let line = all_rows(&path, Some(other)).unwrap_err();
        assert!(
            line.starts_with(&format!("{}/", dir.path().display())),
            "{}: {line}",
            format.name
        );
    }
    // The bytes are ids of the other size, and no header says so.
    each("ids of another size", |format, dir| {
        change(dir, format.data, |bytes| {
            let first = (format.first)(bytes);
            let others = if format.id_bytes == 2 { u32s() } else { u16s() };
            bytes.truncate(first);
            bytes.extend(others);
        });
        Due::Refused
    });
    each("another dtype in the index", |format, dir| {
        match format.name {
            "Megatron" => change(dir, "m.idx", |bytes| bytes[17] = 4),
            "ours" => {
                let index = fs::read_to_string(dir.join("data/train/index.json")).unwrap();
                let other = index.replace("\"u16\"", "\"u32\"");
                assert_ne!(other, index);
                put(&dir.join("data/train/index.json"), other.as_bytes());
            }
            _ => change(dir, format.data, |bytes| bytes.truncate(bytes.len() - 1)),
        }
        Due::Refused
    });
}

#[test]
fn data_of_another_index_are_named() {
    each("more than is promised", |format, dir| {
        change(dir, format.data, |bytes| match format.name {
            // Bare ids do not state their number.
            "nanoGPT" => bytes.push(0),
            _ => bytes.extend([0; 4]),
        });
        Due::Refused
    });
    each("another number of ids", |format, dir| {
        match format.name {
            "ours" => {
                let index = fs::read_to_string(dir.join("data/train/index.json")).unwrap();
                let other = index.replace("20000", "19999");
                assert_ne!(other, index);
                put(&dir.join("data/train/index.json"), other.as_bytes());
            }
            "Megatron" => change(dir, "m.idx", |bytes| bytes[34] = 11),
            "nanoGPT" => change(dir, format.data, |bytes| bytes.clear()),
            _ => change(dir, format.data, |bytes| bytes[8] ^= 1),
        }
        Due::Refused
    });
}

#[test]
fn wrong_kind_of_file_is_named() {
    let spoils: [(&str, Spoil); 4] = [
        ("nothing", |_| ()),
        ("a directory", |place| fs::create_dir(place).unwrap()),
        ("a link to nowhere", |place| {
            symlink("nowhere", place).unwrap()
        }),
        // No user can follow it, not even root.
        ("a link to itself", |place| symlink(place, place).unwrap()),
    ];
    for (what, spoil) in spoils {
        for format in &FORMATS {
            for file in files(format) {
                let dir = fresh();
                let path = (format.make)(dir.path());
                let place = dir.path().join(file);
                fs::remove_file(&place).unwrap();
                spoil(&place);
                let line = all_rows(&path, format.dtype).unwrap_err();
                // Of a pair, the error may name the other file.
                let (name, dir) = (format.name, dir.path().display());
                assert!(
                    line.starts_with(&format!("{dir}/")),
                    "{name}, {file}: {what}: {line}"
                );
            }
        }
    }
}

#[test]
fn a_file_that_goes_away_while_it_is_read_is_read_on_and_one_that_changes_is_named() {
    for format in &FORMATS {
        let dir = fresh();
        let path = (format.make)(dir.path());
        let place = dir.path().join(format.data);
        let open = || {
            let dataset = Dataset::open_as(&path, format.dtype).unwrap();
            token_source(Arc::new(dataset), 9, VOCAB).unwrap()
        };
        let fill = |source: &Source| {
            let mut batch = Batch::default();
            let filled = source.fill(&alone(0, 100), 0, &mut batch);
            filled
                .map(|()| batch.tokens)
                .map_err(|error| error.to_string())
        };
        let whole = fs::read(&place).unwrap();
        let expected = fill(&open()).unwrap();
        // Another file takes its name; the open file stays until it is closed.
        let source = open();
        let other = put(&dir.path().join("other"), &vec![0; whole.len()]);
        fs::rename(other, &place).unwrap();
        assert_eq!(fill(&source), Ok(expected.clone()), "{}", format.name);
        put(&place, &whole);
        let source = open();
        fs::remove_file(&place).unwrap();
        assert_eq!(fill(&source), Ok(expected), "{}", format.name);
        put(&place, &whole);
        // The open file is written to, or cut.
        let (bytes, named) = (whole.len(), place.display());
        for (end, reason) in [
            (bytes, "was written to while it was read".to_owned()),
            (
                4096,
                format!("had {bytes} bytes when it was opened, has 4096 now"),
            ),
            (
                0,
                format!("had {bytes} bytes when it was opened, has 0 now"),
            ),
        ] {
            let source = open();
            let file = fs::File::options().write(true).open(&place).unwrap();
            file.set_len(end as u64).unwrap();
            let later = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
            file.set_times(later).unwrap();
            let line = fill(&source).unwrap_err();
            let expected = format!(
                "{named}: {reason}; restore it, and replace files in use by renaming, never in place"
            );
            assert_eq!(line, expected, "{}", format.name);
            put(&place, &whole);
        }
    }
}
