//! Commands on the components of runs.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueHint};

use super::values::{at_least_one, file_name, fraction_or_one, not_negative, thread_count};

const ABOUT_COMPARE: &str = "\
A component is a rank-one matrix v u^T. Two are as alike as the absolute cosine of the angle between
them, |v.v'| |u.u'| / (|v| |v'| |u| |u'|). The components of a site of two runs are matched one to one, so
that the sum of the cosines is largest. A component takes part if it is alive: active, by
eval.alive_threshold, in at least one of the held-out rows that the figures of its run are drawn from.

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
    /// Directory for `compare.json` and `compare.svg`, which shows the cosines of each site
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) look: LookArgs,
}

/// How the components of a run are looked at and printed.
#[derive(Debug, Args)]
pub(crate) struct LookArgs {
    /// Print everything as one JSON object on one line
    #[arg(long)]
    pub(crate) json: bool,
    /// Override a setting of the evaluation, like `eval.batch_size=8`; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
}

/// A prompt.
#[derive(Debug, Args)]
#[group(id = "prompt", multiple = false)]
pub(crate) struct PromptArgs {
    /// Text of the prompt, which the tokenizer of the run's dataset makes tokens of
    #[arg(value_name = "TEXT")]
    pub(crate) text: Option<String>,
    /// Text of the prompt, which may begin with a dash
    #[arg(long = "text", value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) text_flag: Option<String>,
    /// File with the text
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: Option<PathBuf>,
    /// Token ids, like `12,7,300`
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub(crate) ids: Vec<u32>,
    /// Features of a toy, like `0,3`: a row of each, in which it alone is on, with 0.75
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) feature: Vec<usize>,
}

const ABOUT_PROBE: &str = "\
The tables show the components that are active, by eval.alive_threshold, at some token. `.` is an
importance below 0.005. Heads at a token count by the largest.

The smallest set: the components of all sites are put in the order of their largest importance on the
prompt (equal ones by their logits). A binary search finds how many of the first ones, with mask 1 and
all others 0, keep the prediction within --kl; then each of these, the least important first, is left
out where the prediction keeps without it (for sets of up to 256). The distance is the KL divergence
from the target's next token, a mean over positions; of a toy it is the part of the output's squares
that is lost, a mean over rows. `spd-launch ablate RUN --keep` measures such a set on other text.

--json prints one object: run, step, alive_threshold, tokens (id, text) or features, sites and smallest. A
site has site, C and the components that are important somewhere: component, largest, importances (one
for each token or feature). smallest has within, all, distance, components, tried and passes.";

/// `spd-launch probe`.
#[derive(Debug, Args)]
#[command(after_help = ABOUT_PROBE)]
pub(crate) struct ProbeArgs {
    /// Run directory; the run may go on meanwhile
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Distance of the prediction within which the smallest set keeps it, in nats
    #[arg(long, value_name = "X", default_value_t = 0.1, value_parser = not_negative)]
    pub(crate) kl: f64,
    /// Count the prediction at the last token alone
    #[arg(long)]
    pub(crate) last: bool,
    /// Keep the weight deltas beside the set
    #[arg(long)]
    pub(crate) delta: bool,
    /// Components of each site to show, the most important ones
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one)]
    pub(crate) top: usize,
    #[command(flatten)]
    pub(crate) look: LookArgs,
    /// Write the object of --json to probes/NAME.json in the run directory, which the page of the
    /// run shows
    #[arg(long, value_name = "NAME", value_parser = file_name)]
    pub(crate) save: Option<String>,
}

const ABOUT_ABLATE: &str = "\
SITE is a module path or a pattern as in run files, like `*.mlp.*`; INDEX a number, a range like 3-7, or *.
An INDEX without a SITE is of the site before it: linear1:3,7-9,linear2:0.

--remove subtracts the components from the weights; the rest of each matrix stays, with its delta, and
other sites are the target's. --keep leaves these components alone at all sites, without deltas if
--delta is not given.

On a prompt: KL divergence and cross-entropy of the next token at each position, the likeliest next
tokens, and with --generate the likeliest continuation. Without a prompt: means over the held-out rows
of the run's evaluation; of a toy, the output for each feature on its own.

--json prints one object: run, step, edit, components and change, which has `prompt` (kl, ce, positions,
next, generated), `held_out` (rows, positions, kl, ce) or `features` (feature, output, and others, the
largest change of another output). Numbers in pairs are before and after.";

/// `spd-launch ablate`.
#[derive(Debug, Args)]
#[command(after_help = ABOUT_ABLATE, group = ArgGroup::new("edit").required(true))]
pub(crate) struct AblateArgs {
    /// Run directory; the run may go on meanwhile
    #[arg(value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) run: PathBuf,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Components to remove; repeatable
    #[arg(long, value_name = "SITE:INDEX,...", group = "edit")]
    pub(crate) remove: Vec<String>,
    /// Components to keep, of all sites; repeatable
    #[arg(long, value_name = "SITE:INDEX,...", group = "edit")]
    pub(crate) keep: Vec<String>,
    /// Keep the weight deltas beside the components that are kept
    #[arg(long, conflicts_with = "remove")]
    pub(crate) delta: bool,
    /// Tokens to generate behind the prompt, with and without the ablation
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) generate: usize,
    /// Dataset for the held-out rows instead of the run's, of the same tokenizer
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "prompt")]
    pub(crate) data: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) look: LookArgs,
}
