//! Runs that are killed at any moment and roll back to any step, with a server that loses answers,
//! fails and loses runs.

use spd_testing::mutation::{Dice, rounds};

use super::fake::{Fake, Fault};
use super::*;

/// A run and the driver of a sink.
struct Story {
    fake: Fake,
    scratch: Scratch,
    dice: Dice,
    /// The rows that hold, with their times. All values differ.
    rows: Vec<Stamped>,
    values: u32,
    step: u64,
    /// Rows that were sent, by the written state.
    sent: usize,
    /// Rows that may have been sent; written before they are sent.
    tried: usize,
    starts: u64,
}

impl Story {
    fn train(&mut self) {
        for _ in 0..=self.dice.below(5) {
            self.values += 1;
            let row = Row::new(self.step, Kind::Train).with("loss", f64::from(self.values));
            let time = BEGUN + f64::from(self.values);
            self.rows.push(Stamped { row, time });
            self.step += 1 + self.dice.below(3) as u64;
        }
    }

    /// Adds a fault to one of the next requests.
    fn fail(&mut self) {
        let calls = [
            "log-batch",
            "runs/create",
            "runs/get",
            "runs/search",
            "runs/update",
            "config.json",
        ];
        let call = *self.dice.one(&calls);
        let fault = match self.dice.below(3) {
            0 => Fault::Answer(503, String::new()),
            1 => Fault::Answer(429, String::new()),
            _ => Fault::LostAnswer,
        };
        self.fake.fail(call, fault);
    }

    /// Calls `open` until it succeeds, as after a kill.
    fn open(&mut self) {
        self.scratch.restart();
        for _ in 0..100 {
            match self.scratch.open() {
                Ok(true) => return (self.sent, self.tried) = (0, 0),
                Ok(false) => return,
                Err(found) => assert!(matches!(found, Refusal::Later { .. }), "{found:?}"),
            }
        }
        panic!("100 tries");
    }

    fn send(&mut self) {
        let more = 1 + self.dice.below(6);
        let end = self.rows.len().min(self.sent + more);
        self.tried = self.tried.max(end);
        let rows = self.rows[self.sent..end].to_vec();
        let state = self.scratch.state.clone();
        match self.scratch.send(&rows) {
            // The process is killed before the state is written.
            Ok(()) if self.dice.below(5) == 0 => {
                self.scratch.state = state;
                self.open();
            }
            Ok(()) => self.sent = end,
            Err(Refusal::Later { .. }) => {}
            Err(Refusal::Gone { .. }) => self.open(),
            Err(found) => panic!("{found:?}"),
        }
    }

    fn go_back(&mut self) {
        self.starts += 1;
        let kept = self.dice.below(self.rows.len() + 1);
        let Some(row) = self.rows.get(kept) else {
            return;
        };
        self.step = row.row.step;
        self.rows.truncate(kept);
        let mut tries = 0;
        // Rows whose answer was lost are there too.
        while self.tried > kept {
            tries += 1;
            assert!(tries < 100);
            let state = self.scratch.state.clone();
            match self.scratch.roll_back(self.starts) {
                Ok(After::FromStart) if self.dice.below(4) == 0 => {
                    self.scratch.state = state;
                    self.open();
                }
                Ok(After::FromStart) => (self.sent, self.tried) = (0, 0),
                Err(Refusal::Later { .. }) => {}
                found => panic!("{found:?}"),
            }
        }
    }

    fn delete(&mut self) {
        let mut kept = self.fake.kept();
        if let Some(run) = kept.runs.get_mut(&self.scratch.state.run) {
            run.deleted = true;
        }
    }
}

#[test]
fn every_row_is_stored_once_for_any_faults() {
    for seed in rounds(40) {
        let fake = Fake::new();
        let scratch = Scratch::new(&fake.uri);
        let mut story = Story {
            fake,
            scratch,
            dice: Dice::new(seed),
            rows: Vec::new(),
            values: 0,
            step: 0,
            sent: 0,
            tried: 0,
            starts: 0,
        };
        story.open();
        for _ in 0..30 {
            match story.dice.below(12) {
                0..3 => story.train(),
                3..6 => story.send(),
                6..9 => story.fail(),
                9 => story.go_back(),
                10 => story.open(),
                _ if story.dice.below(4) == 0 => story.delete(),
                _ => {}
            }
        }
        let mut tries = 0;
        while story.sent < story.rows.len() {
            story.send();
            tries += 1;
            assert!(tries < 1000, "seed {seed}");
        }
        let rows = story.rows.iter().map(|row| {
            let value = row.row.number("loss").unwrap();
            (row.row.step, format!("{value:?}"))
        });
        let rows: Vec<(u64, String)> = rows.collect();
        let kept = story.fake.kept();
        let run = kept.runs.get(&story.scratch.state.run);
        let mut found = run.map(|run| run.history("loss")).unwrap_or_default();
        found.sort();
        let mut expected = rows;
        expected.sort();
        assert_eq!(found, expected, "seed {seed}");
    }
}
