//! The attempts of a run: its ranks are started, and started again after failures.

use std::time::Duration;

use anyhow::Context;

use crate::cli::{self, RunArgs};
use crate::exit::Exit;
use crate::nodes::FirstLauncher;
use crate::ranks::{RankProgram, own_program};
use crate::restart::Restarts;
use crate::run_dir::RunDir;
use crate::stop::Stop;
use crate::supervisor::{HangLimit, Timeouts};
use crate::world::Node;
use crate::{screen, supervise};

/// The attempts of a run: its start and its restarts.
pub(super) struct Attempts<'a> {
    pub(super) program: RankProgram,
    pub(super) run_dir: &'a RunDir,
    pub(super) timeouts: Timeouts,
    /// Planned memory of the run, in words.
    pub(super) memory: &'a str,
}

impl Attempts<'_> {
    /// Runs until success or until no restart is allowed; also returns the first line about the
    /// end.
    pub(super) fn run(
        &self,
        mut restarts: Restarts,
        stop: &mut Stop,
        mut others: Option<&mut FirstLauncher>,
    ) -> anyhow::Result<(Exit, String)> {
        let (program, run_dir) = (&self.program, self.run_dir);
        let (timeouts, memory) = (self.timeouts, self.memory);
        loop {
            let of_others = others.as_deref_mut();
            let attempt = supervise::attempt(program, run_dir, timeouts, stop, of_others, memory)?;
            let mut lines = attempt.message.iter();
            let first = lines.next();
            let said = first.cloned().unwrap_or_default();
            if let Some(first) = first {
                match attempt.exit {
                    Exit::Failed | Exit::BadInput => screen::error(first),
                    _ => screen::end(first),
                }
            }
            lines.for_each(|line| screen::end(line));
            let is_whole = others.as_ref().is_none_or(|others| others.is_whole());
            if !attempt.may_restart || stop.asked() || !is_whole {
                return Ok((attempt.exit, said));
            }
            let newest = spd_checkpoint::newest_step(&run_dir.checkpoints());
            match restarts.again(newest) {
                Ok(()) => screen::note(&match newest {
                    Some(step) => format!("started again; its newest checkpoint is of step {step}"),
                    None => {
                        "started again from the beginning: there is no checkpoint yet".to_owned()
                    }
                }),
                Err(reason) => {
                    reason.into_iter().for_each(screen::note);
                    return Ok((attempt.exit, said));
                }
            }
        }
    }
}

/// The program of the ranks of this node.
pub(super) fn program(
    asked: &RunArgs,
    node: &Node,
    run_dir: &RunDir,
) -> anyhow::Result<RankProgram> {
    let path = match &asked.rank_program {
        Some(path) => path.clone(),
        None => own_program().context("cannot find this program's executable")?,
    };
    let first = node.place() * asked.ranks();
    Ok(RankProgram {
        path,
        run_dir: run_dir.path().to_owned(),
        threads: asked.threads_of_rank(),
        target_threads: asked
            .target_threads
            .unwrap_or_else(|| cli::threads(asked.threads)),
        on_gpu: asked.gpus > 0,
        ranks: asked.ranks() * node.nodes(),
        here: first..first + asked.ranks(),
    })
}

/// The time limits for ranks.
pub(super) fn timeouts(asked: &RunArgs) -> Timeouts {
    Timeouts {
        grace: Duration::from_secs(asked.grace),
        hang: match asked.hang_seconds {
            None => HangLimit::Learned,
            Some(0) => HangLimit::Never,
            Some(seconds) => HangLimit::After(Duration::from_secs(seconds)),
        },
    }
}
