//! `spd-launch attribute`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::values::{at_least_one, thread_count};

const ABOUT: &str = "\
The attribution of a component to a target is its activation times the gradient of the target, summed
over the positions of a row. The network is the target itself, as the sum of all components and weight
deltas. The part that goes through another site counts as that site's. A target is one of:
  SITE:INDEX   the activation x V of a component, where it is active: at N of its examples in the harvest
  logits       the logit of the token that the network expects next, less the mean of all logits there

SITE is a module path or a pattern as in run files, like `*.mlp.*`; INDEX a number, a range like 3-7, or *.
Each position of each target takes a pass forward and backward of a row.

The table has, for each target, its sources of the largest means (over positions): their mean and mean of
squares. `harvest/FORMAT.md` has its columns.";

/// `spd-launch attribute`.
#[derive(Debug, Args)]
#[command(after_help = ABOUT)]
pub(crate) struct AttributeArgs {
    /// Run directory
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    /// Harvest whose positions and checkpoint are used [default: the newest in RUN/harvests]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) harvest: Option<PathBuf>,
    /// Targets; repeatable [default: all components with examples in the harvest, and logits]
    #[arg(long, value_name = "SITE:INDEX,...|logits")]
    pub(crate) to: Vec<String>,
    /// Positions of each target, at most [default: 32 of a component, 1024 of the logits]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) positions: Option<usize>,
    /// Sources of each target in the table
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = at_least_one)]
    pub(crate) strongest: usize,
    /// Directory for the table [default: that of the harvest]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// GPUs to use: 0 or 1
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpus: usize,
    /// Seconds between two saves; for tests
    #[arg(long, value_name = "N", hide = true)]
    pub(crate) save_seconds: Option<u64>,
}
