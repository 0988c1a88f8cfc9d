//! Processes of this program that end together: ranks of `bench` and `harvest`, which no supervisor
//! restarts.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};

use rustix::io::retry_on_intr;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::ranks::die_with_launcher;
use crate::stop;

/// The processes, in order. Dropping them kills those still running.
#[derive(Debug, Default)]
pub(crate) struct Children(Vec<Child>);

impl Children {
    /// Starts one, which dies with this process.
    pub(crate) fn start(&mut self, command: &mut Command) -> io::Result<()> {
        die_with_launcher(command);
        self.0.push(command.spawn()?);
        Ok(())
    }

    /// Waits until all have exited or one has failed.
    pub(crate) fn wait(&mut self) -> anyhow::Result<()> {
        let count = self.0.len();
        loop {
            let mut left = 0;
            for (rank, child) in self.0.iter_mut().enumerate() {
                match child.try_wait()? {
                    Some(status) if status.success() => {}
                    Some(status) => anyhow::bail!("rank {rank} of {count} {}", end(status)),
                    None => left += 1,
                }
            }
            if left == 0 {
                return Ok(());
            }
            // The loop above finds out which.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            retry_on_intr(|| waitid(WaitId::All, options))?;
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It fails only for a process that has exited.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// How a process ended, in words.
fn end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, signal) => format!("was killed by {}", stop::name(signal.unwrap_or(0))),
    }
}
