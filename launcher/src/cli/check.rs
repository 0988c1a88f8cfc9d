//! `spd-launch check`.

use clap::{Args, ValueHint};
use spd_trainer::causality;

use super::values::{at_least_one, thread_count};

const MEASUREMENTS: &str = "\
Three measurements, on the processor:
  suffix probe   one token changes, the last or the middle one; the logits at all positions before it
                 have to stay, bit for bit. With the weights of the network, or starting values
  random stream  the same network, cut to 2 layers of width 64, learns to predict fresh uniform
                 tokens of 8 symbols. A causal one has a loss of at least ln 8 = 2.0794
  control        both again without causal masks, where both have to see the leak

The plan, progress, page, lists of runs, summary and trackers of a network that leaks say LEAKY. The
exit code is 1 if a network does not say what was measured, or the control shows nothing.";

/// `spd-launch check`.
#[derive(Debug, Args)]
#[command(after_help = MEASUREMENTS)]
pub(crate) struct CheckArgs {
    /// Run file, or the name of one in `configs/` or of a shipped one (`spd-launch configs`); or
    /// weights with a config.json: their directory, or a file in it
    #[arg(value_name = "RUNFILE|WEIGHTS", value_hint = ValueHint::AnyPath)]
    pub(crate) what: String,
    /// Steps of the random stream
    #[arg(long, value_name = "N", default_value_t = causality::STEPS, value_parser = steps)]
    pub(crate) steps: u64,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// Override a value of the run file, like `target.n_layer=2`; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print all numbers as one JSON object on one line
    #[arg(long)]
    pub(crate) json: bool,
}

/// More than a day of steps is a typo.
const MOST_STEPS: usize = 1_000_000;

fn steps(text: &str) -> Result<u64, String> {
    match at_least_one(text) {
        Ok(steps @ 4..=MOST_STEPS) => Ok(steps as u64),
        _ => Err(format!(
            "expected 4 to {MOST_STEPS} steps; the mean of the last ones needs a few"
        )),
    }
}
