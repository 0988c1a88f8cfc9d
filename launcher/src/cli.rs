//! The command line: of a run, and of commands before there is one. Commands on existing runs are
//! in `runs`, parsers of values in `values`.

mod attribute;
mod check;
mod components;
mod harvest;
#[cfg(test)]
mod page;
mod runs;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use spd_configs::Destination;

pub(crate) use self::attribute::AttributeArgs;
pub(crate) use self::check::CheckArgs;
pub(crate) use self::components::{AblateArgs, CompareArgs, ProbeArgs, PromptArgs};
pub(crate) use self::harvest::HarvestArgs;
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
  spd-launch configs/tms_5-2.toml             run it in runs/tms_5-2, or continue it
  spd-launch tms_5-2 --dry-run                print the plan and its memory; create nothing
  spd-launch tms_5-2 --dry-run --slurm > job  a script for sbatch
  spd-launch tms_5-2 --set seed=1 --out runs/seed1
  spd-launch tms_5-2 --gpus 1                 on one GPU
  spd-launch tms_40-10 --cpus 2               with two CPU ranks
  spd-launch shakespeare --gpus 4             with four ranks, one on each GPU
  srun --ntasks-per-node=1 spd-launch tms_40-10 --cpus 2
                                              with two ranks on each node of a Slurm job
  spd-launch tms_5-2 --fresh                  start over; move the old directory aside
  spd-launch tms_5-2 --seeds 0..20            20 runs that share the cores, and one table
  spd-launch tms_5-2 --sweep train.lr=1e-3,2e-3 --seeds 0..5
  spd-launch tokenize stories.txt --tokenizer bytes --out data/stories
  spd-launch inspect data/stories/train       describe it, verify it, show excerpts
  spd-launch check shakespeare                measure whether its target sees later tokens
  spd-launch export runs/tms_5-2 --out for-pytorch
  spd-launch import s-1234abcd/model_10000.pth --out runs/theirs
  spd-launch bench tms_5-2 --phases
  spd-launch profile tms_5-2 --trace step.json
  spd-launch figures runs/tms_5-2             draw the newest checkpoint again
  spd-launch eval runs/shakespeare --set eval.batches=100 --set eval.components=100
                                              evaluate it again with other settings
  spd-launch harvest runs/shakespeare         tables of what each of its components does
  spd-launch attribute runs/shakespeare       a table of which of them the others come from
  spd-launch compare runs/tms_5-2 runs/seed1  match their components one to one
  spd-launch probe runs/shakespeare 'To be, or'
                                              components on a text, and the smallest set that keeps it
  spd-launch ablate runs/shakespeare --text 'To be, or' --remove '*.c_fc:3,7-9' --generate 50
                                              the output without some components
  spd-launch watch runs/tms_5-2 runs/seed1    show curves, figures and components live
  spd-launch report runs/tms_5-2.sweep        the same as one file
  spd-launch runs                             every run under runs: its state, step, loss, time left
  spd-launch tail runs/tms_5-2                its rows as they come, until it ends
  spd-launch stop runs/tms_5-2                ask it to save and exit, as Ctrl-C does
  spd-launch configs tms_5-2 > mine.toml      print a shipped run file for editing
  spd-launch doctor                           show resources, GPUs and what is missing
  spd-launch doctor --deep                    also probe GPU 0

The command that started a run continues it. After SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or SIGHUP, or Stop
on its page at W&B, it saves and exits; a second Ctrl-C or SIGTERM kills it at once. Under nohup, SIGHUP
is ignored. All of this also holds for several runs at once, in runs/NAME.sweep; a failed one does not
affect the others.

Exit codes:
  0  done; for several runs, all of them
  1  failed: the first line of the message names the rank, place and cause; for several runs, the table
     shows which, and the others are done; for `doctor`, no run can be made here, or with --deep a
     probe failed or none could run; for `check`, the network is not what it says, or the control
     shows nothing
  2  bad input: command line, run file, target, data or directory; nothing was created,
     unless a rank found it; for `stop`, a run that could not be asked: the others were
  3  stopped on request; the same command continues
  130, 143  killed by a second Ctrl-C or SIGTERM";

/// The version of this program, with its commit if it was built in a clone: see `build.rs`.
pub(crate) const VERSION: &str = env!("SPD_VERSION");

