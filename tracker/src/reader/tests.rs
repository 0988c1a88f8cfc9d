//! A reader beside a writer that continues, ends, resumes from a checkpoint, or is another run.

use std::fs::OpenOptions;
use std::io::Write;
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::{Kind, Spool};

fn train(step: u64) -> Row {
    Row::new(step, Kind::Train).with("loss/total", step as f64)
}

fn open(dir: &Path) -> Reader {
    Reader::of_metrics(dir, &Cursor::default()).unwrap()
}

fn row(read: Option<Read>) -> Option<Row> {
    match read? {
        Read::Row { row, .. } => Some(row),
        Read::RolledBack(start) => panic!("rolled back to {start:?}"),
    }
}

/// A run started with the rows before a mark.
fn start(dir: &Path, mark: &Mark) -> Spool {
    spd_files::atomic::make_dirs(dir).unwrap();
    Spool::start(dir, mark, mark.lines).unwrap()
}

/// All results that are there now; a roll-back as the offset that it goes back to.
fn read_all(reader: &mut Reader) -> Vec<Result<u64, u64>> {
    let mut steps = Vec::new();
    while let Some(read) = reader.next().unwrap() {
        steps.push(match read {
            Read::Row { row, .. } => Ok(row.step),
            Read::RolledBack(start) => Err(start.offset),
        });
    }
    steps
}

fn append(spool: &Spool, steps: std::ops::RangeInclusive<u64>) -> Mark {
    steps.for_each(|step| spool.append(train(step)));
    spool.mark().wait().unwrap()
}

#[test]
fn a_reader_waits_for_the_file_and_for_the_end_of_a_line() {
    let run = tempfile::tempdir().unwrap();
    let mut reader = open(run.path());
    assert_eq!(reader.next().unwrap(), None);
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(run.path().join(METRICS))
        .unwrap();
    assert_eq!(reader.next().unwrap(), None);
    for &byte in &train(7).line() {
        assert_eq!(reader.next().unwrap(), None);
        file.write_all(&[byte]).unwrap();
    }
    assert_eq!(row(reader.next().unwrap()), Some(train(7)));
    assert_eq!(reader.next().unwrap(), None);
}

#[test]
fn a_reader_follows_a_live_writer() {
    let run = tempfile::tempdir().unwrap();
    let dir = run.path();
    thread::scope(|scope| {
        scope.spawn(|| {
            let spool = start(dir, &Mark::default());
            for step in 0..20_000 {
                spool.append(train(step));
                if step % 7000 == 0 {
                    spool.sync().unwrap();
                }
            }
        });
        let mut reader = open(dir);
        let mut step = 0;
        while step < 20_000 {
            match reader.next().unwrap() {
                Some(read) => {
                    assert_eq!(row(Some(read)), Some(train(step)));
                    step += 1;
                }
                None => thread::yield_now(),
            }
        }
        assert_eq!(reader.next().unwrap(), None);
    });
}

#[test]
fn a_reader_goes_on_at_its_mark() {
    let run = tempfile::tempdir().unwrap();
    append(&start(run.path(), &Mark::default()), 1..=3);
    let mut reader = open(run.path());
    reader.next().unwrap();
    let cursor = reader.cursor();
    let mut second = Reader::of_metrics(run.path(), &cursor).unwrap();
    assert_eq!(second.cursor(), cursor);
    assert_eq!(read_all(&mut second), [Ok(2), Ok(3)]);
    let text = serde_json::to_string(&cursor).unwrap();
    assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), cursor);
}

#[test]
fn replaced_rows_are_reported_once_as_many_exist() {
    let run = tempfile::tempdir().unwrap();
    let spool = start(run.path(), &Mark::default());
    let mark = append(&spool, 1..=3);
    append(&spool, 4..=6);
    let mut reader = open(run.path());
    assert_eq!(read_all(&mut reader), [1, 2, 3, 4, 5, 6].map(Ok));
    let before = reader.cursor();

    drop(spool);
    let spool = start(run.path(), &mark);
    assert_eq!(read_all(&mut reader), []);
    append(&spool, 14..=15);
    // A reader that starts meanwhile waits as well.
    assert_eq!(reader.cursor(), before);
    let mut second = Reader::of_metrics(run.path(), &before).unwrap();
    assert_eq!(
        (read_all(&mut reader), read_all(&mut second)),
        (vec![], vec![])
    );
    append(&spool, 16..=17);
    let expected = [Err(mark.offset), Ok(14), Ok(15), Ok(16), Ok(17)];
    assert_eq!(read_all(&mut reader), expected);
    assert_eq!(read_all(&mut second), expected);
    assert_eq!(reader.cursor().generation, 1);
    assert_eq!(reader.mark(), spool.mark().wait().unwrap());
}

