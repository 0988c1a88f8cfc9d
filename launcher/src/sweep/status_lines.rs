//! The live display of a sweep: one line for each running run on a terminal, periodic lines
//! elsewhere.

use std::time::Instant;

use crate::progress::{LINE_EVERY, Progress, bar};
use crate::screen;

/// The display.
pub(crate) struct StatusLines {
    is_live: bool,
    runs: usize,
    /// Length of the longest name.
    width: usize,
    last_lines: Instant,
}

impl StatusLines {
    /// A display on stderr, for runs whose names have at most `width` characters.
    pub(crate) fn new(runs: usize, width: usize) -> Self {
        Self {
            is_live: screen::is_live(),
            runs,
            width,
            last_lines: Instant::now(),
        }
    }

    /// Shows the running runs; `over` of all have ended, `failed` of them by failure.
    pub(crate) fn show(&mut self, running: &[(&str, &Progress)], over: usize, failed: usize) {
        if self.is_live {
            screen::live(self.lines(running, (over, failed), screen::live_columns()));
            return;
        }
        // With more runs at a time, each writes its lines less often.
        let pause = LINE_EVERY * u32::try_from(running.len().div_ceil(2)).unwrap_or(1).max(1);
        if self.last_lines.elapsed() >= pause {
            for (name, progress) in running {
                screen::progress(&format!("{name}  {}", progress.line()));
            }
            self.last_lines = Instant::now();
        }
    }

    fn lines(
        &self,
        running: &[(&str, &Progress)],
        (over, failed): (usize, usize),
        columns: usize,
    ) -> Vec<String> {
        let (width, runs) = (self.width, self.runs);
        let room = columns.saturating_sub(width + 1);
        let mut lines: Vec<String> = running
            .iter()
            .map(|(name, progress)| format!("{name:width$} {}", progress.live(room)))
            .collect();
        let failed = match failed {
            0 => String::new(),
            failed => format!("  {failed} failed"),
        };
        let counts = format!("{over}/{runs} runs{failed}");
        let bar = bar(over as u64, runs as u64);
        let whole = format!("{:width$} {:>15} {bar} {counts}", "all", "");
        lines.push(match whole.chars().count() <= columns {
            true => whole,
            false => format!("{:width$} {counts}", "all"),
        });
        lines
    }
}

impl Drop for StatusLines {
    fn drop(&mut self) {
        if self.is_live {
            screen::live(Vec::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_running_run_has_a_line_and_the_sweep_one() {
        let status = StatusLines::new(4, 6);
        assert_eq!(
            status.lines(&[("seed=3", &Progress::default())], (2, 1), 79),
            [
                "seed=3        starting",
                "all                    [============>           ] 2/4 runs  1 failed"
            ]
        );
        assert_eq!(
            status.lines(&[("seed=3", &Progress::default())], (2, 1), 40),
            ["seed=3        starting", "all    2/4 runs  1 failed"]
        );
    }
}
