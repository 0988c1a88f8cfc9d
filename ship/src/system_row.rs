//! Names and steps of rows of [`Kind::System`](spd_tracker::Kind::System) at trackers.

use crate::run::RunInfo;
use crate::sink::Stamped;

/// Prefix of samples of the machine.
const MACHINE: &str = "system/";

/// Values that are left out: the time, which every row has, and the length of a phase.
const LEFT_OUT: [&str; 2] = ["time", "steps"];

/// The step at a tracker: seconds since the run's first start for samples of the machine, otherwise
/// the row's own step.
pub(crate) fn step(run: &RunInfo, row: &Stamped) -> u64 {
    if row
        .row
        .values
        .iter()
        .any(|(name, _)| name.starts_with(MACHINE))
    {
        return seconds(row.time - run.started);
    }
    row.row.step
}

/// Names and numbers. A name is `system/`, then the phase if the row has one, then the name of the
/// value.
pub(crate) fn numbers(row: &Stamped) -> impl Iterator<Item = (String, f64)> {
    let part = row.row.note.as_ref();
    let part = part.map_or_else(String::new, |note| format!("{note}/"));
    let numbers = row.row.numbers();
    let told = numbers.filter(|(name, _)| !LEFT_OUT.contains(name));
    told.map(move |(name, value)| match name.strip_prefix(MACHINE) {
        Some(rest) => (format!("{MACHINE}{rest}"), value),
        None => (format!("{MACHINE}{part}{name}"), value),
    })
}

/// Whole seconds; 0 if the clock went back.
fn seconds(elapsed: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(elapsed).map_or(0, |elapsed| elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use spd_tracker::{Kind, Row};

    use super::*;

    #[test]
    fn parts_of_a_run_are_kept_apart() {
        let row = Row::new(300, Kind::System)
            .with_note("eval")
            .with("steps", 50.0)
            .with("steps_per_s", 2.5)
            .with("time", 1e9);
        let found: Vec<_> = numbers(&Stamped { row, time: 1e9 }).collect();
        assert_eq!(found, [("system/eval/steps_per_s".to_owned(), 2.5)]);
    }

    #[test]
    fn samples_of_the_machine_stand_at_their_time() {
        let run = crate::run::tests::run(std::path::Path::new("/nowhere"));
        let row = Row::new(7, Kind::System).with("system/cpu_percent", 3.0);
        let mut row = Stamped {
            row,
            time: run.started + 90.6,
        };
        assert_eq!(step(&run, &row), 90);
        let found: Vec<_> = numbers(&row).collect();
        assert_eq!(found, [("system/cpu_percent".to_owned(), 3.0)]);
        row.time = run.started - 1.0;
        assert_eq!(step(&run, &row), 0);
        row.row = Row::new(7, Kind::System).with("time_ms/step", 3.0);
        assert_eq!(step(&run, &row), 7);
    }
}
