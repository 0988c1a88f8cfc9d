//! The random numbers of a case, which depend only on seed, suite and case.

/// A random number generator.
#[derive(Debug)]
pub(crate) struct Random {
    seed: u64,
    suite: u32,
    case: u32,
    next: u32,
}

impl Random {
    pub(crate) fn new(seed: u64, suite: &str, case: u32) -> Self {
        let number = |number: u32, byte| number.wrapping_mul(31).wrapping_add(u32::from(byte));
        Self {
            seed,
            suite: suite.bytes().fold(0, number),
            case,
            next: 0,
        }
    }

    pub(crate) fn word(&mut self) -> u64 {
        let [low, high, ..] = spd_draws::block(self.seed, [self.next, self.case, self.suite, 0]);
        self.next += 1;
        u64::from(high) << 32 | u64::from(low)
    }

    /// A whole number below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.word() % end as u64).unwrap()
    }

    /// A number of at least 0 and below 1.
    pub(crate) fn part(&mut self) -> f64 {
        self.below(1 << 24) as f64 / f64::from(1 << 24)
    }

    pub(crate) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub(crate) fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.word().to_le_bytes()[0]
    }
}