/// Trains Stochastic Parameter Decompositions: runs the file CONFIG to its end, and resumes it
#[derive(Debug, Parser)]
#[command(
    name = "spd-launch",
    version = VERSION,
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

/// All commands except running a file, which has no name.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make a token dataset from text, JSON lines or parquet; after a kill, the same command goes
    /// on
    Tokenize(TokenizeArgs),
    /// Describe and verify a dataset, checkpoint, file of weights or run directory
    Inspect(InspectArgs),
    /// Measure whether a language model sees the tokens that it is to predict
    Check(CheckArgs),
    /// Write the newest checkpoint of a run in the format of the SPD reference, or the run for
    /// `wandb sync`
    Export(ExportArgs),
    /// Make a run directory from a checkpoint of the SPD reference
    Import(ImportArgs),
    /// Time training steps
    Bench(BenchArgs),
    /// Show where the time of a run's step goes
    Profile(ProfileArgs),
    /// Evaluate the newest checkpoint of a run again, with other settings or on other data
    Eval(EvalArgs),
    /// Draw the figures of a run again, from its newest checkpoint
    Figures(FiguresArgs),
    /// Read text through the newest checkpoint of a run, and write tables of what each component
    /// does; after a kill, the same command goes on
    Harvest(HarvestArgs),
    /// Write a table of what the activations of components come from, and the logits, at positions
    /// of a harvest; after a kill, the same command goes on
    Attribute(AttributeArgs),
    /// Match the components of runs of one target one to one
    Compare(CompareArgs),
    /// Show the importance of components on a prompt, and the smallest set that keeps the
    /// prediction
    Probe(ProbeArgs),
    /// Measure the output without some components, or with some alone
    Ablate(AblateArgs),
    /// Send rows that trackers have not received yet
    Ship(ShipArgs),
    /// Write a page about runs: curves, figures, components, differences
    Report(ReportArgs),
    /// Serve that page on this machine, live
    Watch(WatchArgs),
    /// List runs with state, progress and times
    Runs(RunsArgs),
    /// Print the rows of a run as they come, until it ends
    Tail(TailArgs),
    /// Ask runs of this machine to save and exit, as Ctrl-C does
    Stop(StopArgs),
    /// List the run files that are part of this program, or print one
    Configs(ConfigsArgs),
    /// Show what this machine has for runs, on GPUs too, and what is missing
    Doctor(DoctorArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// One rank of a probe, as started by `doctor --deep`
    #[command(hide = true)]
    DoctorProbe(DoctorProbeArgs),
    /// One rank, as started by the launcher
    #[command(hide = true)]
    Rank(RankArgs),
}

