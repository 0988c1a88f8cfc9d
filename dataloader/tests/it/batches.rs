//! Batches of a run: order, resume, ranks, windows.

use std::fs::OpenOptions;
use std::sync::Arc;

use spd_dataloader::{
    Ahead, Batch, CheckedFiles, DataError, Dataset, Dtype, Features, Feed, Loader, Shard, Source,
};

use crate::{alone, counting_dataset, fresh, put, token_source};

fn counting_source(tokens: usize, shard_tokens: usize, seq_len: usize) -> Source {
    let dir = fresh();
    let dataset =
        Dataset::open_as(&counting_dataset(dir.path(), tokens, shard_tokens), None).unwrap();
    // Open files stay readable after the directory is removed.
    token_source(Arc::new(dataset), seq_len, 256).unwrap()
}

fn ahead(batches: usize, threads: usize) -> Ahead {
    Ahead { batches, threads }
}

fn both_sources() -> [Source; 2] {
    [
        counting_source(1000, 300, 7),
        Source::Features(Features::new(5, 0.3, -1.0, 1.0).unwrap()),
    ]
}

fn fill(source: &Source, feed: &Feed, position: u64) -> Batch {
    let mut batch = Batch::default();
    source.fill(feed, position, &mut batch).unwrap();
    batch
}

/// The rows of a batch, one after the other, as bits.
fn bits(batch: &Batch) -> Vec<u32> {
    let features = batch.features.iter().map(|x| x.to_bits());
    batch.tokens.iter().copied().chain(features).collect()
}

#[test]
fn a_resumed_run_sees_the_rows_it_would_have_seen() {
    for source in both_sources() {
        let mut straight = Loader::spawn(source.clone(), alone(9, 6), 0, ahead(2, 1)).unwrap();
        for number in 0..60 {
            let batch = straight.next().unwrap();
            assert_eq!(batch.position, 6 * number);
            let mut resumed =
                Loader::spawn(source.clone(), alone(9, 6), batch.position, ahead(3, 2)).unwrap();
            assert_eq!(resumed.next().unwrap(), batch);
            straight.recycle(batch);
        }
    }
}

#[test]
fn batch_size_depth_threads_and_ranks_change_no_row() {
    for source in both_sources() {
        let expected: Vec<u32> = bits(&fill(&source, &alone(4, 240), 0));
        for (rows, depth, threads, world) in [
            (1, 1, 1, 1),
            (1, 64, 8, 1),
            (4, 2, 3, 1),
            (8, 4, 8, 2),
            (12, 3, 2, 5),
            (240, 1, 1, 3),
        ] {
            let mut ranks: Vec<Loader> = (0..world)
                .map(|rank| {
                    let feed = Feed {
                        seed: 4,
                        rows,
                        shard: Shard { rank, world },
                    };
                    Loader::spawn(source.clone(), feed, 0, ahead(depth, threads)).unwrap()
                })
                .collect();
            let mut seen = Vec::new();
            for _ in 0..240 / rows {
                for loader in &mut ranks {
                    let batch = loader.next().unwrap();
                    seen.extend(bits(&batch));
                    loader.recycle(batch);
                }
            }
            assert_eq!(
                seen, expected,
                "{rows} rows, depth {depth}, {threads} threads, {world} ranks"
            );
        }
    }
}

#[test]
fn a_rank_knows_which_rows_of_the_batch_it_holds() {
    let source = counting_source(1000, 1000, 9);
    let feed = Feed {
        seed: 0,
        rows: 7,
        shard: Shard { rank: 1, world: 3 },
    };
    let batch = fill(&source, &feed, 14);
    assert_eq!((batch.position, batch.first_row, batch.rows), (14, 2, 2));
    assert_eq!(batch.tokens.len(), 2 * 10);
}

// By hand: 25 tokens in shards of 10, 10 and 5 are 2, 2 and 1 windows of 4 tokens and a label.
#[test]
fn an_epoch_reads_every_window_once_and_none_crosses_a_shard() {
    let source = counting_source(25, 10, 4);
    let mut windows: Vec<Vec<u32>> = fill(&source, &alone(1, 5), 0)
        .tokens
        .chunks(5)
        .map(<[u32]>::to_vec)
        .collect();
    windows.sort();
    let expected: Vec<Vec<u32>> = [0, 4, 10, 14, 20]
        .iter()
        .map(|&first| (first..first + 5).collect())
        .collect();
    assert_eq!(windows, expected);
    let next_epoch = fill(&source, &alone(1, 5), 5);
    let mut firsts: Vec<u32> = next_epoch
        .tokens
        .chunks(5)
        .map(|window| window[0])
        .collect();
    firsts.sort_unstable();
    assert_eq!(firsts, [0, 4, 10, 14, 20]);
}

