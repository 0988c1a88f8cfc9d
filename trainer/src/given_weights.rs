//! Weights that a run file names: a file, a directory, or a commit of the hub that the launcher has
//! fetched.

use std::path::{Path, PathBuf};

use spd_dataloader::Source;
use spd_hub::{Hub, Kind, Repository, SCHEME};

use crate::data::Sources;
use crate::fault::Fault;
use crate::networks::{Target, Weights, load};
use crate::run_file::{Data, Run};
use crate::tokenizers;

/// Place of a run's given weights.
///
/// # Errors
///
/// One line, when they are on the hub of Hugging Face and it is not known where their files are.
pub(crate) fn place(run: &Run) -> Result<Option<PathBuf>, Fault> {
    let Some(path) = &run.target.weights else {
        return Ok(None);
    };
    Ok(Some(match on_hub(run)? {
        Some((hub, repository, commit)) => hub.dir(&repository, commit),
        None => path.clone(),
    }))
}

/// Refuses a dataset of other ids than the target's, where both say what theirs are.
///
/// # Errors
///
/// One line that names both.
pub(crate) fn check_ids(run: &Run, sources: &Sources) -> Result<(), Fault> {
    let (Data::Tokens { train, .. }, Source::Tokens(windows)) = (&run.data, &sources.train) else {
        return Ok(());
    };
    match (place(run)?, windows.dataset().tokenizer()) {
        (Some(weights), Some(made_by)) => tokenizers::check(train, made_by, &weights),
        _ => Ok(()),
    }
}

/// The repository of weights that are on the hub, and its commit.
fn on_hub(run: &Run) -> Result<Option<(Hub, Repository, &str)>, Fault> {
    let name = run.target.weights.as_ref().and_then(|path| path.to_str());
    let Some(name) = name.filter(|name| name.starts_with(SCHEME)) else {
        return Ok(None);
    };
    let bad = |line| Fault::BadInput(format!("[target] weights: {line}"));
    let commit = run.target.commit.as_deref();
    let commit = commit.ok_or_else(|| bad(format!("{name}: its `commit` is not said")))?;
    let repository = Repository::parse(name).map_err(bad)?;
    Ok(Some((Hub::from_env().map_err(bad)?, repository, commit)))
}

/// Reads the weights of a run that has some, to see whether they are those of its network.
///
/// # Errors
///
/// When they are not, or not there.
pub(crate) fn check_weights(run: &Run, network: &dyn Target) -> Result<(), Fault> {
    given(run, network).map(drop)
}

/// The weights of a run that has some.
pub(crate) fn given(run: &Run, network: &dyn Target) -> Result<Option<Weights>, Fault> {
    let Some(path) = place(run)? else {
        return Ok(None);
    };
    if are_to_come(run)? {
        return Err(Fault::BadInput(format!(
            "{}: the files of {} are not there; they come when a run begins, into HF_HOME, which all nodes have to share",
            path.display(),
            run.target
                .weights
                .as_deref()
                .unwrap_or(Path::new(""))
                .display()
        )));
    }
    load(&path, network).map(Some)
}

/// Whether the weights are on the hub, and still to be fetched.
pub(crate) fn are_to_come(run: &Run) -> Result<bool, Fault> {
    match on_hub(run)? {
        Some((hub, repository, commit)) => {
            let has = hub.has(&repository, commit, Kind::Weights);
            has.map(|has| !has).map_err(Fault::BadInput)
        }
        None => Ok(false),
    }
}
