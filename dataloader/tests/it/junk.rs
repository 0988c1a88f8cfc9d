//! Damaged files are refused by name, without a panic.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use spd_dataloader::{CheckedFiles, DataError, Dataset, Documents, Dtype, Rows, Windows};
use tempfile::TempDir;

use crate::{counting_dataset, fresh, put};

const SHARD: &str = "tokens-00001.safetensors";

/// A dataset of three shards, and the path of the second.
fn dataset() -> (TempDir, PathBuf, PathBuf) {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 250, 100);
    let shard = data.join(SHARD);
    (dir, data, shard)
}

/// Whether an error begins with the file at fault.
fn names(error: &str, path: &Path) -> bool {
    error.starts_with(&format!("{}: ", path.display()))
}

fn refusal(data: &Path) -> String {
    Dataset::open_as(data, None).unwrap_err().to_string()
}

#[test]
fn a_shard_cut_short_anywhere_is_refused_by_name() {
    let (_dir, data, shard) = dataset();
    let whole = fs::read(&shard).unwrap();
    for len in (0..whole.len()).step_by(3) {
        put(&shard, &whole[..len]);
        let error = refusal(&data);
        assert!(names(&error, &shard), "{len} bytes: {error}");
    }
    put(&shard, &whole[..whole.len() - 2]);
    assert_eq!(
        refusal(&data),
        format!(
            "{}: 200 bytes of tensors are promised, 198 are there; was it copied whole?",
            shard.display()
        )
    );
    put(&shard, b"");
    assert_eq!(
        refusal(&data),
        format!("{}: is empty; was it still being written?", shard.display())
    );
}

