//! `spd-launch attribute RUN`: what components and logits come from, as a table.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use spd_report::newest_harvest;
use spd_trainer::Fault;
use spd_trainer::harvest::{Attribute, Attributions, SAVE_EVERY, attribute as measure};

use crate::again::existing;
use crate::cli::{self, AttributeArgs};
use crate::exit::Exit;
use crate::gpus::gpu;
use crate::progress::{Lines, left};
use crate::{memory, screen};

/// Attributes the components of a harvest.
///
/// # Errors
///
/// Bad input: no run of a language model, no harvest, or no checkpoint of it any more, no such
/// component, a directory with something else, too little memory; failures of this machine.
pub(crate) fn attribute(asked: &AttributeArgs) -> Result<Exit, Fault> {
    existing(&asked.run)?;
    let harvest = asked.harvest.clone().or_else(|| newest(&asked.run));
    let (lines, begun) = (Lines::default(), Instant::now());
    let found = measure(
        &Attribute {
            run_dir: &asked.run,
            harvest: harvest.as_deref(),
            out: asked.out.as_deref(),
            to: &asked.to,
            positions: asked.positions,
            strongest: asked.strongest,
            threads: cli::threads(asked.threads),
            gpu: gpu(asked.gpus)?,
            save_every: asked.save_seconds.map_or(SAVE_EVERY, Duration::from_secs),
            fits: &|need| fits(need, memory::available()),
        },
        &|done, all| lines.say(|| line((done, all), begun.elapsed())),
    )?;
    screen::result(&said(&found));
    Ok(Exit::Done)
}

/// The newest harvest of a run, which is named if there are others.
fn newest(run: &Path) -> Option<PathBuf> {
    let (dir, count) = newest_harvest(run)?;
    if count > 1 {
        screen::note(&format!(
            "the newest of {count} harvests is {}; --harvest takes another",
            dir.display()
        ));
    }
    Some(dir)
}

fn said(found: &Attributions) -> String {
    let dir = found.dir.display();
    match found.targets {
        None => format!(
            "the attributions of step {} are in {dir} already\n",
            found.step
        ),
        Some((components, has_logits)) => {
            let logits = if has_logits { " and the logits" } else { "" };
            format!("{components} components{logits} are attributed; the table is in {dir}\n")
        }
    }
}

fn line((done, all): (u64, u64), elapsed: Duration) -> String {
    let left = left((done, all), elapsed);
    format!("attributing: target {done} of {all}, {left}")
}

fn fits(need: usize, there: Option<usize>) -> Result<(), String> {
    let remedy = "free some, or run it on a larger machine";
    memory::fits(("the attribution needs", remedy), need, there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribution_beyond_the_available_memory_is_refused() {
        assert_eq!(fits(10, Some(10)), Ok(()));
        assert_eq!(
            fits(3 << 20, Some(1 << 20)).unwrap_err(),
            "the attribution needs 3.00 MiB of memory, and 1.00 MiB are available; free some, or run it on a larger machine"
        );
    }

    #[test]
    fn the_last_line_says_what_is_attributed() {
        let mut found = Attributions {
            step: 12,
            dir: "x".into(),
            targets: Some((3, true)),
        };
        let line = "3 components and the logits are attributed; the table is in x\n";
        assert_eq!(said(&found), line);
        found.targets = None;
        assert_eq!(
            said(&found),
            "the attributions of step 12 are in x already\n"
        );
        assert_eq!(
            super::line((10, 20), Duration::from_secs(7)),
            "attributing: target 10 of 20, 7 seconds left"
        );
    }
}