#[test]
fn plain_files_are_read_as_the_dtype_that_was_given() {
    let dir = fresh();
    let words: Vec<u8> = (100..121_u16).flat_map(u16::to_le_bytes).collect();
    let wide: Vec<u8> = (100..121_u32).flat_map(u32::to_le_bytes).collect();
    let mut header: Vec<u8> = [20_240_520_u32, 1, 21]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    header.resize(1024, 0);
    let files = [
        (put(&dir.path().join("nano.bin"), &words), Dtype::U16),
        (put(&dir.path().join("wide.bin"), &wide), Dtype::U32),
        (
            put(&dir.path().join("llm.bin"), &[header, words].concat()),
            Dtype::U16,
        ),
    ];
    for (path, dtype) in files {
        let dataset = Dataset::open_as(&path, Some(dtype)).unwrap();
        assert_eq!(
            (dataset.tokens(), dataset.vocab_size(), dataset.documents()),
            (21, None, None)
        );
        dataset
            .check(u32::MAX, &mut CheckedFiles::default())
            .unwrap();
        let source = token_source(Arc::new(dataset), 20, 121).unwrap();
        let batch = fill(&source, &alone(0, 1), 0);
        assert_eq!(
            batch.tokens,
            (100..121).collect::<Vec<_>>(),
            "{}",
            path.display()
        );
    }
}

#[test]
fn an_id_equal_to_the_vocabulary_is_refused_with_its_place() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 200, 120);
    let source = token_source(Arc::new(Dataset::open_as(&data, None).unwrap()), 79, 199).unwrap();
    let mut batch = Batch::default();
    // Two windows: the second shard has tokens 120 to 199.
    let error = source.fill(&alone(0, 2), 0, &mut batch).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{}: token 79 is 199, but the vocabulary has 199 ids; was the text tokenized for another model?",
            data.join("tokens-00001.safetensors").display()
        )
    );
}

#[test]
fn u16_read_as_u32_is_refused_by_its_first_batch() {
    let dir = fresh();
    let words: Vec<u8> = (1..5000_u16)
        .chain([0])
        .flat_map(u16::to_le_bytes)
        .collect();
    let path = put(&dir.path().join("train.bin"), &words);
    let source = token_source(
        Arc::new(Dataset::open_as(&path, Some(Dtype::U32)).unwrap()),
        2499,
        50_257,
    )
    .unwrap();
    assert_eq!(
        source
            .fill(&alone(0, 1), 0, &mut Batch::default())
            .unwrap_err()
            .to_string(),
        format!(
            "{}: token 0 is 131073, but the vocabulary has 50257 ids; it would be two ids of u16: was u32 \
             the right dtype?",
            path.display()
        )
    );
}

#[test]
fn a_shard_that_shrinks_while_it_is_read_is_an_error_and_no_signal() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 100_000, 100_000);
    let source = token_source(Arc::new(Dataset::open_as(&data, None).unwrap()), 64, 256).unwrap();
    let mut loader = Loader::spawn(source, alone(0, 4), 0, ahead(1, 1)).unwrap();
    loader.next().unwrap();
    let shard = data.join("tokens-00000.safetensors");
    OpenOptions::new()
        .write(true)
        .open(&shard)
        .unwrap()
        .set_len(5000)
        .unwrap();
    let error = (0..4).find_map(|_| loader.next().err()).unwrap();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("{}: had 2", shard.display())),
        "{text}"
    );
    assert!(
        text.ends_with(
            "bytes when it was opened, has 5000 now; restore it, and replace files in use by renaming, \
             never in place"
        ),
        "{text}"
    );
    assert!(matches!(loader.next(), Err(DataError::Stopped)));
}

