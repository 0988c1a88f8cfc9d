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
    fn a_crash_loop_with_progress_ends_at_the_limit() {
        let mut restarts = Restarts::new(2);
        assert_eq!(restarts.again(None), Ok(()));
        assert_eq!(restarts.again(Some(100)), Ok(()));
        assert_eq!(
            restarts.again(Some(200)),
            Err(Some("not started again: --restarts is used up"))
        );
    }

    #[test]
    fn a_crash_loop_without_progress_ends() {
        let mut restarts = Restarts::new(9);
        assert_eq!(restarts.again(Some(100)), Ok(()));
        assert_eq!(
            restarts.again(Some(100)),
            Err(Some(
                "not started again: no new checkpoint since it died before"
            ))
        );
    }

    #[test]
    fn without_restarts_there_is_no_reason() {
        assert_eq!(Restarts::new(0).again(None), Err(None));
    }
}
