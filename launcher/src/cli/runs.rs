//! Commands on existing runs and on checkpoints of the SPD reference.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use spd_configs::Destination;

use super::values::{thread_count, tracker};

/// `spd-launch export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Run directory
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Directory for model_STEP.pth, final_config.yaml, config.toml and the target
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Write rows, figures, config and page instead of the checkpoint: DIR/offline-run-DATE_TIME-ID
    /// for `wandb sync`, from a cluster without a network
    #[arg(long)]
    pub(crate) wandb: bool,
}

/// `spd-launch import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// `ComponentModel.state_dict()` by `torch.save`, or its tensors as safetensors
    #[arg(value_name = "CHECKPOINT")]
    pub(crate) checkpoint: PathBuf,
    /// Its run file [default: config.toml or final_config.yaml beside it]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Run directory to make
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Finished steps [default: those in its name, as in model_1000.pth]
    #[arg(long, value_name = "N")]
    pub(crate) step: Option<u64>,
    /// Override a key of the run file, as for a run
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

/// `spd-launch figures`, and the options shared with `spd-launch eval`.
#[derive(Debug, Args)]
pub(crate) struct FiguresArgs {
    /// Run directory; the run may go on meanwhile
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Override a setting of the evaluation, like `eval.components=100`; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Dataset for the evaluation instead of the run's, of the same tokenizer
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) data: Option<PathBuf>,
    /// Directory for the evaluation [default: RUN/evaluations/step-STEP, with a hash of the
    /// settings if they differ from the run's; for unchanged figures, the run's own]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
}

/// `spd-launch eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) of: FiguresArgs,
    /// Print only the row of the evaluation, as a JSON object on one line (tracker/FORMAT.md)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `spd-launch ship`.
#[derive(Debug, Args)]
pub(crate) struct ShipArgs {
    /// Run directories, and directories of sweeps
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Trackers instead of those of each run: wandb, mlflow, tensorboard, or several with commas
    #[arg(long, value_name = "TRACKER", value_delimiter = ',', value_parser = tracker)]
    pub(crate) tracker: Vec<Destination>,
}

/// `spd-launch report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Run directories, and directories of sweeps
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// File for one page of all of them [default: report.html in each]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

/// `spd-launch watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Run directories, and directories of sweeps, shown side by side
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Port on 127.0.0.1 [default: 8420, or a free one]
    #[arg(long, value_name = "N")]
    pub(crate) port: Option<u16>,
}

const FIELDS_OF_RUNS: &str = "\
States:
  waiting   made, and not begun            running   its launcher lives
  stopped   exited on request              failed    ended early, and why
  killed    its launcher is gone and left no result: killed, or its machine went down
  done      at its end

--json prints an object a line, for each run, and for each sweep before its runs:
  kind      `run` or `sweep`               path, name, target   its directory; as config.toml says
  leaky     whether its target sees later tokens, so that its loss is none of a language model
  state     as above                       note      a remark, or null
  step, steps         finished and planned; null where they are not known
  phase, phase_step, phase_steps           its phase, and steps of that if not the run's
  loss      `loss/total` of its last row of training
  began, heard        unix time of its newest launch and of its last sign of life
  seconds   duration of that launch
  steps_per_s, seconds_left                while it runs
  saved     step of its newest checkpoint
  pid, host           of its launcher, the last one
  sweep     the directory of its sweep, or null
  runs      of a sweep, the number of its runs
  problems  files that could not be read, a line each";

/// `spd-launch runs`.
#[derive(Debug, Args)]
#[command(after_help = FIELDS_OF_RUNS)]
pub(crate) struct RunsArgs {
    /// Directories that contain runs, run directories, and directories of sweeps [default: runs]
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dirs: Vec<PathBuf>,
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// `spd-launch tail`.
#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    /// Run directory
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Number of existing rows to print first
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    pub(crate) rows: usize,
    /// Also print rows about phases, speed and machines
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Wait for a run that has not begun, and while it is stopped; end when it is done
    #[arg(short, long)]
    pub(crate) wait: bool,
    /// Print the rows as in their files (tracker/FORMAT.md); a rollback is printed as
    /// `{"kind":"rolled_back","step":..}`, and discards the rows after that step
    #[arg(long)]
    pub(crate) json: bool,
}

/// `spd-launch stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Run directories, and directories of sweeps
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Return without waiting for their exit
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Kill their ranks, as a second Ctrl-C does: they go on from their newest checkpoints
    #[arg(long)]
    pub(crate) now: bool,
}