#[test]
fn a_shard_that_is_cut_at_any_moment_is_an_error_or_gives_the_right_rows() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 200_000, 200_000);
    let shard = data.join("tokens-00000.safetensors");
    let open = || token_source(Arc::new(Dataset::open_as(&data, None).unwrap()), 64, 256).unwrap();
    let whole = std::fs::read(&shard).unwrap();
    let expected: Vec<_> = (0..200)
        .map(|n| fill(&open(), &alone(0, 4), 4 * n))
        .collect();
    for round in 0..20_u32 {
        let source = open();
        let mut loader = Loader::spawn(source.clone(), alone(0, 4), 0, ahead(4, 2)).unwrap();
        let cutter = std::thread::spawn({
            let shard = shard.clone();
            move || {
                std::thread::sleep(std::time::Duration::from_micros(u64::from(37 * round)));
                let file = OpenOptions::new().write(true).open(&shard).unwrap();
                file.set_len(u64::from(1000 * round)).unwrap();
            }
        });
        for batch in &expected {
            match loader.next() {
                Ok(found) => assert_eq!(&found, batch),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.starts_with(&shard.display().to_string()), "{text}");
                    break;
                }
            }
        }
        cutter.join().unwrap();
        drop(loader);
        put(&shard, &whole);
        // The time of change is another one now: the file must be opened again to be read.
        let error = source
            .fill(&alone(0, 4), 0, &mut Batch::default())
            .unwrap_err();
        assert!(
            error
                .to_string()
                .contains(": was written to while it was read; "),
            "{error}"
        );
    }
}

#[test]
fn a_shard_that_is_cut_at_any_byte_is_an_error_for_every_thread_that_reads_it() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 20_000, 20_000);
    let shard = data.join("tokens-00000.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    let had = format!(
        "{}: had {} bytes when it was opened, has ",
        shard.display(),
        whole.len()
    );
    let pages = (0..whole.len()).step_by(4096);
    for end in (1..whole.len()).step_by(397).chain(pages) {
        let source =
            token_source(Arc::new(Dataset::open_as(&data, None).unwrap()), 64, 256).unwrap();
        // Pages that are in memory before the cut, and pages that are not.
        if end % 2 == 0 {
            fill(&source, &alone(0, 200), 0);
        }
        let file = OpenOptions::new().write(true).open(&shard).unwrap();
        file.set_len(end as u64).unwrap();
        std::thread::scope(|scope| {
            let reads = (0..4).map(|number| {
                let source = &source;
                let read = move || {
                    let mut batch = Batch::default();
                    source.fill(&alone(number, 300), 0, &mut batch)
                };
                scope.spawn(read)
            });
            for read in reads.collect::<Vec<_>>() {
                let line = read.join().unwrap().unwrap_err().to_string();
                assert!(line.starts_with(&format!("{had}{end} now; ")), "{line}");
            }
        });
        let mut loader = Loader::spawn(source, alone(0, 4), 0, ahead(2, 3)).unwrap();
        let line = loader.next().unwrap_err().to_string();
        assert!(line.starts_with(&format!("{had}{end} now; ")), "{line}");
        put(&shard, &whole);
    }
}

#[test]
fn a_shard_whose_name_another_file_takes_is_read_to_the_end() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 1000, 1000);
    let source = token_source(Arc::new(Dataset::open_as(&data, None).unwrap()), 9, 256).unwrap();
    let before = fill(&source, &alone(0, 100), 0);
    let shard = data.join("tokens-00000.safetensors");
    let other = put(&data.join("other"), &[0; 3000]);
    std::fs::rename(other, shard).unwrap();
    assert_eq!(fill(&source, &alone(0, 100), 0), before);
}

#[test]
fn a_window_longer_than_every_shard_is_refused() {
    let dir = fresh();
    let data = counting_dataset(dir.path(), 30, 10);
    let dataset = Arc::new(Dataset::open_as(&data, None).unwrap());
    assert_eq!(
        token_source(Arc::clone(&dataset), 10, 256)
            .unwrap_err()
            .to_string(),
        format!(
            "{}: no window of 10 tokens and a label fits a dataset of 30 tokens; use a smaller seq_len or \
             more text",
            data.join("tokens-00000.safetensors").display()
        )
    );
    assert_eq!(
        token_source(dataset, 0, 256).unwrap_err().to_string(),
        "windows of 0 tokens were asked for; seq_len is at least 1"
    );
}
