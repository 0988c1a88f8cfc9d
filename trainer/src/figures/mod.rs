//! Figures of a decomposition: of its importances and components, beside the numbers that they
//! show.
//!
//! - `causal_importances`, of toys: importances on inputs of one feature each, components in
//!   matching order
//! - `causal_importances_upper_leaky`, of toys: the same gates as the sparsity penalty sees them
//! - `uv_matrices`, of toys: `V` and `U`, components in the same order
//! - `active_components`: components that are active in a row of a site, as bars: of groups of
//!   sites, and by site
//! - `importance_histograms`: importances of all rows, and the logits before the gate
//! - `activation_density`: how many components are active in which part of a site's rows
//! - `activation_frequency`: the part of those rows in which each component is active
//! - `mean_importance`: mean importance of each component, largest first, on a linear and a log
//!   scale
//! - `components`, of language models: the most important components of each site, the held-out
//!   text in which they are strongest, and what the removal of each changes in the output there
//!
//! Each is an SVG and a JSON file of one name in `figures/step-00010000/`; `components` is JSON
//! alone, the data of a page.
//!
//! The importances of `importance_histograms` are values of the evaluation's row too,
//! `importance/SITE`, so that trackers show them.
//!
//! # Adding a figure
//!
//! A file here with its [`Figure`]: its name, whether a run has it, and what draws it of what was
//! measured; and a line of `OF_TOYS` or `OF_ALL`.

mod activation_density;
mod active_components;
mod axes;
mod bars;
mod causal_importances;
mod compared;
mod components;
mod histogram;
mod importance_histograms;
mod matrix;
mod measured;
mod panel;
mod ranked;
mod uv_matrices;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use spd_checkpoint::atomic::write_file;
use spd_engine::Store;
use spd_tracker::Value;

pub(crate) use self::compared::Compared;
pub(crate) use self::measured::of_positions;
use self::measured::{Probe, Sums, probe, sums};
use self::panel::{Panel, grid};
use crate::decomposition_task::DecompositionTask;
use crate::fault::{Fault, Interrupt};
use crate::run_file::Run;
use crate::task::CheckStop;

/// Figures of toys.
const OF_TOYS: &[Figure<Probe>] = &[
    causal_importances::OF_MASKS,
    causal_importances::OF_PENALTY,
    uv_matrices::FIGURE,
];

/// Figures of all targets.
const OF_ALL: &[Figure<Sums>] = &[
    active_components::FIGURE,
    importance_histograms::FIGURE,
    activation_density::FIGURE,
    ranked::ACTIVATION_FREQUENCY,
    ranked::MEAN_IMPORTANCE,
];

/// Number of figures of a toy.
#[cfg(test)]
pub(crate) const FIGURES: usize = OF_TOYS.len() + OF_ALL.len();

/// A figure of what was measured.
struct Figure<M> {
    /// Its name in files and in rows.
    name: &'static str,
    /// Whether a run has it.
    is_drawn: fn(&Run) -> bool,
    /// Draws it.
    draw: fn(&M) -> Result<Drawn, Fault>,
}

impl<M> Figure<M> {
    /// A figure that every run has.
    const fn new(name: &'static str, draw: fn(&M) -> Result<Drawn, Fault>) -> Self {
        Self {
            name,
            is_drawn: |_| true,
            draw,
        }
    }
}

/// A picture, and the numbers that it shows.
struct Drawn {
    title: &'static str,
    json: Vec<u8>,
    panels: Vec<Panel>,
    /// Panels that follow each other and are of one site.
    together: usize,
}

impl Drawn {
    fn new(
        title: &'static str,
        numbers: &impl Serialize,
        panels: impl IntoIterator<Item = Panel>,
        together: usize,
    ) -> Result<Self, Fault> {
        Ok(Self {
            title,
            json: serde_json::to_vec(numbers).context("the data of a figure")?,
            panels: panels.into_iter().collect(),
            together,
        })
    }

    /// The text of the SVG file; `when` is a part of its title.
    fn svg(&self, when: &str) -> Result<String, Fault> {
        let title = format!("{} ({when})", self.title);
        grid(&title, &self.panels, self.together)
    }
}

