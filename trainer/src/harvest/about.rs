//! The subject of a harvest: a checkpoint and text.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use spd_checkpoint::step_path;
use spd_dataloader::Source;
use xxhash_rust::xxh3::xxh3_64;

use super::{PART, Settings};
use crate::data::{self, Sources};
use crate::fault::Fault;
use crate::resume::CHECKPOINTS;
use crate::run_file::{Data, Run};

/// The rows of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Dataset {
    /// The path that was asked for; that of the run's training rows where there is none.
    pub(super) data: Option<PathBuf>,
    /// Identity of the dataset.
    pub(super) fingerprint: String,
    /// Rows that are read.
    pub(super) rows: u64,
    /// Rows of a part.
    pub(super) part_rows: u64,
}

impl Dataset {
    /// The rows of the run's training data, or of the dataset at a path; at most so many.
    pub(super) fn of(
        run: &Run,
        of_data: Option<&Path>,
        sources: &Sources,
        most: u64,
    ) -> Result<Self, Fault> {
        let Data::Tokens { train, seq_len, .. } = &run.data else {
            return Err(Fault::BadInput("[data] kind: not of tokens".into()));
        };
        let source = source(of_data, sources);
        let batch = run.eval.batch_size;
        let batches = (PART / (batch * seq_len)).max(1);
        Ok(Self {
            data: of_data.map(Path::to_owned),
            fingerprint: data::fingerprint(&run.data, of_data.unwrap_or(train))?,
            rows: source.samples().unwrap_or(0).min(most),
            part_rows: (batch * batches) as u64,
        })
    }

    pub(super) fn parts(&self) -> u64 {
        self.rows.div_ceil(self.part_rows)
    }

    /// The rows, wherever they lie: rows of training data are in another order than others.
    pub(super) fn identity(&self) -> (&str, bool, u64, u64) {
        let is_of_training = self.data.is_none();
        (&self.fingerprint, is_of_training, self.rows, self.part_rows)
    }
}

/// The rows that are read.
pub(super) fn source<'s>(of_data: Option<&Path>, sources: &'s Sources) -> &'s Source {
    match of_data {
        Some(_) => &sources.eval,
        None => &sources.train,
    }
}

/// Identity of the checkpoint of a step: xxh3-64 of its manifest.
pub(super) fn checkpoint(run_dir: &Path, step: u64) -> Result<String, Fault> {
    let manifest = step_path(&run_dir.join(CHECKPOINTS), step).join("manifest.json");
    let manifest = spd_files::read(&manifest)
        .map_err(|error| Fault::BadInput(format!("{}: {error}", manifest.display())))?;
    Ok(format!("{:016x}", xxh3_64(&manifest)))
}

/// The subject of a harvest, and its settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    /// The name of the run.
    pub(super) name: String,
    /// The run directory, as it was given.
    pub(super) run: PathBuf,
    /// Step of the checkpoint.
    pub(super) step: u64,
    /// Identity of the checkpoint.
    pub(super) checkpoint: String,
    /// Positions at which each component is removed, at most.
    pub(super) removals: usize,
    pub(super) datasets: Vec<Dataset>,
}

impl About {
    pub(super) fn of(
        run_dir: &Path,
        run: &Run,
        step: u64,
        settings: Settings,
        dataset: Dataset,
    ) -> Result<Self, Fault> {
        Ok(Self {
            name: run.name.clone(),
            run: run_dir.to_owned(),
            step,
            checkpoint: checkpoint(run_dir, step)?,
            removals: settings.removals,
            datasets: vec![dataset],
        })
    }

    /// Parts of all datasets.
    pub(super) fn parts(&self) -> u64 {
        self.datasets.iter().map(Dataset::parts).sum()
    }

    /// Whether counts of one may be added to those of the other: both are of one checkpoint.
    pub(super) fn is_of_same(&self, other: &Self) -> bool {
        self.checkpoint == other.checkpoint && self.step == other.step
    }

    /// The same harvest, wherever its run and its data lie.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let [ours, theirs] =
            [self, other].map(|about| about.datasets.iter().map(Dataset::identity));
        self.is_of_same(other) && self.removals == other.removals && ours.eq(theirs)
    }
}
