//! Results by component, which a harvest makes one after the other: those so far are saved now and
//! then, in a file beside what they are of.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use spd_files::atomic::write_file;

use crate::fault::Fault;

/// Components of a site that are measured together: all of them are in the file, or none.
const TOGETHER: usize = 32;

/// Numbers of a site among those of the harvest, and of a component.
pub(super) type Key = (usize, usize);

/// The file of the results so far.
pub(super) struct SoFar {
    pub(super) path: PathBuf,
    /// The subject of the results: those of another one are not read.
    pub(super) of: Value,
}

impl SoFar {
    /// The results of all, of which those that are not there yet are measured.
    ///
    /// - `all`: in order; some of one site are measured together
    /// - `told`: how many are done, and how many there are
    pub(super) fn complete<T: Serialize + DeserializeOwned>(
        &self,
        all: &[Key],
        save_every: Duration,
        mut measure: impl FnMut(&[Key]) -> Result<Vec<(Key, T)>, Fault>,
        told: &dyn Fn(u64, u64),
    ) -> Result<BTreeMap<Key, T>, Fault> {
        let mut found: BTreeMap<Key, T> = self.read();
        let (mut saved, mut done) = (Instant::now(), 0);
        let of_sites = all.chunk_by(|a, b| a.0 == b.0);
        for keys in of_sites.flat_map(|of_site| of_site.chunks(TOGETHER)) {
            done += keys.len() as u64;
            if keys.iter().any(|key| found.contains_key(key)) {
                continue;
            }
            found.extend(measure(keys)?);
            told(done, all.len() as u64);
            if saved.elapsed() >= save_every {
                self.write(&found)?;
                saved = Instant::now();
            }
        }
        Ok(found)
    }

    fn read<T: DeserializeOwned>(&self) -> BTreeMap<Key, T> {
        let read = || {
            let text = spd_files::read(&self.path).ok()?;
            let (of, all): (Value, Vec<(Key, T)>) = serde_json::from_slice(&text).ok()?;
            (of == self.of).then_some(all)
        };
        // A file that cannot be read is measured again.
        read().unwrap_or_default().into_iter().collect()
    }

    fn write<T: Serialize>(&self, found: &BTreeMap<Key, T>) -> Result<(), Fault> {
        let all: Vec<(&Key, &T)> = found.iter().collect();
        let text = serde_json::to_vec(&(&self.of, all)).context("the results so far")?;
        write_file(&self.path, &[&text]).with_context(|| self.path.display().to_string())?;
        Ok(())
    }

    /// Removes the file, which is of no use once the tables are there.
    pub(super) fn remove(&self) {
        let _ = spd_files::atomic::remove(&self.path);
    }
}
