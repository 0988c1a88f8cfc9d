//! Restarts of a run's ranks after one has died.

/// The remainder of `--restarts N`.
#[derive(Debug)]
pub(crate) struct Restarts {
    left: u32,
    before: Option<Option<u64>>,
}

impl Restarts {
    /// At most `limit` restarts.
    pub(crate) fn new(limit: u32) -> Self {
        Self {
            left: limit,
            before: None,
        }
    }

    /// Whether the ranks may start again; counts a restart if so.
    ///
    /// - `newest`: step of the newest checkpoint, if any
    ///
    /// # Errors
    ///
    /// Why not, if restarts were requested; `None` if not.
    pub(crate) fn again(&mut self, newest: Option<u64>) -> Result<(), Option<&'static str>> {
        if self.left == 0 {
            let were_asked_for = self.before.is_some();
            return Err(were_asked_for.then_some("not started again: --restarts is used up"));
        }
        // A rank that dies twice without a new checkpoint would do so for ever.
        if self.before == Some(newest) {
            return Err(Some(
                "not started again: no new checkpoint since it died before",
            ));
        }
        self.left -= 1;
        self.before = Some(newest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_end_at_the_limit_and_without_progress() {
        let used_up = "not started again: --restarts is used up";
        let no_progress = "not started again: no new checkpoint since it died before";
        for (limit, newest, reason) in [
            (2, &[None, Some(100), Some(200)][..], Some(used_up)),
            (9, &[Some(100), Some(100)], Some(no_progress)),
            (0, &[None], None),
        ] {
            let mut restarts = Restarts::new(limit);
            let (last, others) = newest.split_last().unwrap();
            for newest in others {
                assert_eq!(restarts.again(*newest), Ok(()));
            }
            assert_eq!(restarts.again(*last), Err(reason));
        }
    }
}
