//! `spd-launch harvest`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::values::{at_least_one, gpu_count, rank_count, thread_count};

/// `spd-launch harvest`.
#[derive(Debug, Args)]
pub(crate) struct HarvestArgs {
    /// Run directory; with --merge, directories of harvests
    #[arg(required = true, value_name = "RUN", value_hint = ValueHint::DirPath)]
    pub(crate) runs: Vec<PathBuf>,
    /// Dataset instead of the one that the run is trained on, of the same tokenizer
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, conflicts_with = "merge")]
    pub(crate) data: Option<PathBuf>,
    /// Tokens to read, at most [default: 10000000, or all if there are fewer]
    #[arg(long, value_name = "N", value_parser = tokens, conflicts_with = "merge")]
    pub(crate) tokens: Option<u64>,
    /// Examples of each component, drawn from all positions where it is active [default: 1000]
    #[arg(long, value_name = "N", conflicts_with = "merge")]
    pub(crate) examples: Option<usize>,
    /// Examples of each component at which it is removed; 0 for none [default: 8]
    #[arg(long, value_name = "N", conflicts_with = "merge")]
    pub(crate) removals: Option<usize>,
    /// Leave out the counts of pairs of components, which take most memory
    #[arg(long, conflicts_with = "merge")]
    pub(crate) no_pairs: bool,
    /// Only every N-th part of the text, from part K on, for a machine of N; --merge adds up all
    #[arg(long, value_name = "K/N", value_parser = shard, conflicts_with = "merge")]
    pub(crate) shard: Option<(u64, u64)>,
    /// Add up harvests of one checkpoint: shards, or several datasets
    #[arg(long, requires = "out")]
    pub(crate) merge: bool,
    /// Directory for the tables [default: RUN/harvests/step-STEP, with a hash of the settings if
    /// they are not the defaults]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) out: Option<PathBuf>,
    /// CPU threads [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    pub(crate) threads: Option<usize>,
    /// GPUs, one rank on each
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = gpu_count,
        conflicts_with = "merge"
    )]
    pub(crate) gpus: usize,
    /// CPU ranks, which share parts of the text and threads
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = rank_count,
        conflicts_with_all = ["gpus", "merge"]
    )]
    pub(crate) cpus: usize,
    /// Seconds between two saves; for tests
    #[arg(long, value_name = "N", hide = true)]
    pub(crate) save_seconds: Option<u64>,
    /// The rank of a process that the first one started
    #[arg(long, value_name = "N", hide = true)]
    pub(crate) rank: Option<usize>,
}

fn tokens(text: &str) -> Result<u64, String> {
    at_least_one(text).map(|tokens| tokens as u64)
}

fn shard(text: &str) -> Result<(u64, u64), String> {
    let parsed = text.split_once('/');
    let parsed = parsed.and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    match parsed {
        Some((k, n)) if k < n => Ok((k, n)),
        _ => Err("expected a shard and their number, like 0/4 to 3/4".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_numbered_from_0() {
        assert_eq!(shard("3/4"), Ok((3, 4)));
        for text in ["4/4", "1", "a/2", "1/0", "-1/2"] {
            let line = "expected a shard and their number, like 0/4 to 3/4";
            assert_eq!(shard(text).unwrap_err(), line);
        }
    }
}
