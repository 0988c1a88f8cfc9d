//! Autotuning decisions: in the cache of a machine and in the record of a run.

use std::collections::BTreeMap;
use std::path::PathBuf;

use spd_files::atomic::write_shared;
use xxhash_rust::xxh3::xxh3_128;

use super::compiler::{keep, kept};
use super::product::Algorithm;
use super::{Fault, Result};

/// First line of a run's record. Old runs have it, so it must not change.
const TITLE: &str =
    "how this run computes its sites and products on a GPU; a resumed run goes on with it";

/// How products of a kind are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Autotuned {
    /// Our own kernel computes the product.
    Own,
    /// This algorithm of cublasLt computes the product.
    CublasLt(Algorithm),
}

impl Autotuned {
    fn word(self) -> String {
        match self {
            Self::Own => "own".to_owned(),
            Self::CublasLt(Algorithm(data)) => {
                let data = data.map(|word| format!("{word:016x}"));
                format!("cublaslt-{}", data.concat())
            }
        }
    }

    fn of(word: &str) -> Option<Self> {
        let library = || {
            let digits = word.strip_prefix("cublaslt-")?;
            let mut data = [0; 8];
            for (index, data) in data.iter_mut().enumerate() {
                *data = u64::from_str_radix(digits.get(16 * index..16 * index + 16)?, 16).ok()?;
            }
            Some(Self::CublasLt(Algorithm(data)))
        };
        let mut found = [Self::Own].into_iter().chain(library());
        found.find(|choice| choice.word() == word)
    }
}

/// A decision for a kind, and whether trials made it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decision {
    pub(super) choice: Autotuned,
    pub(super) is_measured: bool,
}

/// Ends the line of a decision that no trial made.
const UNMEASURED: &str = " unmeasured";

/// Decisions about sites, which older runs recorded.
const ABOUT_SITES: [&str; 4] = ["site", "products", "site unmeasured", "products unmeasured"];

impl Decision {
    fn line(self) -> String {
        let end = if self.is_measured { "" } else { UNMEASURED };
        format!("{}{end}", self.choice.word())
    }

    fn of(line: &str) -> Option<Self> {
        let word = line.strip_suffix(UNMEASURED);
        Some(Self {
            choice: Autotuned::of(word.unwrap_or(line))?,
            is_measured: word.is_none(),
        })
    }
}

/// All decisions so far, and the files that keep them.
#[derive(Debug, Default)]
pub(super) struct AutotuneRecord {
    /// Decisions by kind.
    known: BTreeMap<u128, Decision>,
    /// Kinds whose trials had no memory, and recorded algorithms that cublasLt refused, since the
    /// last remarks.
    without_memory: usize,
    refused: usize,
    /// Cache directory of this machine.
    cache: Option<PathBuf>,
    /// Record of the run, and whether decisions are missing from it.
    record: Option<PathBuf>,
    is_behind: bool,
}

impl AutotuneRecord {
    /// No decisions yet; new ones are kept in the directory `cache` of this machine.
    pub(super) fn new(cache: Option<PathBuf>) -> Self {
        Self {
            cache,
            ..Self::default()
        }
    }

    /// Reads the decisions in a record, and keeps all new ones there.
    pub(super) fn keep(&mut self, record: PathBuf) -> Result<()> {
        let told = |found: &str| {
            Fault::new(format!(
                "{}: expected the run's autotuning decisions, found {found}; restore the file, or start over with --fresh",
                record.display()
            ))
        };
        match spd_files::read_to_string(&record) {
            Ok(text) => {
                let mut lines = text.lines();
                if lines.next() != Some(TITLE) {
                    return Err(told("another first line"));
                }
                for line in lines {
                    let (kind, chosen) = line.split_once(' ').unwrap_or((line, ""));
                    let kind = (kind.len() == 32)
                        .then(|| u128::from_str_radix(kind, 16).ok())
                        .flatten();
                    if kind.is_some() && ABOUT_SITES.contains(&chosen) {
                        continue;
                    }
                    let (Some(kind), Some(chosen)) = (kind, Decision::of(chosen)) else {
                        return Err(told(&format!("`{line}`")));
                    };
                    self.known.insert(kind, chosen);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(told(&error.to_string())),
        }
        self.record = Some(record);
        Ok(())
    }

    /// The decision for a kind. If there is none yet, `measure` makes one. If it had no memory for
    /// trials, its decision holds for this run only.
    pub(super) fn of(
        &mut self,
        kind: &str,
        measure: impl FnOnce() -> Result<Decision>,
    ) -> Result<Autotuned> {
        let hash = xxh3_128(kind.as_bytes());
        if let Some(known) = self.known.get(&hash) {
            return Ok(known.choice);
        }
        let cached = self
            .cache
            .as_ref()
            .map(|cache| cache.join(format!("{hash:032x}.autotune")));
        let found = cached
            .as_deref()
            .and_then(kept)
            .and_then(|bytes| Autotuned::of(std::str::from_utf8(&bytes).ok()?));
        let decision = match found {
            Some(choice) => Decision {
                choice,
                is_measured: true,
            },
            None => {
                let decision = measure()?;
                if let (Some(path), true) = (&cached, decision.is_measured) {
                    // If this fails, the next run measures again.
                    let _ = keep(path, decision.choice.word().as_bytes());
                }
                self.without_memory += usize::from(!decision.is_measured);
                decision
            }
        };
        self.known.insert(hash, decision);
        self.is_behind = true;
        Ok(decision.choice)
    }

    /// Puts a choice, which no trial made, in the place of an algorithm that cublasLt refuses.
    pub(super) fn replace(&mut self, kind: &str, choice: Autotuned) {
        let is_measured = false;
        let decision = Decision {
            choice,
            is_measured,
        };
        self.known.insert(xxh3_128(kind.as_bytes()), decision);
        self.refused += 1;
        self.is_behind = true;
    }

    /// A line for each reason why decisions since the last call were made without trials.
    pub(super) fn remarks(&mut self) -> Vec<String> {
        let counts = [&mut self.without_memory, &mut self.refused].map(std::mem::take);
        let lines = [
            format!(
                "kinds of products without memory for trials: {}; they take cublasLt's first algorithm",
                counts[0]
            ),
            format!(
                "recorded algorithms that cublasLt refuses: {}; its first algorithm is taken, with which last bits may differ",
                counts[1]
            ),
        ];
        let said = counts.into_iter().zip(lines);
        said.filter_map(|(count, line)| (count > 0).then_some(line))
            .collect()
    }

    /// Writes new decisions to the record, if there is one.
    pub(super) fn write(&mut self) -> Result<()> {
        let (Some(record), true) = (&self.record, self.is_behind) else {
            return Ok(());
        };
        let lines = self.known.iter();
        let lines = lines.map(|(kind, decision)| format!("{kind:032x} {}\n", decision.line()));
        let text = format!("{TITLE}\n{}", lines.collect::<String>());
        write_shared(record, &[text.as_bytes()]).map_err(|error| {
            Fault::new(format!("{}: cannot be written: {error}", record.display()))
        })?;
        self.is_behind = false;
        Ok(())
    }
}