#[test]
fn of_several_roll_backs_the_farthest_counts() {
    let run = tempfile::tempdir().unwrap();
    let spool = start(run.path(), &Mark::default());
    let early = append(&spool, 1..=1);
    append(&spool, 2..=6);
    let mut reader = open(run.path());
    read_all(&mut reader);
    let cursor = reader.cursor();
    drop(spool);
    let spool = start(run.path(), &early);
    let late = append(&spool, 12..=13);
    assert_eq!(read_all(&mut reader), []);
    drop(spool);
    append(&start(run.path(), &late), 24..=29);
    let told = [
        Err(early.offset),
        Ok(12),
        Ok(13),
        Ok(24),
        Ok(25),
        Ok(26),
        Ok(27),
        Ok(28),
        Ok(29),
    ];
    assert_eq!(read_all(&mut reader), told);
    let mut next = Reader::of_metrics(run.path(), &cursor).unwrap();
    assert_eq!(read_all(&mut next), told);
}

#[test]
fn another_run_in_the_same_place_is_read_from_its_beginning() {
    let run = tempfile::tempdir().unwrap();
    append(&start(run.path(), &Mark::default()), 1..=6);
    let mut reader = open(run.path());
    read_all(&mut reader);
    std::fs::remove_dir_all(run.path()).unwrap();
    append(&start(run.path(), &Mark::default()), 1..=2);
    assert_eq!(read_all(&mut reader), [Err(0), Ok(1), Ok(2)]);
}

#[test]
fn a_row_has_the_time_at_which_it_was_made_first() {
    let run = tempfile::tempdir().unwrap();
    let times = |steps| {
        let spool = start(run.path(), &Mark::default());
        append(&spool, 1..=steps);
        let mut reader = open(run.path());
        let mut times = Vec::new();
        while let Some(Read::Row { time, .. }) = reader.next().unwrap() {
            times.push(time);
        }
        times
    };
    let first = times(3);
    assert!(first.len() == 3 && first[0] > 1.7e9);
    thread::sleep(std::time::Duration::from_millis(20));
    let again = times(4);
    assert_eq!(again[..3], first);
    assert!(again[3] > first[2]);
}

// The file has as many bytes again, but other rows: its length alone proves nothing.
#[test]
fn a_roll_back_that_has_been_overtaken_is_seen() {
    let run = tempfile::tempdir().unwrap();
    let spool = start(run.path(), &Mark::default());
    let mark = append(&spool, 1..=3);
    append(&spool, 4..=6);
    let mut reader = open(run.path());
    read_all(&mut reader);
    drop(spool);
    append(&start(run.path(), &mark), 14..=19);
    let expected = [
        Err(mark.offset),
        Ok(14),
        Ok(15),
        Ok(16),
        Ok(17),
        Ok(18),
        Ok(19),
    ];
    assert_eq!(read_all(&mut reader), expected);
}

#[test]
fn the_same_rows_written_again_are_read_once() {
    let run = tempfile::tempdir().unwrap();
    let spool = start(run.path(), &Mark::default());
    let mark = append(&spool, 1..=3);
    append(&spool, 4..=6);
    let mut reader = open(run.path());
    read_all(&mut reader);
    assert_eq!(reader.went_back(), None);
    drop(spool);
    let spool = start(run.path(), &mark);
    assert_eq!(read_all(&mut reader), []);
    // A reader that does not wait learns of it at once.
    let went_back = reader.went_back().map(|start| (start.offset, start.step));
    assert_eq!(went_back, Some((mark.offset, 3)));
    append(&spool, 4..=8);
    assert_eq!(read_all(&mut reader), [Ok(7), Ok(8)]);
    assert_eq!(reader.went_back(), None);
}

#[test]
fn a_torn_line_that_is_cut_was_never_read() {
    let run = tempfile::tempdir().unwrap();
    append(&start(run.path(), &Mark::default()), 1..=2);
    let mut file = OpenOptions::new()
        .append(true)
        .open(run.path().join(METRICS))
        .unwrap();
    file.write_all(b"{\"step\":3,\"ki").unwrap();
    let mut reader = open(run.path());
    assert_eq!(read_all(&mut reader), [Ok(1), Ok(2)]);
    append(&start(run.path(), &reader.mark()), 4..=4);
    assert_eq!(read_all(&mut reader), [Ok(4)]);
}

