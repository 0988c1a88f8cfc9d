//! The message of a refused step: the step is run again, and its first non-finite value is named.
//!
//! The [`Halt`](spd_engine::ops::Halt) op keeps parameters and moments as they were before the
//! first step whose losses or gradients are not finite, so that step can be run again, and followed
//! from its batch to its gradients.

use spd_dataloader::Batch;
use spd_engine::Store;

use crate::fault::Fault;
use crate::parameters::HALT;
use crate::rounded::whole;
use crate::task::{Measured, NonFinite, Task, run_step};

/// Advice when the decomposition diverged.
pub(crate) const TRAIN_MORE_GENTLY: &str =
    "try a smaller learning rate, or clip_components and clip_importance in [train]";

/// Advice when the decomposition had no part in it.
pub(crate) const LOOK_AT_TARGET: &str = "look at the weights of the target and at the data";

/// The step that was refused, if one was.
///
/// # Errors
///
/// When a replay failed.
pub(crate) fn halted(store: &mut Store) -> Result<Option<u64>, Fault> {
    let Some(slot) = store.slot(HALT) else {
        return Ok(None);
    };
    store.fetch_one(slot)?;
    let halt = store.get(slot);
    Ok((!halt[1].is_finite()).then_some(whole(f64::from(halt[0])) as u64))
}

/// Stops when a step since the last look was refused.
///
/// # Errors
///
/// One line that names the step, the terms that are not finite, and where that begins.
pub(crate) fn check(task: &mut dyn Task, store: &mut Store, step: u64) -> Result<(), Fault> {
    let Some(bad) = halted(store)? else {
        return Ok(());
    };
    let bad = bad.min(step);
    let mut batches = Vec::new();
    for (source, feed) in task.sources() {
        let mut batch = Batch::default();
        source.fill(&feed, bad * feed.rows as u64, &mut batch)?;
        batches.push(batch);
    }
    run_step(task, store, &batches, bad)?;
    task.fetch(store)?;
    let terms = task.observe(store);
    let batch = &batches[0];
    let found = match batch.features.iter().position(|value| !value.is_finite()) {
        Some(at) => {
            let features = batch.features.len() / batch.rows.max(1);
            let what = format!(
                "feature {} of row {} of its batch",
                at % features,
                batch.first_row + at / features
            );
            NonFinite {
                what: Some(what),
                advice: LOOK_AT_TARGET,
            }
        }
        None => task.find_non_finite(store, &batches, bad)?,
    };
    Err(refused(&format!("step {bad}"), &terms, &found))
}

/// The line about a refused update.
///
/// - `place`: which one
/// - `terms`: what it measured
pub(crate) fn refused(place: &str, terms: &Measured, found: &NonFinite) -> Fault {
    let wrong = |of: fn(&str) -> bool| -> Vec<String> {
        terms
            .iter()
            .filter(|(name, value)| of(name) && !value.is_finite())
            .map(|(name, value)| format!("{name} is {value}"))
            .collect()
    };
    // Each term by its name; the total, and the norms of whole groups, where no term is at fault.
    let mut said = wrong(|name| name.contains("loss/") && name != "loss/total");
    if said.is_empty() {
        said = wrong(|name| name.matches('/').count() == 1);
    }
    let wrong = match &said[..] {
        [] => "it is finite when run again".to_owned(),
        said => said.join(", "),
    };
    let begins = found.what.as_ref().map_or(String::new(), |what| {
        format!("; the first that is not finite: {what}")
    });
    Fault::NotFinite(format!(
        "{place}: {wrong}{begins}; nothing was updated since, and every checkpoint is of before it; {}",
        found.advice
    ))
}