/// `spd-launch CONFIG`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Run file, or the name of one in `configs/` or of a shipped one (`spd-launch configs`)
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) config: String,
    /// Run directory [default: runs/NAME, where NAME is in the run file; runs/NAME.sweep for
    /// several runs]
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// Memory that the run may use [default: the free memory of the machine and its control groups]
    #[arg(long, value_name = "SIZE", value_parser = memory::size)]
    pub(crate) memory: Option<usize>,
    /// Override a value of the run file, like `train.steps=200`; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Run several seeds, like `0..20` (without 20) or `1,4,9`
    #[arg(long, value_name = "SEEDS")]
    pub(crate) seeds: Option<String>,
    /// Trackers that receive metrics, instead of the file's `[tracker]`: wandb, mlflow,
    /// tensorboard, or several with commas
    #[arg(long, value_name = "TRACKER", value_delimiter = ',', value_parser = tracker)]
    pub(crate) tracker: Vec<Destination>,
    /// Run each value of a key; repeatable, for all combinations
    #[arg(long, value_name = "KEY=A,B,C")]
    pub(crate) sweep: Vec<String>,
    /// Runs at a time, as far as they fit into memory, which share the threads [default: one for
    /// each thread]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) jobs: Option<usize>,
    /// Check everything, print the plan, create nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print a script for Slurm's `sbatch` that runs this command on NODES nodes (1 by default),
    /// saves before the job's time limit and goes on in the next job
    #[arg(
        long,
        value_name = "NODES",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        value_parser = node_count,
        requires = "dry_run",
        conflicts_with_all = ["seeds", "sweep"]
    )]
    pub(crate) slurm: Option<u64>,
    /// Start over: first move an old run directory to DIR.old-N, or its content to DIR/old-N
    #[arg(long)]
    pub(crate) fresh: bool,
    /// GPUs of each node, one rank on each (`spd-launch doctor` lists them)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = gpu_count)]
    pub(crate) gpus: usize,
    /// CPU ranks of each node, which share batches and threads
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = rank_count,
        conflicts_with_all = ["gpus", "seeds", "sweep"]
    )]
    pub(crate) cpus: usize,
    /// Seconds that the launchers of a run on several nodes wait for each other
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub(crate) join_seconds: u64,
    /// Seconds that a rank has to save and exit when asked to; Slurm and Kubernetes give 30
    #[arg(long, value_name = "SECONDS", default_value_t = 25)]
    pub(crate) grace: u64,
    /// Seconds without progress after which a rank is killed as hung; 0 for no limit [default: 20
    /// times its longest pause in the phase so far, at least a minute; ten minutes where none is
    /// known]
    #[arg(long, value_name = "SECONDS")]
    pub(crate) hang_seconds: Option<u64>,
    /// Restarts of all ranks from the last good checkpoint when one has died, as long as each time
    /// there is a newer one. Bad input, numbers that are not finite and a lack of memory would end
    /// them again and are not restarted
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) restarts: u32,
    /// Print one JSON object a line: `time`, `kind` (`plan`, `note`, `detail`, `error`, `end`,
    /// `result`) and `text`; the result of a run has its summary.json as `result`, that of several
    /// their sweep.json
    #[arg(long)]
    pub(crate) json: bool,
    /// CPU threads while a target is trained; more where other runs wait for it
    #[arg(long, value_name = "N", value_parser = thread_count, hide = true)]
    pub(crate) target_threads: Option<usize>,
    /// Program started instead of this one; for tests of the launcher
    #[arg(long, value_name = "PATH", hide = true)]
    pub(crate) rank_program: Option<PathBuf>,
}

/// `spd-launch tokenize`.
#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// Text, JSON lines (.jsonl, .ndjson, .json) and parquet, also compressed (.gz, .zst);
    /// directories of them and patterns; in the order of the dataset
    #[arg(required = true, value_name = "FILES")]
    pub(crate) files: Vec<PathBuf>,
    /// `bytes`, a tokenizer.json, or hf://OWNER/NAME@REVISION, whose tokenizer.json is fetched
    #[arg(long, value_name = "bytes|PATH|hf://NAME")]
    pub(crate) tokenizer: String,
    /// Directory to create; the datasets are `train` and `val` in it
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Fraction of the text, at its end, that is held out for evaluation [default: 0.1]
    #[arg(long, value_name = "F", value_parser = fraction)]
    pub(crate) val_fraction: Option<f64>,
    /// Text that separates two documents of a file [default: a file is one document]
    #[arg(long, value_name = "S")]
    pub(crate) separator: Option<String>,
    /// Key of JSON lines, or column of parquet, with the text or with ids of this tokenizer
    /// [default: text]
    #[arg(long, value_name = "NAME")]
    pub(crate) column: Option<String>,
    /// Token to add after each document, as in the vocabulary
    #[arg(long, value_name = "TEXT")]
    pub(crate) eos: Option<String>,
    /// Maximum tokens of a shard [default: 2^26]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) shard_tokens: Option<usize>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// Replace existing datasets
    #[arg(long)]
    pub(crate) overwrite: bool,
}

/// `spd-launch inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Dataset (a directory, .bin or .idx), checkpoint, .safetensors file or run directory
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Type of the ids of a bare .bin
    #[arg(long, value_name = "u16|u32", value_parser = ["u16", "u32"])]
    pub(crate) dtype: Option<String>,
}