#[test]
fn a_bit_flipped_anywhere_in_a_header_is_refused_by_name() {
    let (_dir, data, shard) = dataset();
    let mut bytes = fs::read(&shard).unwrap();
    let header = bytes.len() - 200;
    // One bit of each byte, another one from byte to byte.
    for bit in (0..8 * header).step_by(9) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        put(&shard, &bytes);
        let error = refusal(&data);
        assert!(names(&error, &shard), "bit {bit}: {error}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

fn check(data: &Path, vocab: u32, known: &mut CheckedFiles) -> Result<(), String> {
    let checked = Dataset::open_as(data, None).unwrap().check(vocab, known);
    checked.map_err(|error: DataError| error.to_string())
}

/// Flips a bit of the last token, in place.
fn flip(shard: &Path) {
    let mut bytes = fs::read(shard).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    put(shard, &bytes);
}

#[test]
fn a_bit_flipped_in_the_tokens_is_found() {
    let (_dir, data, shard) = dataset();
    let mut known = CheckedFiles::default();
    assert_eq!(check(&data, 256, &mut known), Ok(()));
    flip(&shard);
    // The known result is of the time before the change.
    for _ in 0..2 {
        let error = check(&data, 256, &mut known).unwrap_err();
        assert_eq!(
            error,
            format!(
                "{}: its tokens hash to 978a940b42c2bf47ea101b5814997de9, index.json promises \
                 abb650fe95f8abb2ddb40c27683db5ea; copy it again, or tokenize again",
                shard.display()
            )
        );
    }
    flip(&shard);
    assert_eq!(check(&data, 256, &mut known), Ok(()));
}

#[test]
fn a_wrong_hash_in_the_index_is_found_though_the_shards_are_known() {
    let (_dir, data, _) = dataset();
    let mut known = CheckedFiles::default();
    assert_eq!(check(&data, 256, &mut known), Ok(()));
    let index = data.join("index.json");
    let text = fs::read_to_string(&index).unwrap();
    let at = text.find("\"xxh3\": \"").unwrap() + 9;
    let other = if &text[at..=at] == "0" { "1" } else { "0" };
    put(
        &index,
        [&text[..at], other, &text[at + 1..]].concat().as_bytes(),
    );
    let error = check(&data, 256, &mut known).unwrap_err();
    let first = data.join("tokens-00000.safetensors");
    assert!(
        names(&error, &first) && error.contains(" index.json promises "),
        "{error}"
    );
}

// A known result is believed without reading the file.
#[test]
fn checked_file_is_not_read_again() {
    let (_dir, data, shard) = dataset();
    let mut known = CheckedFiles::default();
    assert_eq!(check(&data, 256, &mut known), Ok(()));
    let said = serde_json::to_string(&known).unwrap();
    let claim = said.replace("\"largest\":199", "\"largest\":1000");
    assert_ne!(claim, said);
    let claimed: CheckedFiles = serde_json::from_str(&claim).unwrap();
    // Its ids are then read one by one, and no error is found.
    assert_eq!(check(&data, 256, &mut claimed.clone()), Ok(()));
    let claim = said.replace("\"largest\":", "\"largest\":7");
    let claimed: CheckedFiles = serde_json::from_str(&claim).unwrap();
    let mut same = claimed.clone();
    assert_eq!(check(&data, 256, &mut same), Ok(()));
    assert_eq!(same, claimed, "nothing was read");
    // A file of the same bytes is another file.
    let bytes = fs::read(&shard).unwrap();
    fs::remove_file(&shard).unwrap();
    put(&shard, &bytes);
    assert_eq!(check(&data, 256, &mut same), Ok(()));
    assert_ne!(same, claimed);
}

#[test]
fn an_id_outside_of_the_vocabulary_is_found_wherever_it_stands() {
    let (_dir, data, shard) = dataset();
    let mut known = CheckedFiles::default();
    assert_eq!(check(&data, 256, &mut known), Ok(()));
    // Of 250 tokens, 0 to 249, the second shard holds 100 to 199.
    assert_eq!(
        check(&data, 199, &mut known).unwrap_err(),
        format!(
            "{}: token 99 is 199, but the vocabulary has 199 ids; was the text tokenized for another model?",
            shard.display()
        )
    );
}

#[test]
fn a_missing_dataset_and_a_missing_shard_have_distinct_errors() {
    let (dir, data, shard) = dataset();
    fs::remove_file(&shard).unwrap();
    assert_eq!(
        refusal(&data),
        format!(
            "{}: is missing, but index.json lists it; copy the whole directory again",
            shard.display()
        )
    );
    let nowhere = dir.path().join("nowhere");
    assert_eq!(
        refusal(&nowhere),
        format!("{}: no such dataset", nowhere.display())
    );
    let parent = data.parent().unwrap();
    assert_eq!(
        refusal(parent),
        format!(
            "{}: has no index.json, so it is no dataset; give its train or val folder",
            parent.display()
        )
    );
    let text = dir.path().join("text");
    assert_eq!(
        refusal(&text),
        format!(
            "{}: is neither a dataset directory nor a .bin file of ids; spd-launch tokenize makes a dataset of \
             text, JSON lines or parquet",
            text.display()
        )
    );
    assert_eq!(
        Dataset::open_as(&nowhere, None).unwrap_err().to_string(),
        format!("{}: no such dataset", nowhere.display())
    );
}

#[test]
fn a_shard_of_another_dataset_is_refused() {
    let (_dir, data, shard) = dataset();
    fs::copy(data.join("tokens-00002.safetensors"), &shard).unwrap();
    assert_eq!(
        refusal(&data),
        format!(
            "{}: holds 50 tokens and 1 documents, index.json promises 100 and 0; are they of one dataset?",
            shard.display()
        )
    );
}

#[test]
fn an_index_of_another_dtype_is_refused() {
    let (_dir, data, _) = dataset();
    let index = data.join("index.json");
    let text = fs::read_to_string(&index)
        .unwrap()
        .replace("\"u16\"", "\"u32\"");
    put(&index, text.as_bytes());
    assert_eq!(
        refusal(&data),
        format!(
            "{}: holds u16 ids, index.json promises u32",
            data.join("tokens-00000.safetensors").display()
        )
    );
}

/// Megatron's index of the sequences 0..3 and 3..5 in one document, as bytes; its ids are five u16.
fn megatron() -> Vec<u8> {
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1_u64.to_le_bytes());
    idx.push(8);
    idx.extend([2_u64, 2].map(u64::to_le_bytes).concat());
    idx.extend([3_i32, 2].map(i32::to_le_bytes).concat());
    idx.extend([0_u64, 6, 0, 2].map(u64::to_le_bytes).concat());
    idx
}

#[test]
fn a_bit_flipped_in_the_document_ends_is_found() {
    let (_dir, data, _) = dataset();
    let shard = data.join("tokens-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    // The only document ends with the last of 50 tokens, which are u16 and come last.
    let at = bytes.len() - 100 - 8;
    assert_eq!(bytes[at], 50);
    bytes[at] = 49;
    put(&shard, &bytes);
    let error = check(&data, 256, &mut CheckedFiles::default()).unwrap_err();
    assert!(
        names(&error, &shard) && error.contains(": its document ends hash to "),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_bytes_are_no_index(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let (_dir, data, _) = small_dataset();
        put(&data.join("index.json"), &bytes);
        let error = refusal(&data);
        prop_assert!(names(&error, &data.join("index.json")), "{}", error);
    }

    #[test]
    fn a_damaged_index_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let (_dir, data, _) = small_dataset();
        let mut bytes = fs::read(data.join("index.json")).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if cut {
            bytes.truncate(at);
        }
        put(&data.join("index.json"), &bytes);
        // Some damage changes nothing, or is found only by `check`.
        if let Ok(dataset) = Dataset::open_as(&data, None) {
            let _ = dataset.check(256, &mut CheckedFiles::default());
        }
    }

    #[test]
    fn a_random_header_is_refused_by_name(header in prop::collection::vec(any::<u8>(), 0..100), exact in any::<bool>()) {
        let (_dir, data, shard) = small_dataset();
        let promised = header.len() as u64;
        let prefix = if exact { promised.to_le_bytes().to_vec() } else { Vec::new() };
        put(&shard, &[prefix, header].concat());
        let error = refusal(&data);
        prop_assert!(names(&error, &shard), "{}", error);
    }

    #[test]
    fn a_damaged_index_of_megatron_never_panics(
        at in any::<prop::sample::Index>(), bytes in prop::collection::vec(any::<u8>(), 1..9), cut in any::<bool>(), ids in 0..12_usize
    ) {
        let dir = fresh();
        let mut idx = megatron();
        let at = at.index(idx.len());
        for (old, new) in idx[at..].iter_mut().zip(bytes) {
            *old = new;
        }
        if cut {
            idx.truncate(at);
        }
        let path = put(&dir.path().join("x.idx"), &idx);
        put(&dir.path().join("x.bin"), &vec![1; ids]);
        match Dataset::open_as(&path, None) {
            Err(error) => prop_assert!(error.to_string().starts_with(&dir.path().join("x.").display().to_string())),
            Ok(dataset) => {
                let rows = Rows { seq_len: 1, vocab: 258, documents: Documents::Apart };
                let _ = dataset.check(258, &mut CheckedFiles::default());
                let _ = Windows::new(Arc::new(dataset), rows);
            }
        }
    }

    #[test]
    fn a_random_plain_file_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64), magic in any::<bool>()) {
        let dir = fresh();
        let start = if magic { 20_240_520_u32.to_le_bytes().to_vec() } else { Vec::new() };
        let path = put(&dir.path().join("x.bin"), &[start, bytes].concat());
        for dtype in [None, Some(Dtype::U16), Some(Dtype::U32)] {
            if let Err(error) = Dataset::open_as(&path, dtype) {
                prop_assert!(names(&error.to_string(), &path), "{}", error);
            }
        }
    }
}

/// A dataset whose files are written without syncing, for tests that make many.
fn small_dataset() -> (TempDir, PathBuf, PathBuf) {
    let dir = fresh();
    let data = dir.path().to_owned();
    let header = r#"{"document_ends":{"dtype":"U64","shape":[0],"data_offsets":[0,0]},"tokens":{"dtype":"U16","shape":[4],"data_offsets":[0,8]}}"#;
    let shard = data.join("a");
    let prefix = (header.len() as u64).to_le_bytes();
    put(&shard, &[&prefix[..], header.as_bytes(), &[7; 8]].concat());
    let index = r#"{"format_version": 1, "tokenizer": {"kind": "bytes"}, "vocab_size": 256, "dtype": "u16",
        "tokens": 4, "shards": [{"file": "a", "tokens": 4, "documents": 0, "xxh3": "00"}]}"#;
    put(&data.join("index.json"), index.as_bytes());
    assert_eq!(Dataset::open_as(&data, None).unwrap().tokens(), 4);
    (dir, data, shard)
}