#[test]
fn a_roll_back_while_nobody_read_is_known_from_the_starts() {
    let run = tempfile::tempdir().unwrap();
    let spool = start(run.path(), &Mark::default());
    let mark = append(&spool, 1..=1);
    append(&spool, 2..=3);
    let mut reader = open(run.path());
    read_all(&mut reader);
    drop(spool);
    append(&start(run.path(), &mark), 12..=13);
    let mut next = Reader::of_metrics(run.path(), &reader.cursor()).unwrap();
    assert_eq!(read_all(&mut next), [Err(mark.offset), Ok(12), Ok(13)]);
}

#[test]
fn rows_of_a_damaged_file_that_were_read_stay_read() {
    // The number of rows that a reader has read, including damaged rows and rows after the
    // checkpoint.
    for (read, alive) in (0..=6).flat_map(|read| [(read, true), (read, false)]) {
        let run = tempfile::tempdir().unwrap();
        let spool = start(run.path(), &Mark::default());
        let mark = append(&spool, 0..=3);
        append(&spool, 4..=5);
        drop(spool);
        let mut reader = open(run.path());
        for step in 0..read {
            assert_eq!(row(reader.next().unwrap()).unwrap().step, step);
        }
        let path = run.path().join(METRICS);
        let mut rows = std::fs::read(&path).unwrap();
        rows[usize::try_from(mark.offset).unwrap() / 2 + 1] ^= 0x80;
        spd_files::atomic::write_file(&path, &[&rows]).unwrap();
        let cursor = reader.cursor();
        let spool = start(run.path(), &mark);
        if !alive {
            reader = Reader::of_metrics(run.path(), &cursor).unwrap();
        }
        append(&spool, 4..=4);
        // A reader ahead of the file waits, and another one continues at the given place.
        if read == 6 {
            assert_eq!((reader.next().unwrap(), reader.cursor()), (None, cursor));
        }
        append(&spool, 5..=7);
        // A reader that stays alive has the row from before.
        let has_it = read > 2 || alive && read > 0;
        let expected: Vec<u64> = (read..=7).filter(|&step| step != 2 || has_it).collect();
        let found: Vec<u64> = read_all(&mut reader)
            .into_iter()
            .map(Result::unwrap)
            .collect();
        assert_eq!(found, expected, "{read}");
        assert!(reader.is_proven());
        let mut next = Reader::of_metrics(run.path(), &reader.cursor()).unwrap();
        append(&spool, 8..=8);
        assert_eq!(read_all(&mut next), [Ok(8)]);
    }
}

#[test]
fn junk_is_named_by_its_line_and_skipped() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join(METRICS);
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .unwrap();
    file.write_all(&[train(1).line(), b"{\xff}\n".to_vec(), train(2).line()].concat())
        .unwrap();
    let mut reader = open(run.path());
    assert_eq!(row(reader.next().unwrap()), Some(train(1)));
    assert_eq!(
        reader.next().unwrap_err().to_string(),
        format!(
            "{}: line 2 is no row: key must be a string at line 1 column 2; it is skipped",
            path.display()
        )
    );
    assert_eq!(row(reader.next().unwrap()), Some(train(2)));
}

#[test]
fn a_file_without_lines_is_refused_before_memory_is_full() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join(METRICS);
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .unwrap();
    file.set_len(1 << 40).unwrap();
    let mut reader = open(run.path());
    for _ in 0..2 {
        assert_eq!(
            reader.next().unwrap_err().to_string(),
            format!(
                "{}: line 1 is longer than 16777216 bytes; is this a metrics spool?",
                path.display()
            )
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_bytes_are_rows_or_errors(
        pieces in prop::collection::vec(
            prop_oneof![
                any::<Vec<u8>>(),
                any::<u64>().prop_map(|step| train(step).line()),
                Just(b"\n".to_vec()),
            ],
            0..20,
        ),
    ) {
        let run = tempfile::tempdir().unwrap();
        let junk = pieces.concat();
        let mut file =
            OpenOptions::new().create(true).append(true).open(run.path().join(METRICS)).unwrap();
        file.write_all(&junk).unwrap();
        let mut reader = open(run.path());
        let mut lines = Vec::new();
        loop {
            match reader.next() {
                Ok(None) => break,
                Ok(Some(Read::Row { row, .. })) => lines.push(Ok(row)),
                Ok(Some(Read::RolledBack(_))) => prop_assert!(false, "nobody cut"),
                Err(error) => lines.push(Err(error.to_string())),
            }
        }
        let expected: Vec<&[u8]> = junk.split_inclusive(|&byte| byte == b'\n').collect();
        let whole = expected.iter().filter(|line| line.ends_with(b"\n")).count();
        prop_assert_eq!(lines.len(), whole);
        for (line, bytes) in lines.iter().zip(expected) {
            prop_assert_eq!(line.is_ok(), Row::parse(bytes).is_ok());
        }
    }
}
