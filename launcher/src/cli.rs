//! What can be typed: the command line of a run and of what is done before there is one; commands about runs in `runs`, values in `values`.

mod runs;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use spd_configs::Destination;

pub(crate) use self::runs::{
    EvalArgs, ExportArgs, FiguresArgs, ImportArgs, ReportArgs, RunsArgs, ShipArgs, StopArgs,
    TailArgs, WatchArgs,
};
pub(crate) use self::values::threads;
use self::values::{
    architecture, at_least_one, fraction, gpu_count, node_count, rank_count, shipped, thread_count,
    tracker,
};
use crate::memory;
use crate::vary::Vary;

const EXAMPLES_AND_CODES: &str = "\
Examples:
  spd-launch configs/tms_5-2.toml             run it, or go on with it, in runs/tms_5-2
  spd-launch tms_5-2 --dry-run                say what it would do and need; create nothing
  spd-launch tms_5-2 --dry-run --slurm > job  a script for sbatch
  spd-launch tms_5-2 --set seed=1 --out runs/seed1
  spd-launch tms_5-2 --gpus 1                 on a GPU
  spd-launch tms_40-10 --cpus 2               by two ranks
  spd-launch shakespeare --gpus 4             by four ranks, on a GPU each
  srun --ntasks-per-node=1 spd-launch tms_40-10 --cpus 2
                                              by two ranks on each node of a Slurm job
  spd-launch tms_5-2 --fresh                  start over; the old directory is moved aside
  spd-launch tms_5-2 --seeds 0..20            20 runs over the cores there are, and one table
  spd-launch tms_5-2 --sweep train.lr=1e-3,2e-3 --seeds 0..5
  spd-launch tokenize stories.txt --tokenizer bytes --out data/stories
  spd-launch inspect data/stories/train       what it is, whether it is whole, and some of it to read
  spd-launch export runs/tms_5-2 --out for-pytorch
  spd-launch import s-1234abcd/model_10000.pth --out runs/theirs
  spd-launch bench tms_5-2 --phases
  spd-launch profile tms_5-2 --trace step.json
  spd-launch figures runs/tms_5-2             draw its newest checkpoint again
  spd-launch eval runs/shakespeare --set eval.batches=100 --set eval.components=100
                                              evaluate it again, with other settings
  spd-launch watch runs/tms_5-2 runs/seed1    curves, figures and components in a browser, live
  spd-launch report runs/tms_5-2.sweep        the same as one file
  spd-launch runs                             every run under runs: its state, step, loss, time left
  spd-launch tail runs/tms_5-2                its rows as they come, until it ends
  spd-launch stop runs/tms_5-2                have it save and leave, as Ctrl-C does
  spd-launch configs tms_5-2 > mine.toml      a shipped run file, to be edited
  spd-launch doctor                           what there is for GPUs, and what is missing
  spd-launch doctor --deep                    and whether GPU 0 works, probe by probe

A run is continued by the command that started it. SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP make it
save and leave, as Stop on its page at W&B does; a second Ctrl-C or SIGTERM kills it at once. Under nohup,
SIGHUP is ignored. All of that holds for several runs at once too: they lie in runs/NAME.sweep, and one
that fails leaves the others alone.

Exit codes:
  0  done; of several runs, all of them
  1  failed: the first line of the message says which rank, where and why; of several runs, the table
     says which, and the others are done; of `doctor --deep`, a probe failed or none could be run
  2  bad input: command line, run file, target, data or directory; nothing was created,
     unless it is a rank that found it; of `stop`, a run that cannot be asked: the others were
  3  stopped on request; the same command goes on from there
  130, 143  killed by a second Ctrl-C or SIGTERM";

/// Trains Stochastic Parameter Decompositions: runs the file CONFIG to its end, whatever interrupts it.
#[derive(Debug, Parser)]
#[command(
    name = "spd-launch",
    version,
    after_help = EXAMPLES_AND_CODES,
    arg_required_else_help = true,
    subcommand_negates_reqs = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) run: Option<RunArgs>,
    /// Print results and errors alone
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print too which processes are started, and what each rank begins with
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

