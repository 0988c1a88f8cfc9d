//! Parses `--seeds` and `--sweep`: keys, their values, and all combinations.

/// Most runs of one sweep; a larger number is a typo.
const MOST: usize = 10_000;

/// A key and its values, one run for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Axis {
    flag: &'static str,
    /// Key of the run file.
    pub(crate) key: String,
    /// Values, as for `--set`.
    pub(crate) values: Vec<String>,
}

impl Axis {
    /// The flag for messages: `--seeds`, `--sweep train.lr`.
    pub(crate) fn said(&self) -> String {
        match self.flag {
            SEEDS => SEEDS.to_owned(),
            flag => format!("{flag} {}", self.key),
        }
    }
}

const SEEDS: &str = "--seeds";
const SWEEP: &str = "--sweep";

/// A value for each axis, in their order.
pub(crate) type Combination = Vec<(String, String)>;

/// The axes: the swept keys in their order, then the seeds.
///
/// # Errors
///
/// All faults of the arguments, one line each.
pub(crate) fn axes(
    seeds: Option<&str>,
    sweep: &[String],
    set: &[String],
) -> Result<Vec<Axis>, Vec<String>> {
    let mut faults = Vec::new();
    let mut axes: Vec<Axis> = Vec::new();
    let read = sweep.iter().map(|text| swept(text));
    for axis in read.chain(seeds.map(seeds_axis)) {
        match axis {
            Ok(axis) => axes.push(axis),
            Err(fault) => faults.push(fault),
        }
    }
    for (index, axis) in axes.iter().enumerate() {
        let Axis { flag, key, values } = axis;
        let said = axis.said();
        if let Some(twice) = repeated(values) {
            faults.push(format!(
                "{said}: the value {twice} is repeated; each run is made once"
            ));
        }
        if axes[..index].iter().any(|other| other.key == *key) {
            faults.push(format!(
                "{said}: `{key}` is swept twice; give all of its values at once"
            ));
        }
        if set.iter().any(|set| key_of(set) == key) {
            faults.push(format!(
                "--set {key}: {flag} also gives it values; leave one of them out"
            ));
        }
    }
    let runs = axes
        .iter()
        .fold(1_usize, |runs, axis| runs.saturating_mul(axis.values.len()));
    if runs > MOST {
        faults.push(format!(
            "{runs} combinations of values are more than {MOST} runs; sweep fewer"
        ));
    }
    if faults.is_empty() {
        Ok(axes)
    } else {
        Err(faults)
    }
}

/// All combinations of values; the last axis varies fastest.
pub(crate) fn combinations(axes: &[Axis]) -> Vec<Combination> {
    let mut all: Vec<Combination> = vec![Vec::new()];
    for Axis { key, values, .. } in axes {
        all = all
            .iter()
            .flat_map(|before| {
                values.iter().map(|value| {
                    let mut combination = before.clone();
                    combination.push((key.clone(), value.clone()));
                    combination
                })
            })
            .collect();
    }
    all
}

/// The directory name of a combination, like `train.lr=1e-3,seed=4`; characters special to shells
/// or file systems become `_`.
pub(crate) fn name(combination: &[(String, String)]) -> String {
    let plain = |text: &str| text.replace(|c: char| !is_plain(c), "_");
    let parts: Vec<String> = combination
        .iter()
        .map(|(key, value)| format!("{}={}", plain(key), plain(value)))
        .collect();
    parts.join(",")
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | '_')
}

fn key_of(set: &str) -> &str {
    set.split_once('=').map_or(set, |(key, _)| key).trim()
}

fn repeated(values: &[String]) -> Option<&str> {
    let mut sorted: Vec<&str> = values.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .find_map(|pair| (pair[0] == pair[1]).then_some(pair[0]))
}

fn swept(text: &str) -> Result<Axis, String> {
    let Some((key, values)) = text.split_once('=') else {
        return Err(format!(
            "--sweep {text}: expected KEY=A,B,C, such as train.lr=1e-3,2e-3"
        ));
    };
    let key = key.trim();
    let values = pieces(values)
        .ok_or_else(|| format!("--sweep {key}: a bracket or a quote is not closed"))?;
    if let Some(empty) = values.iter().position(String::is_empty) {
        return Err(format!("--sweep {key}: value {} is empty", empty + 1));
    }
    Ok(Axis {
        flag: SWEEP,
        key: key.to_owned(),
        values,
    })
}

