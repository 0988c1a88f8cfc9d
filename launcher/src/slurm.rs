//! `spd-launch ... --dry-run --slurm`: a script for `sbatch` that runs the command and requeues
//! itself until it is done.

use std::ffi::OsString;

use spd_trainer::Memory;

/// Memory beside the rank's: the launcher, its log, and the file cache in use.
const BESIDE: usize = 512 << 20;

/// Seconds before its time limit at which a job is asked to save and exit. Slurm may be a minute
/// early.
const SAVE_BEFORE_END: u64 = 60;

/// The resources of a job.
pub(crate) struct Job<'a> {
    /// Name of the run.
    pub(crate) name: &'a str,
    /// Nodes, with a launcher on each.
    pub(crate) nodes: u64,
    /// CPU threads of each node.
    pub(crate) threads: usize,
    /// GPUs of each node.
    pub(crate) gpus: usize,
    /// Planned memory of a node.
    pub(crate) memory: &'a Memory,
    /// This program and its arguments.
    pub(crate) command: Vec<OsString>,
}

impl Job<'_> {
    /// The script.
    pub(crate) fn script(&self) -> String {
        let Self {
            name,
            nodes,
            threads,
            gpus,
            memory,
            command,
        } = self;
        let name: String = name.replace(|c: char| c.is_control() || c == ' ', "_");
        let mebibytes = (memory.total() + BESIDE).div_ceil(1 << 20);
        let gpus = match gpus {
            0 => String::new(),
            gpus => format!("#SBATCH --gpus-per-node={gpus}\n"),
        };
        let asked_here = |word: &&OsString| {
            let word = word.to_str().unwrap_or_default();
            word != "--dry-run" && word != "--slurm" && !word.starts_with("--slurm=")
        };
        let words = command.iter().filter(asked_here);
        let words: Vec<String> = words.map(|word| quoted(&word.to_string_lossy())).collect();
        format!(
            "#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --output={name}.slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={threads}
{gpus}#SBATCH --mem={mebibytes}M
#SBATCH --requeue
# Seconds before the time limit when the run saves and exits. B:USR1 would reach only this script.
#SBATCH --signal=USR1@{SAVE_BEFORE_END}
# Your cluster may want these too: #SBATCH --time=, #SBATCH --partition=, #SBATCH --account=

srun --kill-on-bad-exit=1 {}
code=$?
# 3: it has saved and exited. The job goes on from there, unless it was cancelled.
if [ \"$code\" = 3 ] && squeue --noheader --jobs=\"$SLURM_JOB_ID\" --states=RUNNING | grep -q .; then
  scontrol requeue \"$SLURM_JOB_ID\"
fi
exit \"$code\"
",
            words.join(" ")
        )
    }
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-=,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_the_resources_and_the_command_of_the_run() {
        let memory = Memory {
            parts: vec![("programs", 1 << 30)],
        };
        let words = ["/bin/spd-launch", "a b.toml", "--dry-run", "--set", "x='1'"];
        let command = words.iter().chain(&["--slurm=3"]).map(OsString::from);
        let job = Job {
            name: "my run",
            nodes: 3,
            threads: 8,
            gpus: 2,
            memory: &memory,
            command: command.collect(),
        };
        let script = job.script();
        for line in [
            "#SBATCH --job-name=my_run",
            "#SBATCH --nodes=3",
            "#SBATCH --cpus-per-task=8",
            "#SBATCH --gpus-per-node=2",
            "#SBATCH --mem=1536M",
            "#SBATCH --signal=USR1@60",
            "srun --kill-on-bad-exit=1 /bin/spd-launch 'a b.toml' --set 'x='\\''1'\\'''",
        ] {
            assert!(
                script.lines().any(|found| found == line),
                "{line}\n{script}"
            );
        }
        let on_cpu = Job { gpus: 0, ..job };
        assert!(!on_cpu.script().contains("gpus"));
    }
}
