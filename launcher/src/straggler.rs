//! Which rank is slow: the one that waits for nobody while all others wait for it.
//!
//! Ranks go in step, so their speeds are one. What tells them apart is the time that each of them waits for the others.

use std::time::Duration;

/// The phase in which all ranks do the same.
pub(crate) const TRAIN: &str = "train";

/// A rank is looked at over so many steps and so long, at least.
const STEPS: u64 = 10;
const TIME: Duration = Duration::from_secs(1);

/// It is slow where every other one waits this much more of the time, as often as this in a row.
const MORE: f64 = 0.3;
const IN_A_ROW: u32 = 2;

/// How far a rank is, and how long it has waited for others, in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Finished steps; nothing where it does something else.
    pub(crate) step: Option<u64>,
    pub(crate) waited: Duration,
}

/// What was seen of the ranks of an attempt.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    /// When the look began, and where the ranks were.
    begin: Option<(Duration, Vec<Pace>)>,
    /// Who was slow at the last looks, and at how many.
    slow: Option<(usize, u32)>,
}

impl Stragglers {
    /// Takes in how far all ranks are; who is to be called slow now, if anybody, and how much of the time the others wait, in
    /// hundredths. A rank is called slow once, until it was not.
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
            reason = "hundredths of a time"
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

    /// Looks five times a second at ranks that make ten steps meanwhile, and wait so many milliseconds of each second.
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
    fn who_waits_for_nobody_while_all_wait_is_slow_and_named_once() {
        assert_eq!(seen(60, &[400, 20, 500, 450]), [(10, (1, 40))]);
        assert_eq!(seen(60, &[0, 900]), [(10, (0, 90))]);
    }

    #[test]
    fn ranks_that_wait_alike_are_not_slow() {
        // Four ranks on two cores wait half of the time.
        assert_eq!(seen(60, &[500, 420, 510, 400]), []);
        assert_eq!(seen(60, &[30, 10]), []);
        // Nor is one that is quicker than the others.
        assert_eq!(seen(60, &[20, 500, 30, 20]), []);
        assert_eq!(seen(60, &[0]), []);
    }

    #[test]
    fn what_is_no_step_tells_nothing() {
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
