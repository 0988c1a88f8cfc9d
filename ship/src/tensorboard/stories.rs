//! Runs that are killed at any moment and roll back to any step, with readers beside them.

use std::fs::OpenOptions;
use std::path::PathBuf;

use spd_files::atomic;
use spd_testing::mutation::{Dice, rounds};
use spd_tracker::Row;

use super::event::{self, Held};
use super::tests::{Scratch, wait};
use super::*;

/// A reader that runs all the time, as TensorBoard does: it reads each file to its end, then the
/// next, and none again.
#[derive(Default)]
struct Reader {
    file: Option<PathBuf>,
    events: usize,
    found: Vec<(i64, f32)>,
}

impl Reader {
    fn read(&mut self, files: &[PathBuf]) {
        loop {
            if let Some(file) = &self.file {
                let bytes = spd_files::read(file).unwrap_or_default();
                let events = event::read(&bytes);
                for event in events.into_iter().skip(self.events) {
                    self.events += 1;
                    if event.session_log.is_some() {
                        self.found.retain(|(step, _)| *step < event.step);
                    }
                    let values = event.summary.into_iter().flat_map(|summary| summary.values);
                    for value in values {
                        if let Some(Held::Scalar(value)) = value.held {
                            self.found.push((event.step, value));
                        }
                    }
                }
            }
            let Some(next) = files.iter().find(|file| Some(*file) > self.file.as_ref()) else {
                return;
            };
            (self.file, self.events) = (Some(next.clone()), 0);
        }
    }
}

/// A run and the driver of a sink.
struct Story {
    scratch: Scratch,
    dice: Dice,
    /// The rows that hold. All values differ.
    rows: Vec<(u64, f32)>,
    /// Number of values so far.
    values: u16,
    /// The next step of the run.
    step: u64,
    /// Rows that were sent, by the written state.
    sent: usize,
    reader: Reader,
}

impl Story {
    fn train(&mut self) {
        for _ in 0..=self.dice.below(5) {
            self.values += 1;
            self.rows.push((self.step, self.values.into()));
            self.step += 1 + self.dice.below(3) as u64;
        }
    }

    /// Kills the process in the middle of a write, or before the state is written.
    fn end(&mut self, state: State) {
        self.scratch.state = state;
        if let Some(path) = self.scratch.files().last()
            && self.dice.below(2) == 0
        {
            let bytes = spd_files::read(path).unwrap();
            let torn = self.dice.below(40).min(bytes.len()) as u64;
            // Bytes of the written state are on disk.
            let kept = (bytes.len() as u64 - torn).max(self.scratch.state.metrics.kept_of(path));
            let file = spd_files::open_with(OpenOptions::new().write(true), path).unwrap();
            file.set_len(kept).unwrap();
        }
        if self.scratch.restart() {
            self.sent = 0;
        }
    }

    fn send(&mut self) {
        let more = 1 + self.dice.below(6);
        let rows = self.rows[self.sent..].iter().take(more);
        let rows: Vec<Stamped> = rows
            .map(|&(step, value)| Stamped {
                row: Row::new(step, Kind::Train).with("loss", f64::from(value)),
                time: 1_795_000_000.0,
            })
            .collect();
        let state = self.scratch.state.clone();
        self.scratch.send(&rows);
        self.look();
        if self.dice.below(4) == 0 {
            self.end(state);
        } else {
            self.sent += rows.len();
        }
    }

    fn go_back(&mut self) {
        let kept = self.dice.below(self.rows.len() + 1);
        let Some(&(step, _)) = self.rows.get(kept) else {
            return;
        };
        self.rows.truncate(kept);
        self.step = step;
        while self.sent > kept {
            let state = self.scratch.state.clone();
            self.scratch.roll_back(step);
            self.look();
            if self.dice.below(4) == 0 {
                self.end(state);
            } else {
                self.sent = 0;
            }
        }
    }

    /// Lets the reader read, or not.
    fn look(&mut self) {
        if self.dice.below(2) == 0 {
            self.reader.read(&self.scratch.files());
        }
    }
}

#[test]
fn every_reader_has_every_row_once_whenever_a_run_ends() {
    for seed in rounds(100) {
        let mut story = Story {
            scratch: Scratch::new(),
            dice: Dice::new(seed),
            rows: Vec::new(),
            values: 0,
            step: 0,
            sent: 0,
            reader: Reader::default(),
        };
        story.scratch.open().unwrap();
        for _ in 0..30 {
            match story.dice.below(8) {
                0..3 => story.train(),
                3..6 => story.send(),
                6 => story.go_back(),
                _ => story.end(story.scratch.state.clone()),
            }
            story.look();
        }
        while story.sent < story.rows.len() {
            story.send();
        }
        let rows: Vec<(i64, f32)> = story
            .rows
            .iter()
            .map(|&(step, value)| (i64::try_from(step).unwrap(), value))
            .collect();
        assert_eq!(story.scratch.loss(), rows, "seed {seed}");
        story.reader.read(&story.scratch.files());
        assert_eq!(
            story.reader.found, rows,
            "seed {seed}, by who read all the time"
        );
    }
}

#[test]
fn a_clock_that_is_put_back_makes_no_older_file() {
    let mut scratch = Scratch::new();
    let later = "events.out.tfevents.9000000000.somewhere.1";
    let dir = scratch.dir.path().join("tensorboard");
    std::fs::create_dir(&dir).unwrap();
    atomic::write_file(&dir.join(later), &[b""]).unwrap();
    let run = scratch.run();
    wait(scratch.sink.open(&run, &mut scratch.state)).unwrap();
    let files = scratch.files();
    let names: Vec<&str> = files
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap())
        .collect();
    let expected = format!(
        "events.out.tfevents.9000000001.node-7-example.{}",
        std::process::id()
    );
    assert_eq!(names, [expected]);
}
