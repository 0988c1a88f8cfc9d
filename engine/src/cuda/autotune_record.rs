//! Autotuning decisions: in the cache of a machine and in the record of a run.

use std::collections::BTreeMap;
use std::path::PathBuf;

use spd_files::atomic::write_shared;
use xxhash_rust::xxh3::xxh3_128;

use super::Fault;
use super::compiler::{keep, kept};
use super::product::Algorithm;

/// First line of a run's record. Old runs have it, so it must not change.
const TITLE: &str =
    "how this run computes its sites and products on a GPU; a resumed run goes on with it";

/// Decision for a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Autotuned {
    /// The site is one op.
    Site,
    /// The site is separate products and element-wise ops.
    Products,
    /// Our own kernel computes the product.
    Own,
    /// This algorithm of cublasLt computes the product.
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

/// All decisions so far, and the files that keep them.
#[derive(Debug, Default)]
pub(super) struct AutotuneRecord {
    /// Decisions by kind.
    known: BTreeMap<u128, Autotuned>,
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
    pub(super) fn keep(&mut self, record: PathBuf) -> Result<(), Fault> {
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

    /// The decision for a kind. If there is none yet, `measure` returns one, and whether it was
    /// measured; an unmeasured decision holds for this run only.
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
                    // If this fails, the next run measures again.
                    let _ = keep(path, chosen.word().as_bytes());
                }
                chosen
            }
        };
        self.known.insert(hash, chosen);
        self.is_behind = true;
        Ok(chosen)
    }

    /// Writes new decisions to the record, if there is one.
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
