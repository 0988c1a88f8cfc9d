//! How far a run is, told to the launcher.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use spd_tracker::{Kind, Row, Spool, now};

use crate::fault::Fault;
use crate::heartbeat::Heartbeat;

/// Whether a stop was asked for; once it was, it stays so.
pub(crate) type Stop<'a> = &'a dyn Fn() -> bool;

/// The spool's word for the updates before the first step.
pub(crate) const WARMUP: &str = "warmup";

/// Its word for the passes of patient adversaries, at the end.
pub(crate) const LADDER: &str = "ladder";

/// Tells the launcher how far the run is, at most twice a second.
pub(crate) struct Progress {
    /// Nothing for a rank that writes nothing.
    spool: Option<Spool>,
    heartbeat: Arc<Heartbeat>,
    shown: Instant,
    /// Time of the last report of work that is no step.
    shown_beside: Instant,
    /// Time since the former that went into no step.
    rested: Duration,
    /// Multiplications and additions of a step.
    flops: u64,
    /// The most of them that the processor makes in a second, if that is known.
    peak: Option<f64>,
    /// Finished steps when it was last shown; none before the first time, as a run may have begun
    /// earlier.
    step: Option<u64>,
}

impl Progress {
    /// Progress that is shown in the run directory `dir`, where nobody has a spool, and felt in the
    /// heartbeat.
    pub(crate) fn at(dir: &Path, heartbeat: &Arc<Heartbeat>) -> Result<Self, Fault> {
        let spool = Spool::system(dir).context("the progress of the run")?;
        Ok(Self::told(&spool, heartbeat))
    }

    /// Progress that is told to a spool, and felt in the heartbeat.
    pub(crate) fn told(spool: &Spool, heartbeat: &Arc<Heartbeat>) -> Self {
        Self {
            spool: Some(spool.clone()),
            ..Self::felt(heartbeat)
        }
    }

    /// Progress in the heartbeat alone.
    pub(crate) fn felt(heartbeat: &Arc<Heartbeat>) -> Self {
        Self {
            spool: None,
            heartbeat: Arc::clone(heartbeat),
            shown: Instant::now(),
            shown_beside: Instant::now(),
            rested: Duration::ZERO,
            flops: 0,
            peak: None,
            step: None,
        }
    }

    /// Shows steps of so many multiplications and additions, on a processor that makes `peak` of
    /// them in a second at most, if that is known.
    pub(crate) fn steps_of(&mut self, flops: u64, peak: Option<f64>) {
        (self.flops, self.peak) = (flops, peak);
    }

    /// Says how far something is that is no step of the run, at most twice a second too.
    pub(crate) fn show_beside(&mut self, phase: &'static str, all: u64, made: u64) {
        self.heartbeat.tick(phase, made);
        if made > 0 && self.shown_beside.elapsed() < Duration::from_millis(500) {
            return;
        }
        let row = Row::new(made, Kind::System).with_note(phase);
        self.append(row.with("steps", all as f64));
        self.shown_beside = Instant::now();
    }

    /// Says what is going on, the spool's word for it and its number of steps, after `step` of
    /// them.
    pub(crate) fn show(&mut self, phase: &'static str, steps: u64, step: u64, now: bool) {
        self.heartbeat.tick(phase, step);
        let elapsed = self.shown.elapsed();
        if !now && elapsed < Duration::from_millis(500) {
            return;
        }
        let made = self.step.map_or(0, |shown| step.saturating_sub(shown));
        let speed = speed(made, elapsed, self.rested);
        let mut row = Row::new(step, Kind::System)
            .with_note(phase)
            .with("steps", steps as f64)
            .with("steps_per_s", speed);
        // Updates of a warm-up are another program.
        if speed > 0.0 && self.flops > 0 && phase != WARMUP {
            let flop_per_s = speed * self.flops as f64;
            row = row.with("gflop_per_s", 1e-9 * flop_per_s);
            if let Some(peak) = self.peak {
                row = row.with("utilisation", flop_per_s / peak);
            }
        }
        self.append(row);
        self.shown = Instant::now();
        self.rested = Duration::ZERO;
        self.step = Some(step);
    }

