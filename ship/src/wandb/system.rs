//! System rows and events as lines of W&B's events and console.

use jiff::SignedDuration;
use jiff::Timestamp;
use spd_tracker::{Kind, Row};

use super::json::{number, object};
use crate::sink::Stamped;

const MIB: f64 = 1_048_576.0;

/// Names of a GPU's values in [`crate::machine`] and at W&B.
const GPU: [(&str, &str); 10] = [
    ("utilization_percent", "gpu"),
    ("memory_percent", "memoryAllocated"),
    ("memory_used_bytes", "memoryAllocatedBytes"),
    ("temperature_c", "temp"),
    ("power_watts", "powerWatts"),
    ("power_percent", "powerPercent"),
    ("sm_clock_mhz", "smClock"),
    ("memory_clock_mhz", "memoryClock"),
    ("corrected_memory_errors", "correctedMemoryErrors"),
    ("uncorrected_memory_errors", "uncorrectedMemoryErrors"),
];

/// Names of values of the machine and its first process, with divisors.
const MACHINE: [(&str, &str, f64); 3] = [
    ("cpu_percent", "cpu", 1.0),
    ("memory_percent", "memory_percent", 1.0),
    ("rank0.rss_bytes", "proc.memory.rssMB", MIB),
];

/// Values that are not measurements: the time of the row, and the number of steps.
const ASIDE: [&str; 2] = ["steps", "time"];

/// The line of a row of the machine; `None` if W&B draws none of its values.
pub(super) fn event(stamped: &Stamped, started: f64) -> Option<String> {
    let (values, time) = (measured(&stamped.row), stamped.time);
    if values.is_empty() {
        return None;
    }
    let own = [
        ("_wandb", "true".into()),
        ("_timestamp", number(time)),
        ("_runtime", number((time - started).max(0.0))),
    ];
    let own = own.iter().map(|(name, value)| (*name, value.as_str()));
    let values = values.iter();
    let values = values.map(|(name, value)| (name.as_str(), value.as_str()));
    Some(object(own.chain(values)))
}

/// The encoded measurements of a row, by W&B's names.
pub(super) fn measured(row: &Row) -> Vec<(String, String)> {
    let values = row.numbers().filter(|(name, _)| !ASIDE.contains(name));
    let values = values.map(|(name, value)| {
        let (key, unit) = key(name, row.note.as_deref());
        (key, number(value / unit))
    });
    values.collect()
}

/// W&B's name of a value, and its divisor. The name includes a phase other than training.
fn key(name: &str, phase: Option<&str>) -> (String, f64) {
    let short = name
        .strip_prefix("system/")
        .unwrap_or(name)
        .replace('/', ".");
    if let Some((index, rest)) = gpu(&short)
        && let Some((_, theirs)) = GPU.iter().find(|(ours, _)| *ours == rest)
    {
        return (format!("system.gpu.{index}.{theirs}"), 1.0);
    }
    if let Some((_, theirs, unit)) = MACHINE.iter().find(|(ours, _, _)| *ours == short) {
        return (format!("system.{theirs}"), *unit);
    }
    if short.ends_with(".rss_bytes") {
        let rank = short.trim_end_matches(".rss_bytes");
        return (format!("system.{rank}.proc.memory.rssMB"), MIB);
    }
    match phase.filter(|phase| *phase != "train") {
        Some(phase) => (format!("system.{phase}.{short}"), 1.0),
        None => (format!("system.{short}"), 1.0),
    }
}

/// The parts of `gpu0.power_watts`: number and value.
fn gpu(short: &str) -> Option<(&str, &str)> {
    let (index, rest) = short.strip_prefix("gpu")?.split_once('.')?;
    let is_number = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then_some((index, rest))
}

/// The console lines of a row, marked if it is an alert.
pub(super) fn console(stamped: &Stamped) -> Vec<String> {
    let mark = if stamped.row.kind == Kind::Alert {
        "ERROR "
    } else {
        ""
    };
    let lines = told(stamped).into_iter();
    lines.map(|line| format!("{mark}{line}")).collect()
}