/// Everything but running, which needs no name.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a token dataset of text, JSON lines or parquet; killed, the same command goes on
    Tokenize(TokenizeArgs),
    /// Say what a dataset, a checkpoint, a file of weights or a run directory is, and whether it is whole
    Inspect(InspectArgs),
    /// Write the newest checkpoint of a run as the SPD reference would have it, or the run for `wandb sync`
    Export(ExportArgs),
    /// Make a run directory of a checkpoint of the SPD reference
    Import(ImportArgs),
    /// Time training steps
    Bench(BenchArgs),
    /// Say where the time of a run's step goes
    Profile(ProfileArgs),
    /// Evaluate the newest checkpoint of a run again: with other settings, on other data
    Eval(EvalArgs),
    /// Draw the figures of a run again, from its newest checkpoint
    Figures(FiguresArgs),
    /// Send the rows of runs that trackers have not taken yet
    Ship(ShipArgs),
    /// Make a page for looking at runs: curves, figures, components, what differs
    Report(ReportArgs),
    /// Serve that page for the browsers of this machine, live
    Watch(WatchArgs),
    /// List runs: how each is, how far, and since when
    Runs(RunsArgs),
    /// Print the rows of a run as they come, until it ends
    Tail(TailArgs),
    /// Have runs of this machine save and leave, as Ctrl-C does
    Stop(StopArgs),
    /// List the run files that are part of this program, or print one
    Configs(ConfigsArgs),
    /// Say what this machine has for runs on GPUs, and what is missing for what
    Doctor(DoctorArgs),
    /// Print the completions of a shell, to be put where it looks for them
    Completions(CompletionsArgs),
    /// One rank of a probe, as `doctor --deep` starts it
    #[command(hide = true)]
    Probe(ProbeArgs),
    /// One rank, as the launcher starts it
    #[command(hide = true)]
    Rank(RankArgs),
}

/// `spd-launch CONFIG`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Run file, or the name of one in `configs/` or of one that is part of this program (`spd-launch configs`)
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) config: String,
    /// Run directory [default: runs/NAME, by the name in the run file; runs/NAME.sweep for several runs]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// Memory to count on [default: what the machine and its control groups have to give now]
    #[arg(long, value_name = "SIZE", value_parser = memory::size)]
    pub(crate) memory: Option<usize>,
    /// Value in place of the file's, like `train.steps=200`; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Seeds to run beside each other, like `0..20` (20 is left out) or `1,4,9`
    #[arg(long, value_name = "SEEDS")]
    pub(crate) seeds: Option<String>,
    /// Where metrics are sent, in place of the file's `[tracker]`: wandb, mlflow, tensorboard, or several with commas
    #[arg(long, value_name = "TRACKER", value_delimiter = ',', value_parser = tracker)]
    pub(crate) tracker: Vec<Destination>,
    /// Values of a key, each for a run of its own; given many times, every combination is run
    #[arg(long, value_name = "KEY=A,B,C")]
    pub(crate) sweep: Vec<String>,
    /// Runs at a time, among which the threads are shared out [default: a run a thread]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) jobs: Option<usize>,
    /// Check everything, print the plan, create nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print a script for Slurm's `sbatch` that runs this command on so many nodes (on one, without a number), saves before the job's
    /// time is over and goes on in the next
    #[arg(long, value_name = "NODES", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = node_count, requires = "dry_run", conflicts_with_all = ["seeds", "sweep"])]
    pub(crate) slurm: Option<u64>,
    /// Start over: an old run directory is moved to DIR.old-N first, or what it holds to DIR/old-N
    #[arg(long)]
    pub(crate) fresh: bool,
    /// GPUs of each node to use, with a rank on each (`spd-launch doctor` says what is there)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = gpu_count)]
    pub(crate) gpus: usize,
    /// Ranks on the CPU of each node, among which batches and threads are shared out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = rank_count, conflicts_with_all = ["gpus", "seeds", "sweep"])]
    pub(crate) cpus: usize,
    /// Seconds that the launchers of a run on several nodes wait for each other
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub(crate) join_seconds: u64,
    /// Seconds a rank has to save and leave when it is asked to; Slurm and Kubernetes give 30
    #[arg(long, value_name = "SECONDS", default_value_t = 25)]
    pub(crate) grace: u64,
    /// Seconds without progress after which a rank is killed as hung; 0 waits for ever [default: 20 times its longest pause in
    /// the phase so far, and a minute at least; ten minutes where none is known]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) hang_seconds: Option<u64>,
    /// Times that a rank that died is started again from its last good checkpoint, as long as each time there is a newer one, and
    /// unless what ended it would end it again: bad input, numbers that are not finite, a lack of memory
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) restarts: u32,
    /// Print objects of JSON, one a line: `time`, `kind` (`plan`, `note`, `detail`, `error`, `end`, `result`) and `text`; the result of a
    /// run has its summary.json as `result`, that of several their sweep.json
    #[arg(long)]
    pub(crate) json: bool,
    /// CPU threads while a target is trained; more where other runs wait for it
    #[arg(long, value_name = "N", value_parser = thread_count, hide = true)]
    pub(crate) target_threads: Option<usize>,
    /// Program started in place of this one; for tests of the launcher
    #[arg(long, value_name = "PATH", hide = true)]
    pub(crate) rank_program: Option<PathBuf>,
}

