//! `hf://OWNER/NAME@REVISION`: resolved while a run file is read, fetched before anything starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::HumanBytes;
use spd_configs::Faults;
use spd_hub::{Fetched, Hub, Kind, Repository, Snapshot};
use spd_trainer::Fault;
use spd_trainer::run_file::{OnDisk, OnHub, Run};

use crate::cli::RunArgs;
use crate::run_dir::RunDir;
use crate::screen;

/// Reads run files and resolves the weights that they name, each once.
#[derive(Debug, Default)]
pub(crate) struct RunFiles {
    /// Directory of a run that may have begun, whose commits are kept: `--out`; `runs/NAME` and
    /// `runs/NAME.sweep` without it.
    out: Option<PathBuf>,
    is_fresh: bool,
    /// Resolved weights: name and commit as in a file, and the snapshot.
    found: Vec<((String, Option<String>), Snapshot)>,
}

impl RunFiles {
    /// The run files of a launch.
    pub(crate) fn of(asked: &RunArgs) -> Self {
        Self {
            out: asked.out.clone(),
            is_fresh: asked.fresh,
            ..Self::default()
        }
    }

    /// The run file of a run directory to be created.
    pub(crate) fn new(out: &Path) -> Self {
        Self {
            out: Some(out.to_owned()),
            ..Self::default()
        }
    }

    /// Reads a run file.
    ///
    /// # Errors
    ///
    /// As [`Run::load_with`]; when the hub does not know the weights, or they cannot be resolved.
    pub(crate) fn load(&mut self, path: &Path, set: &[String]) -> Result<Run, Faults> {
        Run::load_with(path, set, &mut |asked| self.look_up(asked))
    }

    fn look_up(&mut self, asked: &OnHub<'_>) -> Result<OnDisk, String> {
        let key = (asked.name.to_owned(), asked.commit.map(str::to_owned));
        let known = self.found.iter().position(|(known, _)| *known == key);
        let known = match known {
            Some(known) => known,
            None => {
                let repository = Repository::parse(asked.name)?;
                let begun = self.begun(asked);
                let commit = asked.commit.or(begun.as_deref());
                let snapshot = Hub::from_env()?.resolve(&repository, commit, Kind::Weights)?;
                snapshot.note().into_iter().for_each(screen::note);
                self.found.push((key, snapshot));
                self.found.len() - 1
            }
        };
        let (_, snapshot) = &self.found[known];
        Ok(OnDisk {
            commit: snapshot.commit().to_owned(),
            dir: snapshot.dir(),
        })
    }

    /// The commit of an existing run in the same directory, if it has the same weights.
    fn begun(&self, asked: &OnHub<'_>) -> Option<String> {
        if self.is_fresh {
            return None;
        }
        let places = match (&self.out, asked.run) {
            (Some(out), _) => vec![out.clone()],
            (None, Some(run)) => {
                let runs = Path::new("runs");
                vec![runs.join(run), runs.join(format!("{run}.sweep"))]
            }
            (None, None) => Vec::new(),
        };
        // The runs of a sweep are in subdirectories.
        let within = places.iter().flat_map(|place| fs::read_dir(place).ok());
        let within = within.flatten().flatten().map(|entry| entry.path());
        let mut all = places.iter().cloned().chain(within);
        all.find_map(|place| {
            let run = Run::load_resolved(&RunDir::at(place).config()).ok()?;
            let is_same = run.target.weights.as_deref() == Some(Path::new(asked.name));
            run.target.commit.filter(|_| is_same)
        })
    }

    /// Pending downloads, as rows of the plan.
    pub(crate) fn rows(&self) -> Vec<(String, String)> {
        let missing = self.found.iter().filter(|(_, of)| of.missing().len() > 0);
        let rows = missing.map(|(_, snapshot)| {
            let files = snapshot.missing();
            let files = files.map(|(name, bytes)| format!("{name} ({})", HumanBytes(bytes)));
            let files = files.collect::<Vec<_>>().join(", ");
            let row = format!("{files}, into {}", snapshot.dir().display());
            ("download".to_owned(), row)
        });
        rows.collect()
    }

    /// Fetches the missing files, and verifies that they are the weights of these runs.
    ///
    /// # Errors
    ///
    /// Bad input: the hub refuses a file, or its content differs.
    pub(crate) fn fetch<'r>(
        &mut self,
        runs: impl IntoIterator<Item = &'r Run>,
    ) -> Result<(), Fault> {
        let missing = self
            .found
            .iter_mut()
            .filter(|(_, of)| of.missing().len() > 0);
        let mut has_fetched = false;
        for (_, snapshot) in missing {
            fetch(snapshot)?;
            has_fetched = true;
        }
        if has_fetched {
            runs.into_iter().try_for_each(spd_trainer::check_weights)?;
        }
        Ok(())
    }
}

/// Reads the file of a run again with other settings; `None` if it is invalid or has other weights
/// then.
pub(crate) fn load_again(run: &Run, path: &Path, set: &[String]) -> Option<Run> {
    let again = Run::load_with(path, set, &mut |asked| {
        let repository = Repository::parse(asked.name)?;
        let commit = run.target.commit.clone().ok_or("`commit` is missing")?;
        let dir = Hub::from_env()?.dir(&repository, &commit);
        Ok(OnDisk { commit, dir })
    });
    again.ok()
}

/// Fetches a tokenizer, and returns its path.
///
/// # Errors
///
/// Bad input.
pub(crate) fn tokenizer(name: &str) -> Result<PathBuf, Fault> {
    let bad = |line| Fault::BadInput(format!("--tokenizer: {line}"));
    let repository = Repository::parse(name).map_err(bad)?;
    let hub = Hub::from_env().map_err(bad)?;
    let snapshot = hub.resolve(&repository, None, Kind::Tokenizer);
    let mut snapshot = snapshot.map_err(bad)?;
    snapshot.note().into_iter().for_each(screen::note);
    fetch(&mut snapshot)?;
    screen::note(&format!(
        "the tokenizer is {repository}, commit {}",
        snapshot.commit()
    ));
    Ok(snapshot.file("tokenizer.json"))
}

/// Fetches the missing files with progress: continuously on a terminal, else once a minute.
fn fetch(snapshot: &mut Snapshot) -> Result<(), Fault> {
    let is_live = screen::is_live();
    let often = Duration::from_millis(if is_live { 200 } else { 60_000 });
    let mut shown = Instant::now();
    let fetched = snapshot.fetch(&mut |fetched: Fetched<'_>| {
        if shown.elapsed() < often {
            return;
        }
        shown = Instant::now();
        let [done, bytes] = [fetched.done, fetched.bytes].map(HumanBytes);
        let line = format!("fetched {done} of {bytes} of {}", fetched.name);
        match is_live {
            true => screen::live(vec![line]),
            false => screen::progress(&line),
        }
    });
    if is_live {
        screen::live(Vec::new());
    }
    fetched.map_err(Fault::BadInput)
}
