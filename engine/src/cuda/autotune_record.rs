//! What autotuning decided, in the cache of a machine and in the record of a run.

use std::collections::BTreeMap;
use std::path::PathBuf;

use spd_files::atomic::write_shared;
use xxhash_rust::xxh3::xxh3_128;

use super::Fault;
use super::compiler::{keep, kept};
use super::product::Algorithm;

/// First line of a run's record.
const TITLE: &str =
    "how this run computes its sites and products on a GPU; a resumed run goes on with it";

/// What autotuning decided for a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Autotuned {
    /// A site is one op.
    Site,
    /// A site is its products and what lies between.
    Products,
    /// A product is a kernel of our own.
    Own,
    /// A product is computed by this algorithm of cublasLt.
    CublasLt(Algorithm),
}

impl Autotuned {
    fn word(self) -> String {
        match self {
            Self::Site => "site".to_owned(),
            Self::Products => "products".to_owned(),
            Self::Own => "own".to_owned(),
            Self::CublasLt(Algorithm(data)) => {
                let data = data.map(|word| format!("{word:016x}"));
                format!("cublaslt-{}", data.concat())
            }
        }
    }

    fn of(word: &str) -> Option<Self> {
        let plain = [Self::Site, Self::Products, Self::Own].into_iter();
        let library = || {
            let digits = word.strip_prefix("cublaslt-")?;
            let mut data = [0; 8];
            for (index, data) in data.iter_mut().enumerate() {
                *data = u64::from_str_radix(digits.get(16 * index..16 * index + 16)?, 16).ok()?;
            }
            Some(Self::CublasLt(Algorithm(data)))
        };
        let found = plain.chain(library());
        found.into_iter().find(|choice| choice.word() == word)
    }
}

/// What was decided so far, and where that is kept.
#[derive(Debug, Default)]
pub(super) struct AutotuneRecord {
    /// By kind.
    known: BTreeMap<u128, Autotuned>,
    /// Of this machine.
    cache: Option<PathBuf>,
    /// Of the run, and whether it lacks a decision.
    record: Option<PathBuf>,
    is_behind: bool,
}

impl AutotuneRecord {
    /// Nothing is decided, and what will be is kept in a directory of this machine.
    pub(super) fn new(cache: Option<PathBuf>) -> Self {
        Self {
            cache,
            ..Self::default()
        }
    }

    /// Keeps all decisions in a record, and to those that are there.
    pub(super) fn keep(&mut self, record: PathBuf) -> Result<(), Fault> {
        let told = |found: &str| {
            Fault::new(format!(
                "{}: should say how the run computes its sites and products, found {found}; put it back as it was, or start over with --fresh",
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
                    let (Some(kind), Some(chosen)) = (kind, Autotuned::of(chosen)) else {
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

    /// The decision on a kind, made by `measure` where there is none, which says whether it was measured; otherwise it is for this run
    /// alone.
    pub(super) fn of(
        &mut self,
        kind: &str,
        measure: impl FnOnce() -> Result<(Autotuned, bool), Fault>,
    ) -> Result<Autotuned, Fault> {
        let hash = xxh3_128(kind.as_bytes());
        if let Some(&known) = self.known.get(&hash) {
            return Ok(known);
        }
        let cached = self
            .cache
            .as_ref()
            .map(|cache| cache.join(format!("{hash:032x}.autotune")));
        let found = cached
            .as_deref()
            .and_then(kept)
            .and_then(|bytes| Autotuned::of(std::str::from_utf8(&bytes).ok()?));
        let chosen = match found {
            Some(chosen) => chosen,
            None => {
                let (chosen, was_measured) = measure()?;
                if let (Some(path), true) = (&cached, was_measured) {
                    // Without it, the next run measures again.
                    let _ = keep(path, chosen.word().as_bytes());
                }
                chosen
            }
        };
        self.known.insert(hash, chosen);
        self.is_behind = true;
        Ok(chosen)
    }

    /// Writes what was decided since into the record, if there is one.
    pub(super) fn write(&mut self) -> Result<(), Fault> {
        let (Some(record), true) = (&self.record, self.is_behind) else {
            return Ok(());
        };
        let lines = self.known.iter();
        let lines = lines.map(|(kind, chosen)| format!("{kind:032x} {}\n", chosen.word()));
        let text = format!("{TITLE}\n{}", lines.collect::<String>());
        write_shared(record, &[text.as_bytes()]).map_err(|error| {
            Fault::new(format!("{}: cannot be written: {error}", record.display()))
        })?;
        self.is_behind = false;
        Ok(())
    }
}