/// `spd-launch tokenize`.
#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// Text, JSON lines (.jsonl, .ndjson, .json) and parquet, also packed (.gz, .zst); directories of them and patterns; in the order
    /// of the dataset
    #[arg(required = true, value_name = "FILES")]
    pub(crate) files: Vec<PathBuf>,
    /// `bytes`, a tokenizer.json, or hf://OWNER/NAME@REVISION, whose tokenizer.json is fetched
    #[arg(long, value_name = "bytes|PATH|hf://NAME")]
    pub(crate) tokenizer: String,
    /// Directory to make; `train` and `val` in it are the datasets
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Part of the text, at its end, that is held out for evaluation [default: 0.1]
    #[arg(long, value_name = "F", value_parser = fraction)]
    pub(crate) val_fraction: Option<f64>,
    /// Text that stands between two documents of a file [default: a file is one document]
    #[arg(long, value_name = "S")]
    pub(crate) separator: Option<String>,
    /// Key of JSON lines, or column of parquet, that holds the text, or ids of this tokenizer [default: text]
    #[arg(long, value_name = "NAME")]
    pub(crate) column: Option<String>,
    /// Token to add after each document, by its text in the vocabulary
    #[arg(long, value_name = "TEXT")]
    pub(crate) eos: Option<String>,
    /// Most tokens of a shard [default: 2^26]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) shard_tokens: Option<usize>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// Replace datasets that stand there
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// `spd-launch inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Dataset (a directory, .bin or .idx), checkpoint, .safetensors file or run directory
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// How the ids of a bare .bin are stored
    #[arg(long, value_name = "u16|u32", value_parser = ["u16", "u32"])]
    pub(crate) dtype: Option<String>,
}

/// `spd-launch bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Workloads; an unknown name lists those that are known
    #[arg(required_unless_present = "compile_only", value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Compile the kernels of the workloads (of all, in the precisions that are timed, where none is named) and of `doctor --deep`
    /// for a GPU that need not be here, and time nothing; they are kept where runs on a GPU find them
    #[arg(long, requires = "arch", conflicts_with_all = ["gpus", "cpus", "vary", "phases", "out", "steps", "warmup"])]
    pub(crate) compile_only: bool,
    /// Architecture of that GPU, like `sm_90` for an H100 (`spd-launch doctor` says what a GPU is)
    #[arg(long, value_name = "SM", requires = "compile_only", value_parser = architecture)]
    pub(crate) arch: Option<String>,
    /// Steps that are timed
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) steps: Option<usize>,
    /// Steps before those
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<usize>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// GPUs to use: 0 or 1
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "vary")]
    pub(crate) gpus: usize,
    /// Ranks on the CPU, among which the batch and the threads are shared out
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = rank_count, conflicts_with_all = ["gpus", "vary", "phases"])]
    pub(crate) cpus: usize,
    /// Which of them, for one that was started by the first
    #[arg(long, value_name = "N", hide = true, requires = "memory_fd")]
    pub(crate) rank: Option<usize>,
    /// File descriptor of the memory that they share
    #[arg(long, value_name = "FD", hide = true)]
    pub(crate) memory_fd: Option<i32>,
    /// Rows per step in place of the workload's
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch: Option<usize>,
    /// Tokens per row in place of the workload's
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) seq: Option<usize>,
    /// Time the step at each of several values of C, batch, seq, sites or samples, and print how it grows
    #[arg(long, value_name = "KEY=A,B,C", conflicts_with = "phases", value_parser = Vary::parse)]
    pub(crate) vary: Option<Vary>,
    /// What a step is computed in: fp32, tf32 on a GPU, or bf16 where there are instructions for it [default: as the name says, or else fp32]
    #[arg(long, value_name = "P")]
    pub(crate) precision: Option<String>,
    /// Time the parts of a step too, and print tables to stderr
    #[arg(long)]
    pub(crate) phases: bool,
    /// File that the JSON lines are appended to
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

