//! The datasets of run files: formats, documents, and a held-out end.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spd_dataloader::{
    Batch, CheckedFiles, DataError, Dataset, Documents, Dtype, Rows, Source, Windows,
};

use crate::{alone, counting_dataset, fresh, put};

fn u16s(ids: impl IntoIterator<Item = u16>) -> Vec<u8> {
    ids.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Megatron's pair `NAME.bin` and `NAME.idx`, a sequence a document. Returns `NAME`.
fn megatron(dir: &Path, lengths: &[i32]) -> PathBuf {
    let mut idx = b"MMIDIDX\0\0".to_vec();
    idx.extend(1_u64.to_le_bytes());
    idx.push(8);
    idx.extend((lengths.len() as u64).to_le_bytes());
    idx.extend((lengths.len() as u64 + 1).to_le_bytes());
    idx.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    let mut tokens = 0;
    for &length in lengths {
        idx.extend((2 * i64::from(tokens)).to_le_bytes());
        tokens += length;
    }
    idx.extend((0..=lengths.len() as u64).flat_map(u64::to_le_bytes));
    put(&dir.join("m.idx"), &idx);
    put(
        &dir.join("m.bin"),
        &u16s((0..).take(usize::try_from(tokens).unwrap())),
    );
    dir.join("m")
}

fn windows(dataset: Dataset, seq_len: usize, documents: Documents) -> Result<Windows, DataError> {
    let rows = Rows {
        seq_len,
        vocab: 60_000,
        documents,
    };
    Windows::new(Arc::new(dataset), rows)
}

/// All rows of one epoch, in the order of the data.
fn rows(windows: &Windows) -> Vec<Vec<u32>> {
    let source = Source::Tokens(windows.clone());
    let count = usize::try_from(windows.samples().get()).unwrap();
    let mut batch = Batch::default();
    source.fill(&alone(5, count), 0, &mut batch).unwrap();
    let mut rows: Vec<_> = batch
        .tokens
        .chunks(windows.width())
        .map(<[u32]>::to_vec)
        .collect();
    rows.sort();
    rows
}

#[test]
fn each_format_is_recognised() {
    let dir = fresh();
    let at = |name: &str| dir.path().join(name);
    let llm_c: Vec<u8> = [20_240_520_u32, 1, 9]
        .into_iter()
        .chain([0; 253])
        .flat_map(u32::to_le_bytes)
        .chain(u16s(0..9))
        .collect();
    let name = megatron(dir.path(), &[4, 5]);
    put(&at("nano.bin"), &u16s(0..9));
    put(&at("llm.bin"), &llm_c);
    let own = counting_dataset(dir.path(), 9, 100);
    let nano = Some(Dtype::U16);
    for (path, dtype, documents) in [
        (name, None, Some(2)),
        (at("m.bin"), None, Some(2)),
        (at("m.idx"), nano, Some(2)),
        (at("nano.bin"), nano, None),
        (at("llm.bin"), None, None),
        (own, None, Some(1)),
    ] {
        let dataset = Dataset::open_as(&path, dtype).unwrap();
        assert_eq!(dataset.documents(), documents, "{}", path.display());
        dataset.check(9, &mut CheckedFiles::default()).unwrap();
        let windows = windows(dataset, 8, Documents::Joined).unwrap();
        assert_eq!(rows(&windows), [(0..9).collect::<Vec<_>>()]);
    }
}

#[test]
fn path_without_dataset_and_other_dtype_are_refused_by_name() {
    let dir = fresh();
    let at = |name: &str| put(&dir.path().join(name), &u16s(0..9));
    let refused = |path: &Path, dtype, text: &str| {
        let error = Dataset::open_as(path, dtype).unwrap_err().to_string();
        assert_eq!(error, format!("{}: {text}", path.display()));
    };
    refused(
        &at("a.txt"),
        None,
        "is neither a dataset directory nor a .bin file of ids; spd-launch tokenize makes a dataset of text, \
         JSON lines or parquet",
    );
    refused(
        &at("a.bin"),
        None,
        "bare ids do not say how they are stored; set [data] dtype = \"u16\", as nanoGPT writes them, or \
         \"u32\"",
    );
    refused(&dir.path().join("b.bin"), None, "no such dataset");
    let idx = megatron(dir.path(), &[9]).with_extension("idx");
    refused(
        &idx,
        Some(Dtype::U32),
        "promises u16 ids, the dtype given is u32; leave it out",
    );
    std::fs::remove_file(idx.with_extension("bin")).unwrap();
    let bin = idx.with_extension("bin");
    refused(
        &idx,
        None,
        &format!("has no {} beside it; copy both", bin.display()),
    );
}

#[test]
fn rows_do_not_cross_documents_where_that_is_asked_for() {
    let dir = fresh();
    // By hand: tokens 0..3, 3..9 and 9..14; rows of two and a label fit once, twice (3 4 5, 5 6 7)
    // and twice.
    let name = megatron(dir.path(), &[3, 6, 5]);
    let expected = [[0, 1, 2], [3, 4, 5], [5, 6, 7], [9, 10, 11], [11, 12, 13]];
    let apart = windows(Dataset::open_as(&name, None).unwrap(), 2, Documents::Apart).unwrap();
    assert_eq!(rows(&apart), expected);
    // The same documents by the id that ends them.
    for (dtype, size) in [(Dtype::U16, 2), (Dtype::U32, 4)] {
        let ids = [0_u32, 1, 99, 3, 4, 5, 6, 7, 99, 9, 10, 11, 12, 13];
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|id| id.to_le_bytes()[..size].to_vec())
            .collect();
        let path = put(&dir.path().join(format!("{dtype}.bin")), &bytes);
        let open = || Dataset::open_as(&path, Some(dtype)).unwrap();
        let by_id = windows(open(), 2, Documents::EndWith(99)).unwrap();
        let expected = [[0, 1, 99], [3, 4, 5], [5, 6, 7], [9, 10, 11], [11, 12, 13]];
        assert_eq!(rows(&by_id), expected);
        assert_eq!(
            windows(open(), 2, Documents::Apart)
                .unwrap_err()
                .to_string(),
            format!(
                "{}: does not list where documents end; say which id ends them: [data] document_end = ID",
                path.display()
            )
        );
        assert_eq!(
            windows(open(), 6, Documents::EndWith(99))
                .unwrap_err()
                .to_string(),
            format!(
                "{}: no window of 6 tokens and a label fits a document of a dataset of 14 tokens; use a \
                 smaller seq_len or more text",
                path.display()
            )
        );
    }
}

