//! What a decomposition looks like: figures of its importances and components, beside the numbers that they show.
//!
//! | figure                | of                                                                             |
//! |-----------------------|--------------------------------------------------------------------------------|
//! | `causal_importances`  | toys: importances on inputs of one feature each, components in matching order    |
//! | `causal_importances_upper_leaky` | toys: the same gates as the sparsity penalty sees them             |
//! | `uv_matrices`         | toys: `V` and `U`, components in the same order                                  |
//! | `importance_histograms` | importances of all positions, and the logits before the gate                   |
//! | `activation_density`  | how many components are active on which part of the positions                    |
//! | `mean_importance`     | mean importance of each component, largest first, on a linear and a log scale    |
//!
//! Each is an SVG and a JSON file of one name in `figures/step-00010000/`.

mod data;
mod draw;
mod panel;

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use spd_checkpoint::atomic::write_file;
use spd_engine::Store;

use self::data::{Distributions, Probed};
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::task::GoOn;

/// Where the figures of a step lie in a run directory.
pub(crate) fn directory(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join("figures").join(format!("step-{step:08}"))
}

/// Draws every figure that the target has. Returns whether it did; not so where it was not to go on.
///
/// - `run_dir`, `step`: where to, and what for
///
/// # Errors
///
/// When the disk refuses.
pub(crate) fn write(
    task: &mut DecompositionTask,
    store: &mut Store,
    (run_dir, step): (&Path, u64),
    go_on: &mut GoOn<'_>,
) -> Result<bool, Fault> {
    let to = directory(run_dir, step);
    let when = format!("{}, step {step}", task.decomposition.run.name);
    if !go_on() {
        return Ok(false);
    }
    std::fs::create_dir_all(&to).with_context(|| format!("{}", to.display()))?;
    if let Some(probed) = data::probe(task, store)? {
        let Probed {
            lower,
            upper,
            components,
        } = &probed;
        save(
            &to,
            "causal_importances",
            lower,
            &draw::importances(&when, lower)?,
        )?;
        if let Some(upper) = upper {
            let name = "causal_importances_upper_leaky";
            save(&to, name, upper, &draw::importances(&when, upper)?)?;
        }
        save(
            &to,
            "uv_matrices",
            components,
            &draw::components(&when, components)?,
        )?;
    }
    let Some(Distributions {
        histograms,
        densities,
        means,
    }) = data::distributions(task, store, go_on)?
    else {
        return Ok(false);
    };
    save(
        &to,
        "importance_histograms",
        &histograms,
        &draw::histograms(&when, &histograms)?,
    )?;
    save(
        &to,
        "activation_density",
        &densities,
        &draw::densities(&when, &densities)?,
    )?;
    save(&to, "mean_importance", &means, &draw::means(&when, &means)?)?;
    Ok(true)
}

fn save(to: &Path, name: &str, data: &impl Serialize, svg: &str) -> Result<(), Fault> {
    let json = serde_json::to_vec(data).context("the data of a figure")?;
    write_file(&to.join(format!("{name}.json")), &json)?;
    write_file(&to.join(format!("{name}.svg")), svg.as_bytes())?;
    Ok(())
}