impl RunArgs {
    /// Ranks of each node: one on each GPU, or those on the CPU.
    pub(crate) fn ranks(&self) -> usize {
        // The two exclude each other.
        self.cpus.max(self.gpus)
    }

    /// What asks for them.
    pub(crate) fn flag(&self) -> &'static str {
        if self.gpus > 0 { "--gpus" } else { "--cpus" }
    }
}

/// `spd-launch profile`.
#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Run file, or the name of one in `configs/` or of one that is part of this program (`spd-launch configs`)
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) config: String,
    /// Steps that are profiled [default: 20]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) steps: Option<usize>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// GPUs to use: 0 or 1
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpus: usize,
    /// Value in place of the file's, like `train.batch_size=64`; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// File that the ops are written to, for Perfetto or Chrome
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}

/// `spd-launch configs`.
#[derive(Debug, Args)]
pub(crate) struct ConfigsArgs {
    /// The one to be printed [default: a list of all]
    #[arg(value_name = "NAME", value_parser = shipped())]
    pub(crate) name: Option<String>,
}

/// `spd-launch completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// Shells that completions are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// `spd-launch completions bash > ~/.local/share/bash-completion/completions/spd-launch`
    Bash,
    /// `spd-launch completions zsh > _spd-launch`, in a directory of `fpath`
    Zsh,
    /// `spd-launch completions fish > ~/.config/fish/completions/spd-launch.fish`
    Fish,
}

/// `spd-launch doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Probe a GPU too: libraries, copies, what kernels are made of, graphs, sums over ranks; each is a process with a time limit
    #[arg(long)]
    pub(crate) deep: bool,
    /// Number of that GPU
    #[arg(long, value_name = "N", default_value_t = 0, requires = "deep")]
    pub(crate) gpu: usize,
}

/// `spd-launch probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Name of the probe
    pub(crate) name: String,
    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: usize,
    /// Which of the probe's processes this is
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) rank: usize,
}

/// `spd-launch rank`.
#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// Prepared run directory; the launcher gives it, though it begin with a dash
    #[arg(long, value_name = "DIR", allow_hyphen_values = true)]
    pub(crate) run_dir: PathBuf,
    /// CPU threads
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: usize,
    /// CPU threads while it trains the target
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) target_threads: Option<usize>,
    /// Number of the GPU to use
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<usize>,
    /// Which rank, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) rank: usize,
    /// How many ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) ranks: usize,
    /// File descriptor of the memory that ranks share
    #[arg(long, value_name = "FD")]
    pub(crate) memory_fd: Option<i32>,
    /// File descriptor of the listener by which other ranks find this one
    #[arg(long, value_name = "FD", conflicts_with = "memory_fd")]
    pub(crate) listener_fd: Option<i32>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn running_needs_no_command_name() {
        let cli =
            Cli::try_parse_from(["spd-launch", "a.toml", "--set", "x=1", "--set", "y=2"]).unwrap();
        let run = cli.run.unwrap();
        assert_eq!((run.config.as_str(), run.set.len()), ("a.toml", 2));
        assert_eq!(
            (run.grace, run.hang_seconds, run.restarts, run.gpus),
            (25, None, 0, 0)
        );
        assert!(cli.command.is_none());
    }
}
