//! `spd-launch ... --dry-run --slurm`: a script for `sbatch` that runs the same command, and goes on with it for as long as it takes.

use std::ffi::OsString;

use spd_trainer::Memory;

/// Memory beside that of the rank: the launcher, its log, the file cache that is in use.
const BESIDE: usize = 512 << 20;

/// Seconds before the end of its time at which a job is asked to save and leave. Slurm may be a minute early.
const SAVE_BEFORE_END: u64 = 60;

/// What the job needs.
pub(crate) struct Job<'a> {
    /// Name of the run.
    pub(crate) name: &'a str,
    /// Nodes, a launcher on each.
    pub(crate) nodes: u64,
    /// CPU threads of each.
    pub(crate) threads: usize,
    /// GPUs.
    pub(crate) gpus: usize,
    /// Planned for the machine.
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
# So long before its time is over, the run is asked to save and leave. Not B:USR1: that would reach this script alone.
#SBATCH --signal=USR1@{SAVE_BEFORE_END}
# Your cluster may want these too: #SBATCH --time=, #SBATCH --partition=, #SBATCH --account=

srun --kill-on-bad-exit=1 {}
code=$?
# 3: it has saved and left. The job goes on from there, unless somebody cancels it.
if [ \"$code\" = 3 ] && squeue --noheader --jobs=\"$SLURM_JOB_ID\" --states=RUNNING | grep -q .; then
  scontrol requeue \"$SLURM_JOB_ID\"
fi
exit \"$code\"
",
            words.join(" ")
        )
    }
}

/// A word as a shell takes it.
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
    fn a_job_needs_what_the_run_needs_and_runs_the_same_command() {
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
