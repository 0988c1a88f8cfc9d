//! The way of measuring, which is that of the peers' `harness.py`.

use std::time::Instant;

use super::Settings;
use crate::fault::Fault;
use crate::rounded::whole;

/// Times of the steps of one workload.
#[derive(Debug, Clone)]
pub(super) struct Clock {
    /// The first step alone, which touches all memory for the first time.
    pub(super) first_s: f64,
    /// All steps of the warm-up.
    pub(super) warmup_s: f64,
    /// A step when steps follow each other without a look at the clock.
    pub(super) pipelined_ms: f64,
    sorted_ms: Vec<f64>,
}

/// The timed work.
pub(super) trait Timed {
    /// One step on the batch of a number; a GPU may only have been asked for it.
    fn step(&mut self, batch: usize) -> Result<(), Fault>;

    /// Waits until all steps are made.
    fn finish(&mut self) -> Result<(), Fault>;
}

/// Makes warm-up steps, timed steps, and as many steps back to back. Batches are numbered from 0 in
/// each of the three.
pub(super) fn measure(timed: &mut impl Timed, settings: &Settings) -> Result<Clock, Fault> {
    let start = Instant::now();
    let mut first_s = 0.0;
    for index in 0..settings.warmup.max(1) {
        timed.step(index)?;
        timed.finish()?;
        if index == 0 {
            first_s = start.elapsed().as_secs_f64();
        }
    }
    let warmup_s = start.elapsed().as_secs_f64();
    let mut sorted_ms: Vec<f64> = (0..settings.steps)
        .map(|index| {
            let start = Instant::now();
            timed.step(index)?;
            timed.finish()?;
            Ok(ms(start))
        })
        .collect::<Result<_, Fault>>()?;
    sorted_ms.sort_by(f64::total_cmp);
    let start = Instant::now();
    (0..settings.steps).try_for_each(|index| timed.step(index))?;
    timed.finish()?;
    let pipelined_ms = ms(start) / settings.steps as f64;
    Ok(Clock {
        first_s,
        warmup_s,
        pipelined_ms,
        sorted_ms,
    })
}

pub(super) fn ms(start: Instant) -> f64 {
    1e3 * start.elapsed().as_secs_f64()
}

impl Clock {
    /// The value that a share of the steps does not exceed, interpolated between steps as numpy
    /// does.
    pub(super) fn quantile(&self, share: f64) -> f64 {
        quantile(&self.sorted_ms, share)
    }

    /// The step in the middle.
    pub(super) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The mean step.
    pub(super) fn mean(&self) -> f64 {
        self.sorted_ms.iter().sum::<f64>() / self.sorted_ms.len() as f64
    }
}

/// Of sorted values, of which there must be one.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let below = whole(place);
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    // numpy: np.percentile([1, 2, 4, 8], [0, 10, 50, 90, 100]) = [1, 1.3, 3, 6.8, 8]
    #[test]
    fn quantiles_are_those_of_numpy() {
        let expected = [(0.0, 1.0), (0.1, 1.3), (0.5, 3.0), (0.9, 6.8), (1.0, 8.0)];
        for (share, value) in expected {
            let found = quantile(&[1.0, 2.0, 4.0, 8.0], share);
            assert!((found - value).abs() < 1e-12, "{share}: {found}");
        }
        assert!((quantile(&[5.0], 0.9) - 5.0).abs() < 1e-12);
    }

    #[test]
    fn batches_start_anew_and_one_warm_up_step_is_always_made() {
        struct Seen(Vec<(char, usize)>);

        impl Timed for Seen {
            fn step(&mut self, batch: usize) -> Result<(), Fault> {
                self.0.push(('s', batch));
                Ok(())
            }

            fn finish(&mut self) -> Result<(), Fault> {
                self.0.push(('f', 0));
                Ok(())
            }
        }

        let mut seen = Seen(Vec::new());
        let settings = Settings {
            steps: 2,
            warmup: 0,
            threads: 1,
            gpu: None,
            phases: false,
        };
        measure(&mut seen, &settings).unwrap();
        let alone = |batch| [('s', batch), ('f', 0)];
        let one_by_one = [alone(0), alone(0), alone(1)].concat();
        let back_to_back = [('s', 0), ('s', 1), ('f', 0)];
        assert_eq!(seen.0, [&one_by_one[..], &back_to_back].concat());
    }
}
