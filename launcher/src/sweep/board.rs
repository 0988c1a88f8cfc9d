//! The live display of a sweep: a line a running run on a terminal, elsewhere lines now and then.

use std::io::{self, IsTerminal};
use std::time::Instant;

use indicatif::{MultiProgress, ProgressBar};

use crate::progress::{LINE_EVERY, Progress, set_style};
use crate::screen;

/// Where the runs of a sweep are shown.
pub(crate) struct Board {
    bars: Option<Bars>,
    last_lines: Instant,
}

struct Bars {
    all: MultiProgress,
    total: ProgressBar,
    running: Vec<(String, ProgressBar)>,
    /// Letters of the longest name.
    width: usize,
}

impl Board {
    /// A display on stderr, for runs whose names have at most `width` letters.
    pub(crate) fn new(runs: usize, width: usize) -> Self {
        let bars = io::stderr().is_terminal().then(|| {
            let all = MultiProgress::new();
            let total = all.add(ProgressBar::new(runs as u64));
            set_style(&total, "{prefix} [{bar:24}] {pos}/{len} runs  {msg}");
            total.set_prefix(format!("{:width$}", "all"));
            Bars {
                all,
                total,
                running: Vec::new(),
                width,
            }
        });
        Self {
            bars,
            last_lines: Instant::now(),
        }
    }

    /// Writes a line without spoiling the bars.
    pub(crate) fn note(&self, line: &str) {
        match &self.bars {
            Some(bars) => bars.all.suspend(|| screen::note(line)),
            None => screen::note(line),
        }
    }

    /// Shows where the running runs are; `over` of all have ended, `failed` of them badly.
    pub(crate) fn show(&mut self, running: &[(&str, &Progress)], over: usize, failed: usize) {
        let Some(bars) = &mut self.bars else {
            // More runs at a time write their lines further apart.
            let pause = LINE_EVERY * u32::try_from(running.len().div_ceil(2)).unwrap_or(1).max(1);
            if self.last_lines.elapsed() >= pause {
                for (name, progress) in running {
                    screen::note(&format!("{name}  {}", progress.line()));
                }
                self.last_lines = Instant::now();
            }
            return;
        };
        bars.total.set_position(over as u64);
        if failed > 0 {
            bars.total.set_message(format!("{failed} failed"));
        }
        bars.running.retain(|(name, bar)| {
            let runs = running.iter().any(|(other, _)| other == name);
            if !runs {
                bar.finish_and_clear();
                bars.all.remove(bar);
            }
            runs
        });
        for (name, progress) in running {
            let bar = match bars.running.iter().find(|(other, _)| other == name) {
                Some((_, bar)) => bar.clone(),
                None => {
                    let bar = bars.all.insert_before(&bars.total, ProgressBar::new(0));
                    set_style(&bar, "{prefix} [{bar:24}] {pos}/{len}  {msg}");
                    bars.running.push(((*name).to_owned(), bar.clone()));
                    bar
                }
            };
            let (step, steps) = progress.steps();
            bar.set_prefix(format!("{name:width$}", width = bars.width));
            bar.set_message(format!("{}  {}", progress.activity(), progress.numbers()));
            bar.set_length(steps);
            bar.set_position(step);
        }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        if let Some(bars) = &self.bars {
            for (_, bar) in &bars.running {
                bar.finish_and_clear();
            }
            bars.total.finish_and_clear();
        }
    }
}
