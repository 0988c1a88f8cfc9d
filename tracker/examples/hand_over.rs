//! The cost of appending a row for the training thread: `cargo run --release -p spd-tracker
//! --example hand_over`.
#![expect(clippy::print_stdout, reason = "it prints what it measured")]

use std::time::{Duration, Instant};

use spd_tracker::{Kind, Mark, Row, Spool};

/// Rows that are appended.
const ROWS: u64 = 20_000;

/// Values of a row.
const VALUES: usize = 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let spool = Spool::start(dir.path(), &Mark::default(), 0)?;
    let mut times = Vec::new();
    for step in 0..ROWS {
        let row = (0..VALUES).fold(Row::new(step, Kind::Train), |row, value| {
            row.with(format!("loss/term_{value}"), 1.0 / (step + 1) as f64)
        });
        let clock = Instant::now();
        spool.append(row);
        times.push(clock.elapsed());
        std::thread::sleep(Duration::from_micros(200));
    }
    times.sort_unstable();
    let at = |permille: usize| times[(times.len() - 1) * permille / 1000];
    println!(
        "{ROWS} rows of {VALUES} values: median {:?}, p99 {:?}, p99.9 {:?}, max {:?}",
        at(500),
        at(990),
        at(999),
        at(1000)
    );
    Ok(())
}
