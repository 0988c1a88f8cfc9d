//! The replay whose values an arena holds.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of a replay, which no other replay of this process has; 0 before the first.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replay(u64);

impl Replay {
    /// Begins another in an arena, which from now on holds its values.
    pub(crate) fn begin(&mut self, arena: &mut Self) {
        static LAST: AtomicU64 = AtomicU64::new(0);
        *self = Self(LAST.fetch_add(1, Ordering::Relaxed) + 1);
        *arena = *self;
    }

    /// Checks that an arena holds its values.
    ///
    /// # Panics
    ///
    /// When another program ran there since, or it ran in another arena.
    pub(crate) fn expect_in(self, arena: Self) {
        assert!(
            self.0 > 0 && self == arena,
            "outputs are read from the arena of the last replay before another program runs there"
        );
    }
}
