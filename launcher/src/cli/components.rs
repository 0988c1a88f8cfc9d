//! Commands on the components of runs.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::values::{fraction_or_one, thread_count};

const ABOUT_COMPARE: &str = "\
A component is a rank-one matrix v u^T. Two are as alike as the absolute cosine of the angle between
them, |v.v'| |u.u'| / (|v| |v'| |u| |u'|). The components of a site of two runs are matched one to one, so
that the sum of the cosines is largest. Those take part that are alive: active, by
eval.alive_threshold, in at least one of the held-out rows that the figures of their run are drawn from.

Columns:
  alive     components of each run that take part
  shared    matches of at least --above; and these over the mean of the two numbers of components
  mean, median        cosine of all matches
  alone     components of a run without a match that is shared

Of more than two runs each is compared with the first, and means over these pairs follow.

--json prints one object: above; runs with run and step; pairs with runs (numbers from 0), sites and all.
Each has alive, shared, fraction, mean and median, and a site also its name, matches (components of
both runs, cosine) and alone; means has site (null for all), fraction and mean.";

/// `spd-launch compare`.
#[derive(Debug, Args)]
#[command(after_help = ABOUT_COMPARE)]
pub(crate) struct CompareArgs {
    /// Run directories, at least two, of the same sites; they may go on meanwhile
    #[arg(required = true, num_args = 2.., value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Cosine from which on matched components count as shared
    #[arg(long, value_name = "COSINE", default_value_t = 0.9, value_parser = fraction_or_one)]
    pub(crate) above: f64,
    /// Compare runs of targets with other weights too
    #[arg(long)]
    pub(crate) any_target: bool,
    /// Print all matches as one JSON object on one line
    #[arg(long)]
    pub(crate) json: bool,
    /// Directory for `compare.json` and `compare.svg`, which shows the cosines of each site
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    /// Override a setting of the evaluation, like `eval.batch_size=8`; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
}
