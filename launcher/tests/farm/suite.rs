//! A suite: cases of one kind, as many at a time as there are cores, and the table of their
//! results.

use std::collections::BTreeMap;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::random::Random;

/// The seed of the cases, unless `SPD_FARM_SEED` names one.
const SEED: u64 = 13;

/// One suite at a time: each uses all cores, and tables must not interleave.
static TURN: Mutex<()> = Mutex::new(());

pub(crate) struct Suite {
    /// The module's name, by which `cargo test` finds it.
    pub(crate) name: &'static str,
    /// Cases at scale 1.
    pub(crate) cases: u32,
    /// The counters of a case, in the order of the table.
    pub(crate) columns: &'static [&'static str],
}

/// A case: a directory, random numbers, and results.
pub(crate) struct Case {
    pub(crate) number: u32,
    pub(crate) random: Random,
    /// Every launch with its end, for a fault report.
    pub(crate) launches: Vec<String>,
    dir: TempDir,
    kind: String,
    counts: BTreeMap<&'static str, u32>,
}

impl Case {
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Sets the kind of the case: its row of the table.
    pub(crate) fn kind(&mut self, kind: impl Into<String>) {
        self.kind = kind.into();
    }

    /// Increments a column of the table.
    pub(crate) fn count(&mut self, column: &'static str) {
        *self.counts.entry(column).or_default() += 1;
    }
}

/// The results of the cases of one kind, by column.
#[derive(Default, Clone)]
struct Row {
    tried: u32,
    counts: BTreeMap<&'static str, u32>,
    faults: u32,
}

#[derive(Default)]
struct Tally {
    rows: BTreeMap<String, Row>,
    faults: Vec<String>,
}

impl Tally {
    fn tried(&self) -> u32 {
        self.rows.values().map(|row| row.tried).sum()
    }
}

impl Suite {
    /// Runs every case, prints the table, and fails if a case found a fault.
    ///
    /// - `try_case`: returns the fault
    pub(crate) fn run(&self, try_case: impl Fn(&mut Case) -> Result<(), String> + Sync) {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = variable("SPD_FARM_SEED").unwrap_or(SEED);
        let scale: f64 = variable("SPD_FARM_SCALE").unwrap_or(1.0);
        let cases = (1..)
            .take_while(|&cases| f64::from(cases) <= f64::from(self.cases) * scale)
            .last()
            .unwrap_or(1);
        let minutes: Option<f64> = variable("SPD_FARM_MINUTES");
        let cases = match (variable("SPD_FARM_CASE"), minutes) {
            (Some(case), _) => case..case + 1,
            (None, Some(_)) => 0..u32::MAX,
            (None, None) => 0..cases,
        };
        let limit = minutes.map_or(Duration::MAX, |minutes| {
            Duration::from_secs_f64(60.0 * minutes)
        });
        let (next, harvest) = (AtomicU32::new(cases.start), Mutex::new(Tally::default()));
        let started = Instant::now();
        let work = || loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= cases.end || started.elapsed() >= limit {
                return;
            }
            let mut case = Case {
                number,
                random: Random::new(seed, self.name, number),
                launches: vec![],
                dir: tempfile::tempdir().unwrap(),
                kind: "?".to_owned(),
                counts: BTreeMap::new(),
            };
            let found = catch_unwind(AssertUnwindSafe(|| try_case(&mut case)))
                .unwrap_or_else(|_| Err("the farm itself panicked, see above".to_owned()));
            self.gather(&mut harvest.lock().unwrap(), case, found, seed);
        };
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, Into::into) {
                scope.spawn(work);
            }
        });
        let harvest = harvest.into_inner().unwrap();
        print!("\n{}", harvest.faults.concat());
        println!(
            "{}: seed {seed}, {} cases in {:.0} s\n{}",
            self.name,
            harvest.tried(),
            started.elapsed().as_secs_f64(),
            self.table(&harvest)
        );
        assert!(
            harvest.faults.is_empty(),
            "{}: {} faults, above",
            self.name,
            harvest.faults.len()
        );
    }

    fn gather(&self, harvest: &mut Tally, case: Case, found: Result<(), String>, seed: u64) {
        let row = harvest.rows.entry(case.kind.clone()).or_default();
        row.tried += 1;
        for (column, count) in case.counts {
            assert!(self.columns.contains(&column), "{column} is no column");
            *row.counts.entry(column).or_default() += count;
        }
        let Err(fault) = found else {
            return;
        };
        row.faults += 1;
        harvest.faults.push(format!(
            "FAULT in {} {}, {}: {fault}\n  again: SPD_FARM_SEED={seed} SPD_FARM_CASE={} cargo test --release \
             -p spd-launch --test farm -- --ignored --nocapture {}::\n  files: {}\n{}\n",
            self.name,
            case.number,
            case.kind,
            case.number,
            self.name,
            case.dir.keep().display(),
            case.launches.concat()
        ));
    }

    fn table(&self, harvest: &Tally) -> String {
        let mut all = Row::default();
        for row in harvest.rows.values() {
            all.tried += row.tried;
            all.faults += row.faults;
            for (column, count) in &row.counts {
                *all.counts.entry(column).or_default() += count;
            }
        }
        let kinds = harvest.rows.keys().map(String::as_str).chain(["all"]);
        let width = kinds.map(|kind| kind.chars().count()).max().unwrap_or(0);
        let mut text = format!("  {:width$}  tried", "");
        for column in self.columns {
            text.push_str(&format!("  {column}"));
        }
        text.push_str("  faults\n");
        let rows = harvest.rows.iter().map(|(kind, row)| (kind.as_str(), row));
        for (kind, row) in rows.chain([("all", &all)]) {
            text.push_str(&format!("  {kind:width$}  {:5}", row.tried));
            for column in self.columns {
                let count = row.counts.get(column).copied().unwrap_or(0);
                text.push_str(&format!("  {count:width$}", width = column.len()));
            }
            text.push_str(&format!("  {:6}\n", row.faults));
        }
        text
    }
}

fn variable<T: FromStr>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    let value = text.parse().ok();
    assert!(value.is_some(), "{name}: {text:?} is no number");
    value
}
