//! `spd-launch harvest RUN`: what each component does over a dataset, as tables.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use spd_trainer::Fault;
use spd_trainer::harvest::{Harvesting, Request, SAVE_EVERY, Settings, Step, merge};

use crate::children::Children;
use crate::cli::{self, HarvestArgs};
use crate::exit::Exit;
use crate::gpus::gpus;
use crate::memory;
use crate::progress::{Lines, left};
use crate::ranks::{command, own_program, same_words};
use crate::run_dir::RunDir;
use crate::screen;

/// Harvests a run, or merges harvests.
///
/// # Errors
///
/// Bad input when there is no run, no checkpoint or no text, or another harvest has the directory;
/// failures of this machine.
pub(crate) fn harvest(asked: &HarvestArgs) -> Result<Exit, Fault> {
    if asked.merge {
        return merged(asked);
    }
    let [run] = &*asked.runs else {
        return Err(Fault::BadInput(
            "harvest: expected one run, found several; --merge adds up harvests".to_owned(),
        ));
    };
    let run_dir = RunDir::at(run.clone());
    if !run_dir.config().is_file() {
        return Err(Fault::BadInput(format!(
            "{}: holds no config.toml, so it is no run directory; give one, like runs/shakespeare",
            run_dir.path().display()
        )));
    }
    let ranks = asked.cpus.max(asked.gpus);
    // They exchange nothing on GPUs.
    let gpu = gpus(asked.gpus, 1)?;
    let request = Request {
        run_dir: run_dir.path(),
        data: asked.data.as_deref(),
        out: asked.out.as_deref(),
        settings: settings(asked),
        threads: (cli::threads(asked.threads) / ranks).max(1),
        gpu: (gpu > 0).then_some(asked.rank.unwrap_or(0)),
        save_every: asked.save_seconds.map_or(SAVE_EVERY, Duration::from_secs),
        fits: &|need| fits(ranks.saturating_mul(need), memory::available()),
    };
    let mut harvesting = Harvesting::open(&request)?;
    let (lines, begun) = (Lines::default(), Instant::now());
    let told = |step| lines.say(|| line(step, begun.elapsed()));
    if let Some(rank) = asked.rank {
        harvesting.count((rank as u64, ranks as u64), &|step| {
            if rank == 0 {
                told(step);
            }
        })?;
        return Ok(Exit::Done);
    }
    for (path, reason) in &harvesting.damaged {
        screen::note(&format!("{}: {reason}", path.display()));
    }
    if harvesting.is_done() {
        screen::result(&format!(
            "the harvest of step {} is in {} already\n",
            harvesting.step(),
            harvesting.dir().display()
        ));
        return Ok(Exit::Done);
    }
    let _lock = harvesting.begin()?;
    if ranks == 1 {
        harvesting.count((0, 1), &told)?;
    } else {
        by_ranks(asked, ranks)?;
    }
    let words = harvesting.finish(&told)?;
    say(&words, harvesting.dir());
    Ok(Exit::Done)
}

fn merged(asked: &HarvestArgs) -> Result<Exit, Fault> {
    let Some(out) = &asked.out else {
        return Err(Fault::BadInput(
            "harvest --merge: expected a directory for the result; give it with --out".to_owned(),
        ));
    };
    let (lines, begun) = (Lines::default(), Instant::now());
    let told = |step| lines.say(|| line(step, begun.elapsed()));
    let words = merge(&asked.runs, out, cli::threads(asked.threads), &told)?;
    say(&words, out);
    Ok(Exit::Done)
}

fn say(words: &str, dir: &Path) {
    screen::result(&format!("{words}; the tables are in {}\n", dir.display()));
}

fn settings(asked: &HarvestArgs) -> Settings {
    let usual = Settings::default();
    Settings {
        tokens: asked.tokens.unwrap_or(usual.tokens),
        examples: asked.examples.unwrap_or(usual.examples),
        removals: asked.removals.unwrap_or(usual.removals),
        pairs: !asked.no_pairs,
        shard: asked.shard.unwrap_or(usual.shard),
    }
}

/// Counts by several processes, each of them this program again.
fn by_ranks(asked: &HarvestArgs, ranks: usize) -> anyhow::Result<()> {
    let program = own_program().context("this program's own file cannot be found")?;
    let mut children = Children::default();
    for rank in 0..ranks {
        let mut command = command(&program);
        same_words(&mut command, "harvest", |command| {
            command.arg(format!("--rank={rank}"));
            if asked.threads.is_none() {
                command.arg(format!("--threads={}", cli::threads(None)));
            }
        });
        let started = children.start(&mut command);
        started.with_context(|| format!("harvest: rank {rank}"))?;
    }
    children.wait().context("harvest")
}

fn fits(need: usize, there: Option<usize>) -> Result<(), String> {
    let remedy = "--no-pairs and a smaller --examples need less";
    memory::fits(("the harvest may need", remedy), need, there)
}

fn line(step: Step, elapsed: Duration) -> String {
    match step {
        Step::Counted(parts, of, positions) => {
            let left = left((parts, of), elapsed);
            format!("counting: part {parts} of {of}, {positions} tokens, {left}")
        }
        Step::Removed(components, of) => format!("removing: component {components} of {of}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_harvest_beyond_the_available_memory_is_refused() {
        assert_eq!(fits(10, Some(10)), Ok(()));
        assert_eq!(
            fits(3 << 20, Some(1 << 20)).unwrap_err(),
            "the harvest may need 3.00 MiB of memory, and 1.00 MiB are available; --no-pairs and a smaller --examples need less"
        );
    }

    #[test]
    fn progress_names_what_is_left() {
        assert_eq!(
            line(Step::Counted(1, 4, 32768), Duration::from_secs(10)),
            "counting: part 1 of 4, 32768 tokens, 30 seconds left"
        );
        assert_eq!(
            line(Step::Removed(64, 2048), Duration::ZERO),
            "removing: component 64 of 2048"
        );
    }
}
