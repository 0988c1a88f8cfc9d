//! Detection of a slow rank: the one that never waits while all others wait.
//!
//! Ranks run in lockstep, so their speeds are equal. They differ in the time that each waits for
//! the others.

use std::time::Duration;

/// The phase in which all ranks do the same.
pub(crate) const TRAIN: &str = "train";

/// Minimum steps and time of a measurement.
const STEPS: u64 = 10;
const TIME: Duration = Duration::from_secs(1);

/// A rank is slow if every other one waits this fraction of the time more, in this many
/// measurements in a row.
const MORE: f64 = 0.3;
const IN_A_ROW: u32 = 2;

/// A rank's position, and the total time that it has waited for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Finished steps; `None` outside of training.
    pub(crate) step: Option<u64>,
    pub(crate) waited: Duration,
}

/// Measurements of the ranks of an attempt.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    /// Start of the current measurement, and the ranks' positions then.
    begin: Option<(Duration, Vec<Pace>)>,
    /// The rank that was slow in the last measurements, and their number.
    slow: Option<(usize, u32)>,
}

impl Stragglers {
    /// Adds the ranks' positions; returns the rank that is now found slow, if any, and the
    /// percentage of time that the others wait. A rank is reported once, until it was not slow.
    pub(crate) fn look(&mut self, now: Duration, ranks: &[Pace]) -> Option<(usize, u32)> {
        if ranks.len() < 2 || ranks.iter().any(|rank| rank.step.is_none()) {
            self.begin = None;
            return None;
        }
        let Some((since, before)) = &self.begin else {
            self.begin = Some((now, ranks.to_vec()));
            return None;
        };
        let time = now.saturating_sub(*since);
        let made = |(now, before): (&Pace, &Pace)| {
            now.step
                .unwrap_or(0)
                .saturating_sub(before.step.unwrap_or(0))
        };
        let steps = ranks.iter().zip(before).map(made).min();
        if time < TIME || steps < Some(STEPS) {
            return None;
        }
        let waited = ranks.iter().zip(before).map(|(now, before)| {
            let waited = now.waited.saturating_sub(before.waited);
            waited.as_secs_f64() / time.as_secs_f64()
        });
        let mut waited: Vec<(f64, usize)> = waited.zip(0..).collect();
        waited.sort_by(|one, other| one.0.total_cmp(&other.0));
        self.begin = Some((now, ranks.to_vec()));
        let [(least, rank), (next, _), ..] = waited[..] else {
            return None;
        };
        if next - least < MORE {
            self.slow = None;
            return None;
        }
        let times = match self.slow {
            Some((same, times)) if same == rank => times + 1,
            _ => 1,
        };
        self.slow = Some((rank, times));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a percentage"
        )]
        let percent = (100.0 * next).min(100.0) as u32;
        (times == IN_A_ROW).then_some((rank, percent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(step: u64, waited_ms: u64) -> Pace {
        Pace {
            step: Some(step),
            waited: Duration::from_millis(waited_ms),
        }
    }

    /// Measures five times a second, with ten steps a second and these milliseconds of waiting in
    /// each second.
    fn seen(seconds: u64, waits: &[u64]) -> Vec<(u64, (usize, u32))> {
        let (mut stragglers, mut slow) = (Stragglers::default(), Vec::new());
        for look in 0..5 * seconds {
            let ranks: Vec<Pace> = waits
                .iter()
                .map(|ms| pace(10 * look, ms * look / 5))
                .collect();
            let now = Duration::from_millis(200 * look);
            slow.extend(stragglers.look(now, &ranks).map(|found| (look, found)));
        }
        slow
    }

    #[test]
    fn a_rank_that_never_waits_is_reported_once() {
        assert_eq!(seen(60, &[400, 20, 500, 450]), [(10, (1, 40))]);
        assert_eq!(seen(60, &[0, 900]), [(10, (0, 90))]);
    }

    #[test]
    fn ranks_that_wait_equally_are_not_slow() {
        // Four ranks on two cores wait half of the time.
        assert_eq!(seen(60, &[500, 420, 510, 400]), []);
        assert_eq!(seen(60, &[30, 10]), []);
        // A rank that is faster than the others is not slow either.
        assert_eq!(seen(60, &[20, 500, 30, 20]), []);
        assert_eq!(seen(60, &[0]), []);
    }

    #[test]
    fn other_phases_are_not_measured() {
        let mut stragglers = Stragglers::default();
        for second in 0..60 {
            let mut first = pace(10 * second, 0);
            if second % 2 == 0 {
                first.step = None;
            }
            let ranks = [first, pace(10 * second, 900 * second)];
            assert_eq!(stragglers.look(Duration::from_secs(second), &ranks), None);
        }
    }
}