#[test]
fn the_end_is_held_out_and_each_part_has_an_order_of_its_own() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 201, 1000);
    let whole = windows(Dataset::open_as(&data, None).unwrap(), 2, Documents::Joined).unwrap();
    let [train, eval] = whole.split(0.1).unwrap();
    assert_eq!((train.samples().get(), eval.samples().get()), (90, 10));
    assert_eq!(rows(&eval)[0], [180, 181, 182]);
    assert_eq!([rows(&train), rows(&eval)].concat(), rows(&whole));
    let text = |held_out| whole.split(held_out).unwrap_err().to_string();
    let place = data.join("tokens-00000.safetensors");
    assert_eq!(
        text(0.001),
        format!(
            "{}: held_out = 0.001 of 100 rows of 2 tokens leaves none to evaluate on; use another part, a \
             smaller seq_len or more text",
            place.display()
        )
    );
    assert_eq!(
        text(0.999),
        format!(
            "{}: held_out = 0.999 of 100 rows of 2 tokens leaves none to train on; use another part, a \
             smaller seq_len or more text",
            place.display()
        )
    );
}

#[test]
fn a_document_is_not_in_both_parts() {
    let dir = fresh();
    // 10, 10, 20 and 10 windows of one token and a label.
    let name = megatron(dir.path(), &[11, 11, 21, 11]);
    let whole = windows(Dataset::open_as(&name, None).unwrap(), 1, Documents::Apart).unwrap();
    for (held_out, train) in [(0.95, 10), (0.8, 10), (0.77, 20), (0.3, 40), (0.1, 40)] {
        let [before, after] = whole.split(held_out).unwrap();
        assert_eq!(before.samples().get(), train, "{held_out}");
        assert_eq!(after.samples().get(), 50 - train);
    }
    // The only document is in both parts.
    let name = megatron(dir.path(), &[11]);
    let whole = windows(Dataset::open_as(&name, None).unwrap(), 1, Documents::Apart).unwrap();
    assert_eq!(whole.split(0.3).unwrap()[0].samples().get(), 7);
}

#[test]
fn files_are_the_same_where_their_ids_and_documents_are() {
    let dir = fresh();
    let other = fresh();
    let mut known = CheckedFiles::default();
    let mut of = |path: &Path| {
        let dataset = Dataset::open_as(path, Some(Dtype::U16)).unwrap();
        dataset.fingerprint(&mut known).unwrap()
    };
    let first = of(&megatron(dir.path(), &[4, 5]));
    assert_eq!(of(&megatron(other.path(), &[4, 5])), first);
    assert_ne!(of(&megatron(other.path(), &[5, 4])), first);
    let plain = of(&put(&dir.path().join("a.bin"), &u16s(0..9)));
    assert_ne!(plain, first);
    assert_ne!(of(&put(&dir.path().join("b.bin"), &u16s(1..10))), plain);
    assert_eq!(of(&put(&dir.path().join("c.bin"), &u16s(0..9))), plain);
}