/// The lines of a row: its note, its values, its time.
pub(super) fn told(Stamped { row, time }: &Stamped) -> Vec<String> {
    let (words, at) = (said(row), moment(*time));
    let lines = words.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| format!("{at} {line}")).collect()
}

/// The first line of an alert.
pub(super) fn title(row: &Row) -> &str {
    let note = row.note.as_deref().unwrap_or("alert");
    note.lines().next().unwrap_or("alert")
}

/// A row as text.
pub(super) fn said(row: &Row) -> String {
    let mut words = match &row.note {
        Some(note) => format!("step {}: {note}", row.step),
        None => format!("step {}", row.step),
    };
    for (name, value) in row.numbers().filter(|(name, _)| !ASIDE.contains(name)) {
        words.push_str(&format!(" {name}={}", number(value)));
    }
    words
}

/// Seconds since 1970 as date and time in UTC, with microseconds.
fn moment(time: f64) -> String {
    let since = SignedDuration::try_from_secs_f64(time).unwrap_or_default();
    let moment = Timestamp::from_duration(since).unwrap_or_default();
    moment.strftime("%Y-%m-%dT%H:%M:%S%.6f").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(time: f64, row: Row) -> Stamped {
        Stamped { row, time }
    }

    #[test]
    fn values_of_the_machine_have_the_names_of_wandb() {
        let row = Row::new(8, Kind::System)
            .with("system/cpu_percent", 50.0)
            .with("system/memory_percent", 12.5)
            .with("system/rank0/rss_bytes", 3.0 * MIB)
            .with("system/rank1/rss_bytes", 4.0 * MIB)
            .with("system/gpu0/utilization_percent", 91.0)
            .with("system/gpu3/power_watts", 350.0)
            .with("system/gpu0/fan_percent", 20.0)
            .with("time_ms/step", 7.5)
            .with("time", 1e9);
        assert_eq!(
            event(&at(1010.0, row), 1000.0).unwrap(),
            r#"{"_wandb":true,"_timestamp":1010,"_runtime":10,"system.cpu":50,"system.memory_percent":12.5,"system.proc.memory.rssMB":3,"system.rank1.proc.memory.rssMB":4,"system.gpu.0.gpu":91,"system.gpu.3.powerWatts":350,"system.gpu0.fan_percent":20,"system.time_ms.step":7.5}"#
        );
    }

    #[test]
    fn the_speed_of_an_evaluation_is_not_that_of_training() {
        let of = |phase: &str| {
            let row = Row::new(8, Kind::System).with_note(phase);
            event(
                &at(1000.0, row.with("steps_per_s", 4.0).with("steps", 9.0)),
                1000.0,
            )
            .unwrap()
        };
        assert!(of("train").ends_with(r#""_runtime":0,"system.steps_per_s":4}"#));
        assert!(of("eval").ends_with(r#","system.eval.steps_per_s":4}"#));
        let none = Row::new(8, Kind::System).with("time", 1.0);
        assert_eq!(event(&at(1000.0, none), 1000.0), None);
    }

    // `date -u -d @1795207747.751507 +%FT%T.%6N`.
    #[test]
    fn events_are_lines_of_the_console() {
        let row = Row::new(12, Kind::Event).with_note("resumed on 2 ranks");
        let row = row.with("stopped", 1.0).with("time", 5.0);
        assert_eq!(
            console(&at(1_795_207_747.751_507, row)),
            ["2026-11-20T20:49:07.751507 step 12: resumed on 2 ranks stopped=1"]
        );
        let alert = Row::new(3, Kind::Alert).with_note("loss is NaN\nat two sites");
        assert_eq!(
            console(&at(0.0, alert)),
            [
                "ERROR 1970-01-01T00:00:00.000000 step 3: loss is NaN",
                "ERROR 1970-01-01T00:00:00.000000 at two sites"
            ]
        );
    }
}
