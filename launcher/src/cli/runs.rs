//! Commands about runs that there are, and checkpoints of others.

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
    /// Directory for model_STEP.pth and the run's config.toml
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Write its rows, figures and config in place of its checkpoint: DIR/offline-run-DATE-ID for `wandb sync`, from a cluster without
    /// a network
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
    /// A key of the run file anew, as for a run
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

/// `spd-launch figures`, and what `spd-launch eval` has in common with it.
#[derive(Debug, Args)]
pub(crate) struct FiguresArgs {
    /// Run directory; the run may go on meanwhile
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Setting of the evaluation in place of the run's, like `eval.components=100`; may be given many times
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Dataset to evaluate on in place of the run's, of the same tokenizer
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) data: Option<PathBuf>,
    /// Directory for the evaluation [default: RUN/evaluations/step-STEP, with a hash of the settings where they are not the run's; of
    /// figures as the run has them, the run's own]
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
    /// Print the row of the evaluation alone, an object of JSON in a line (tracker/FORMAT.md)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `spd-launch ship`.
#[derive(Debug, Args)]
pub(crate) struct ShipArgs {
    /// Run directories, and directories of sweeps
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Where to, in place of what each run says: wandb, mlflow, tensorboard, or several with commas
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
    /// Run directories, and directories of sweeps, which are shown beside each other
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Port on 127.0.0.1 [default: 8420, or one that is free]
    #[arg(long, value_name = "N")]
    pub(crate) port: Option<u16>,
}

const FIELDS_OF_RUNS: &str = "\
States:
  waiting   made, and not begun            running   its launcher lives
  stopped   left on request; goes on       failed    over before its end, and why
  killed    its launcher is gone without a word: killed, or its machine went down
  done      at its end

--json prints an object a line, for each run, and for each sweep before its runs:
  kind      `run` or `sweep`               path, name, target   its directory; as config.toml says
  state     as above                       note      what is to be known beside that, or null
  step, steps         finished and planned; null where they are not known
  phase, phase_step, phase_steps           what it does, and its steps where they are not the run's
  loss      `loss/total` of its last row of training
  began, heard        unix time of its newest launch, and of what was heard last
  seconds   how long that launch took, or takes
  steps_per_s, seconds_left                while it runs
  saved     step of its newest checkpoint
  pid, host           of its launcher, the last one
  sweep     the directory of its sweep, or null
  problems  what could not be read, a line each";

/// `spd-launch runs`.
#[derive(Debug, Args)]
#[command(after_help = FIELDS_OF_RUNS)]
pub(crate) struct RunsArgs {
    /// Directories with runs in them, run directories, and directories of sweeps [default: runs]
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) dirs: Vec<PathBuf>,
    /// Print objects of JSON, one a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// `spd-launch tail`.
#[derive(Debug, Args)]
pub(crate) struct TailArgs {
    /// Run directory
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Rows that are there already to begin with
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    pub(crate) rows: usize,
    /// Print the rows of phase and speed and of machines too
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Wait for a run that has not begun, and while it is stopped; end when it is done
    #[arg(short, long)]
    pub(crate) wait: bool,
    /// Print the rows as they stand in their files (tracker/FORMAT.md); rows that became void are told as
    /// `{"kind":"rolled_back","step":..}`: those after that step
    #[arg(long)]
    pub(crate) json: bool,
}

/// `spd-launch stop`.
#[derive(Debug, Args)]
pub(crate) struct StopArgs {
    /// Run directories, and directories of sweeps
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Return when they are asked, and not when they have left
    #[arg(long)]
    pub(crate) no_wait: bool,
    /// Have them leave at once, as a second Ctrl-C does: they go on from their newest checkpoints
    #[arg(long)]
    pub(crate) now: bool,
}