/// Splits at commas outside of brackets and quotes; `None` if one of those is not closed.
fn pieces(text: &str) -> Option<Vec<String>> {
    let mut pieces = vec![String::new()];
    let (mut depth, mut quote) = (0_usize, None);
    for c in text.chars() {
        match (quote, c) {
            (Some(open), _) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{') => depth += 1,
            (None, ']' | '}') => depth = depth.checked_sub(1)?,
            (None, ',') if depth == 0 => {
                pieces.push(String::new());
                continue;
            }
            (None, _) => {}
        }
        pieces.last_mut()?.push(c);
    }
    let closed = depth == 0 && quote.is_none();
    closed.then(|| pieces.iter().map(|piece| piece.trim().to_owned()).collect())
}

fn seeds_axis(text: &str) -> Result<Axis, String> {
    let mut values = Vec::new();
    for part in text.split(',') {
        let unknown = || {
            format!(
                "--seeds {text}: expected seeds like 0..20 (20 is left out) or 1,4,9, found `{part}`"
            )
        };
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| unknown());
        let (first, end) = match part.split_once("..") {
            None => {
                let seed = number(part)?;
                (seed, seed.saturating_add(1))
            }
            Some((first, last)) => match last.strip_prefix('=') {
                Some(last) => (number(first)?, number(last)?.saturating_add(1)),
                None => (number(first)?, number(last)?),
            },
        };
        if end <= first {
            return Err(format!(
                "--seeds {text}: {part} has no seeds; the end is excluded, so {first}..{} is seed {first}",
                first.saturating_add(1)
            ));
        }
        if end - first > MOST as u64 {
            return Err(format!(
                "--seeds {text}: {} seeds are more than {MOST} runs; sweep fewer",
                end - first
            ));
        }
        values.extend((first..end).map(|seed| seed.to_string()));
    }
    Ok(Axis {
        flag: SEEDS,
        key: "seed".to_owned(),
        values,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(seeds: Option<&str>, sweep: &[&str], set: &[&str]) -> Vec<String> {
        let owned = |texts: &[&str]| -> Vec<String> {
            texts.iter().map(|text| (*text).to_owned()).collect()
        };
        axes(seeds, &owned(sweep), &owned(set)).unwrap_err()
    }

    fn values(seeds: &str) -> Vec<String> {
        axes(Some(seeds), &[], &[]).unwrap().remove(0).values
    }

    #[test]
    fn seeds_are_numbers_and_ranges() {
        assert_eq!(values("0..3"), ["0", "1", "2"]);
        assert_eq!(values("7,0..=1, 20"), ["7", "0", "1", "20"]);
    }

    #[test]
    fn invalid_seeds_are_refused() {
        for (seeds, fault) in [
            (
                "5..5",
                "--seeds 5..5: 5..5 has no seeds; the end is excluded, so 5..6 is seed 5",
            ),
            (
                "0,9..3",
                "--seeds 0,9..3: 9..3 has no seeds; the end is excluded, so 9..10 is seed 9",
            ),
            (
                "0..x",
                "--seeds 0..x: expected seeds like 0..20 (20 is left out) or 1,4,9, found `0..x`",
            ),
            (
                "1,",
                "--seeds 1,: expected seeds like 0..20 (20 is left out) or 1,4,9, found ``",
            ),
            (
                "0..2000000000",
                "--seeds 0..2000000000: 2000000000 seeds are more than 10000 runs; sweep fewer",
            ),
            (
                "0..3,2",
                "--seeds: the value 2 is repeated; each run is made once",
            ),
        ] {
            assert_eq!(faults(Some(seeds), &[], &[]), [fault]);
        }
    }

    #[test]
    fn values_are_split_at_outer_commas() {
        let axes = axes(
            None,
            &["a.b = 1, [2,3] ,{x=1,y='a,b'},\"c,d\"".to_owned()],
            &[],
        );
        let axis = &axes.unwrap()[0];
        assert_eq!(axis.key, "a.b");
        assert_eq!(axis.values, ["1", "[2,3]", "{x=1,y='a,b'}", "\"c,d\""]);
    }

    #[test]
    fn invalid_sweeps_are_refused() {
        assert_eq!(
            faults(
                Some("1"),
                &["lr", "a=1,,2", "b=[1,2", "c=1]"],
                &["train.lr=1"]
            ),
            [
                "--sweep lr: expected KEY=A,B,C, such as train.lr=1e-3,2e-3",
                "--sweep a: value 2 is empty",
                "--sweep b: a bracket or a quote is not closed",
                "--sweep c: a bracket or a quote is not closed",
            ]
        );
        assert_eq!(
            faults(Some("1"), &["seed=1,2", "x=1,1"], &["x = 3"]),
            [
                "--sweep x: the value 1 is repeated; each run is made once",
                "--set x: --sweep also gives it values; leave one of them out",
                "--seeds: `seed` is swept twice; give all of its values at once",
            ]
        );
        assert_eq!(
            faults(Some("0..1000"), &["x=1,2,3,4,5,6,7,8,9,10,11"], &[]),
            ["11000 combinations of values are more than 10000 runs; sweep fewer"]
        );
    }

    #[test]
    fn every_combination_has_its_own_name() {
        let axes = axes(Some("0..2"), &["train.lr=1e-3,{start = 1}".to_owned()], &[]);
        let combinations = combinations(&axes.unwrap());
        let names: Vec<String> = combinations.iter().map(|c| name(c)).collect();
        assert_eq!(
            names,
            [
                "train.lr=1e-3,seed=0",
                "train.lr=1e-3,seed=1",
                "train.lr=_start___1_,seed=0",
                "train.lr=_start___1_,seed=1"
            ]
        );
    }
}