    /// Leaves the time since `clock` out of the speed of the steps: that of an evaluation, of
    /// figures, of the last save.
    pub(crate) fn rest(&mut self, clock: Instant) {
        self.rested += clock.max(self.shown).elapsed();
    }

    /// Says, for the launcher to repeat, that the run leaves on request, and what of it is saved.
    pub(crate) fn stopped(&mut self, step: u64, note: String) {
        self.heartbeat.set_stopped(&note);
        let row = Row::new(step, Kind::Event).with_note(note);
        self.append(row.with("stopped", 1.0));
    }

    /// Says what happened.
    pub(crate) fn event(&mut self, step: u64, note: String) {
        self.append(Row::new(step, Kind::Event).with_note(note));
    }

    /// Says what happened and wants a person.
    pub(crate) fn alert(&mut self, step: u64, note: String) {
        self.append(Row::new(step, Kind::Alert).with_note(note));
    }

    /// Says where the time of a step went, in milliseconds: the wait for its batch, the parts of
    /// its program, all of it.
    pub(crate) fn times(
        &mut self,
        step: u64,
        waited: Duration,
        all: Duration,
        parts: &[(&'static str, Duration)],
    ) {
        let ms = |time: &Duration| 1e3 * time.as_secs_f64();
        let mut row = Row::new(step, Kind::System).with("time_ms/data_wait", ms(&waited));
        for (part, time) in parts {
            row = row.with(format!("time_ms/{part}"), ms(time));
        }
        self.append(row.with("time_ms/step", ms(&all)));
    }

    fn append(&mut self, row: Row) {
        if let Some(spool) = &self.spool {
            spool.append(row.with("time", now()));
        }
    }
}

/// Steps a second, of a time of which some was rest; 0 where all of it was.
fn speed(steps: u64, elapsed: Duration, rested: Duration) -> f64 {
    let seconds = elapsed.saturating_sub(rested).as_secs_f64();
    if seconds > 0.0 {
        steps as f64 / seconds
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread::sleep;

    use super::*;

    #[test]
    fn steps_of_an_earlier_start_are_no_speed() {
        let dir = tempfile::tempdir().unwrap();
        let mut progress = Progress::at(dir.path(), &Arc::default()).unwrap();
        progress.steps_of(2_000_000_000, Some(8e9));
        for step in [3600, 3605] {
            sleep(Duration::from_millis(2));
            progress.show("train", 10_000, step, true);
        }
        drop(progress);
        let text = fs::read_to_string(dir.path().join("system.jsonl")).unwrap();
        let speed = |line: &str| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            row["steps_per_s"].as_f64().unwrap()
        };
        let speeds: Vec<f64> = text.lines().map(speed).collect();
        assert!(
            speeds[0] == 0.0 && speeds[1] > 0.0 && speeds[1] <= 2500.0,
            "{text}"
        );
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let gflop_per_s = last["gflop_per_s"].as_f64().unwrap();
        assert!((gflop_per_s / speeds[1] - 2.0).abs() < 1e-12, "{text}");
        let utilisation = last["utilisation"].as_f64().unwrap();
        assert!((utilisation / gflop_per_s - 0.125).abs() < 1e-12, "{text}");
        assert!(!text.lines().next().unwrap().contains("gflop"), "{text}");
    }

    #[test]
    fn time_beside_the_steps_does_not_slow_them() {
        let seconds = Duration::from_secs_f64;
        let speeds = [(5, 0.0), (5, 1.5), (5, 2.0), (0, 0.0)]
            .map(|(steps, rested)| speed(steps, seconds(2.0), seconds(rested)));
        assert_eq!(speeds.to_vec(), [2.5, 10.0, 0.0, 0.0]);
    }
}