/// `spd-launch bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Workloads; an unknown name lists the known ones
    #[arg(required_unless_present = "compile_only", value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Time nothing; compile the kernels of the workloads (of all, in the timed precisions, where
    /// none is named) and of `doctor --deep` for a GPU that need not be here, into the cache of
    /// runs on a GPU
    #[arg(
        long,
        requires = "arch",
        conflicts_with_all = ["gpus", "cpus", "vary", "out", "steps", "warmup"]
    )]
    pub(crate) compile_only: bool,
    /// Architecture of that GPU, like `sm_90` for an H100 (`spd-launch doctor` shows it)
    #[arg(long, value_name = "SM", requires = "compile_only", value_parser = architecture)]
    pub(crate) arch: Option<String>,
    /// Timed steps [default: 50]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) steps: Option<usize>,
    /// Steps before the timed ones [default: 10]
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<usize>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// GPUs to use: 0 or 1
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "vary")]
    pub(crate) gpus: usize,
    /// CPU ranks, which share the batch and the threads
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = rank_count,
        conflicts_with_all = ["gpus", "vary", "phases"]
    )]
    pub(crate) cpus: usize,
    /// The rank of a process that the first one started
    #[arg(long, value_name = "N", hide = true, requires = "memory_fd")]
    pub(crate) rank: Option<usize>,
    /// The workload of that process
    #[arg(long, value_name = "NAME", hide = true, requires = "rank")]
    pub(crate) only: Option<String>,
    /// File descriptor of the memory that ranks share
    #[arg(long, value_name = "FD", hide = true)]
    pub(crate) memory_fd: Option<i32>,
    /// Rows per step instead of the workload's
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch: Option<usize>,
    /// Tokens per row instead of the workload's
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) seq: Option<usize>,
    /// Time the step at several values of C, batch, seq, sites or samples, and print how it grows
    #[arg(long, value_name = "KEY=A,B,C", conflicts_with = "phases", value_parser = Vary::parse)]
    pub(crate) vary: Option<Vary>,
    /// Precision: fp32, tf32 on a GPU, or bf16 where the device has instructions for it [default:
    /// as the name says, or fp32]
    #[arg(long, value_name = "P")]
    pub(crate) precision: Option<String>,
    /// Also time the parts of a step, and print tables to stderr; with --compile-only, the planned
    /// work of each op of the step
    #[arg(long)]
    pub(crate) phases: bool,
    /// File that the JSON lines are appended to
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

impl RunArgs {
    /// Ranks of each node: one on each GPU, or those on the CPU.
    pub(crate) fn ranks(&self) -> usize {
        // They exclude each other.
        self.cpus.max(self.gpus)
    }

    /// CPU threads of each rank.
    pub(crate) fn threads_of_rank(&self) -> usize {
        (threads(self.threads) / self.ranks()).max(1)
    }

    /// The flag that sets the ranks.
    pub(crate) fn flag(&self) -> &'static str {
        if self.gpus > 0 { "--gpus" } else { "--cpus" }
    }
}

/// `spd-launch profile`.
#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Run file, or the name of one in `configs/` or of a shipped one (`spd-launch configs`)
    #[arg(value_hint = ValueHint::FilePath)]
    pub(crate) config: String,
    /// Profiled steps [default: 20]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) steps: Option<usize>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// GPUs to use: 0 or 1
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpus: usize,
    /// Override a value of the run file, like `train.batch_size=64`; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// File for a trace of the ops, for Perfetto or Chrome
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}

/// `spd-launch configs`.
#[derive(Debug, Args)]
pub(crate) struct ConfigsArgs {
    /// The run file to print [default: list all]
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

/// Shells with completion scripts.
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
    /// Also probe a GPU: libraries, copies, primitives of kernels, graphs, sums over ranks; each
    /// probe is a process with a time limit
    #[arg(long)]
    pub(crate) deep: bool,
    /// Number of that GPU
    #[arg(long, value_name = "N", default_value_t = 0, requires = "deep")]
    pub(crate) gpu: usize,
}

/// `spd-launch doctor-probe`.
#[derive(Debug, Args)]
pub(crate) struct DoctorProbeArgs {
    /// Name of the probe
    pub(crate) name: String,
    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: usize,
    /// The number of this process among the probe's
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) rank: usize,
}

/// `spd-launch rank`.
#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// Prepared run directory; the launcher passes it, though it may begin with a dash
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
    /// Rank, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) rank: usize,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) ranks: usize,
    /// File descriptor of the memory that ranks share
    #[arg(long, value_name = "FD")]
    pub(crate) memory_fd: Option<i32>,
    /// File descriptor of the listener for the other ranks
    #[arg(long, value_name = "FD", conflicts_with = "memory_fd")]
    pub(crate) listener_fd: Option<i32>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn clap_accepts_the_definition() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_run_file_needs_no_command() {
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