/// The directory of a step's figures in a run directory.
pub(crate) fn directory(run_dir: &Path, step: u64) -> PathBuf {
    run_dir.join("figures").join(format!("step-{step:08}"))
}

/// The figures that a task has, whether or not a disk takes them: rows name them, and hold nothing
/// that a disk decides.
fn names(task: &DecompositionTask) -> Vec<&'static str> {
    let run = &task.decomposition.run;
    let of_toys = drawn(OF_TOYS, run).filter(|_| task.probe.is_some());
    let names = of_toys.map(|figure| figure.name);
    names
        .chain(drawn(OF_ALL, run).map(|figure| figure.name))
        .collect()
}

/// The figures that a run has.
fn drawn<'f, M>(figures: &'f [Figure<M>], run: &Run) -> impl Iterator<Item = &'f Figure<M>> {
    figures.iter().filter(|figure| (figure.is_drawn)(run))
}

/// The values of a step's row that concern figures: the file of each, then the histograms of the
/// importances.
pub(crate) fn values(task: &DecompositionTask, step: u64) -> Vec<(String, Value)> {
    let value = |name| {
        let file = format!("figures/step-{step:08}/{name}.svg");
        (format!("figures/{name}"), Value::File(file))
    };
    let files = names(task).into_iter().map(value);
    files.chain(task.importances.iter().cloned()).collect()
}

/// Draws every figure that the target has.
///
/// - `run_dir`, `step`: where to, and what for
///
/// # Errors
///
/// When the disk refuses, or on a stop.
pub(crate) fn write(
    task: &mut DecompositionTask,
    store: &mut Store,
    run_dir: &Path,
    step: u64,
    check_stop: &mut CheckStop<'_>,
) -> Result<(), Interrupt> {
    let to = directory(run_dir, step);
    let when = format!("{}, step {step}", task.decomposition.run.name);
    check_stop()?;
    let of_toys = draw_toys(task, store, (&to, &when), check_stop);
    if matches!(of_toys, Err(Interrupt::Stop)) {
        return of_toys;
    }
    // Before the disk has a say: the row holds some of it, or nothing where it cannot be measured.
    task.importances.clear();
    let sums = sums(task, store, check_stop)?;
    task.importances = importance_histograms::values(&sums);
    of_toys?;
    let run = &task.decomposition.run;
    save_all((&to, &when), drawn(OF_ALL, run), &sums, check_stop)?;
    components::write(task, store, &sums, (&to, step), check_stop)
}

/// For each component of each site, in how many of the held-out rows that figures are drawn from it
/// is active.
pub(crate) fn active_rows(
    task: &mut DecompositionTask,
    store: &mut Store,
) -> Result<Vec<Vec<u64>>, Interrupt> {
    let sums = sums(task, store, &mut || Ok(()))?;
    Ok(sums.sites.into_iter().map(|site| site.active).collect())
}

/// Makes the directory, and draws the figures of toys. Their measurements are dropped afterwards,
/// to free memory.
fn draw_toys(
    task: &mut DecompositionTask,
    store: &mut Store,
    (to, when): (&Path, &str),
    check_stop: &mut CheckStop<'_>,
) -> Result<(), Interrupt> {
    // A run directory that is gone is not made again.
    for dir in to.parent().into_iter().chain([to]) {
        match std::fs::create_dir(dir) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => made.with_context(|| dir.display().to_string())?,
        }
    }
    match probe(task, store)? {
        Some(probe) => {
            let figures = drawn(OF_TOYS, &task.decomposition.run);
            save_all((to, when), figures, &probe, check_stop)
        }
        None => Ok(()),
    }
}

/// Draws and writes figures, and looks for a stop before each: a busy disk takes seconds for a
/// file.
fn save_all<'f, M: 'f>(
    (to, when): (&Path, &str),
    figures: impl Iterator<Item = &'f Figure<M>>,
    measured: &M,
    check_stop: &mut CheckStop<'_>,
) -> Result<(), Interrupt> {
    for Figure { name, draw, .. } in figures {
        check_stop()?;
        let drawn = draw(measured)?;
        let svg = drawn.svg(when)?;
        write_file(&to.join(format!("{name}.json")), &drawn.json)?;
        write_file(&to.join(format!("{name}.svg")), svg.as_bytes())?;
    }
    Ok(())
}
