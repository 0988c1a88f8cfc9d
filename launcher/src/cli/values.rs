//! Parsers of flag values, with their errors.

use std::ops::RangeBounds;
use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use spd_configs::{Destination, Shipped};

/// Threads that this process may use: cores, less the limits of affinity and cgroups.
pub(crate) fn threads(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(cores)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// The most threads that may be asked for on a machine with fewer cores. Each takes a quarter of a
/// mebibyte, and those beyond the cores make nothing faster: a larger number is a typo.
const MOST_THREADS: usize = 1024;

pub(super) fn thread_count(text: &str) -> Result<usize, String> {
    let (threads, cores) = (at_least_one(text)?, cores());
    let most = MOST_THREADS.max(cores);
    if threads <= most {
        return Ok(threads);
    }
    Err(format!(
        "expected at most {most} threads; more than there are cores ({cores} here) make no run faster"
    ))
}

/// A number in a range, which `expected` describes.
fn within<T: FromStr + PartialOrd>(
    text: &str,
    range: impl RangeBounds<T>,
    expected: &str,
) -> Result<T, String> {
    let number = text.parse::<T>().ok();
    let number = number.filter(|number| range.contains(number));
    number.ok_or_else(|| format!("expected {expected}"))
}

pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    within(text, 1.., "a whole number of at least 1")
}

pub(super) fn architecture(text: &str) -> Result<String, String> {
    let number = text.strip_prefix("sm_").unwrap_or_default();
    let digits = number.strip_suffix('a').unwrap_or(number);
    if (2..=3).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return Ok(text.to_owned());
    }
    Err("expected an architecture like sm_80, sm_90 or sm_90a".to_owned())
}

/// The most ranks of one machine that may be asked for: a larger number is a typo.
const MOST_RANKS: usize = 256;

pub(super) fn rank_count(text: &str) -> Result<usize, String> {
    within(text, 1..=MOST_RANKS, &format!("1 to {MOST_RANKS} ranks"))
}

/// The name of a file without its directory and its ending.
pub(super) fn file_name(text: &str) -> Result<String, String> {
    let is_plain = |letter: char| letter.is_alphanumeric() || " _-.".contains(letter);
    if text.starts_with(char::is_alphanumeric) && text.len() <= 100 && text.chars().all(is_plain) {
        return Ok(text.to_owned());
    }
    Err(
        "expected a name that begins with a letter or a digit, of these, blanks, `_`, `-` and `.`"
            .to_owned(),
    )
}

/// Names of the shipped run files.
pub(super) fn shipped() -> PossibleValuesParser {
    PossibleValuesParser::new(Shipped::ALL.iter().map(|shipped| shipped.name))
}

pub(super) fn tracker(text: &str) -> Result<Destination, String> {
    let found = Destination::WORDS.0.iter().find(|(name, _)| *name == text);
    let found = found.map(|(_, destination)| *destination);
    found.ok_or_else(|| "expected wandb, mlflow or tensorboard".to_owned())
}

pub(super) fn node_count(text: &str) -> Result<u64, String> {
    within(text, 1.., "at least 1 node")
}

pub(super) fn gpu_count(text: &str) -> Result<usize, String> {
    within(text, 0..=MOST_RANKS, &format!("0 to {MOST_RANKS} GPUs"))
}

pub(super) fn fraction(text: &str) -> Result<f64, String> {
    within(text, 0.0..1.0, "a number of at least 0 and below 1")
}

pub(super) fn fraction_or_one(text: &str) -> Result<f64, String> {
    within(text, 0.0..=1.0, "a number from 0 to 1")
}

pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    let expected = "a finite number of at least 0";
    within(text, 0.0..f64::INFINITY, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_and_counts_are_checked() {
        assert!(architecture("sm_90").is_ok() && architecture("sm_90a").is_ok());
        for bad in ["", "90", "sm_", "sm_9", "sm_9x", "compute_90", "sm_90b"] {
            assert!(architecture(bad).is_err(), "{bad}");
        }
        assert!(fraction_or_one("1").is_ok() && fraction_or_one("1.1").is_err());
        assert!(file_name("To be, or").is_err() && file_name("To be-1.é").is_ok());
        for bad in ["", ".x", "a/b", "..", " a", "-a", &"x".repeat(101)] {
            assert!(file_name(bad).is_err(), "{bad}");
        }
        assert!(not_negative("0").is_ok() && not_negative("-1").is_err());
        assert!(fraction("0.1").is_ok() && fraction("1").is_err() && fraction("NaN").is_err());
        assert_eq!(thread_count("1024"), Ok(1024));
        assert!(thread_count("1000000").is_err() && thread_count("0").is_err());
        assert!(
            at_least_one("3").is_ok() && at_least_one("0").is_err() && at_least_one("-1").is_err()
        );
    }
}
