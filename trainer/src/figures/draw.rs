//! The figures: which panels each has, and what stands on their axes.

use super::data::{Histogram, Matrix, Means};
use super::panel::{Axes, Heat, Panel, Steps, Trace, grid};
use crate::fault::Fault;

/// Panels side by side.
const COLUMNS: usize = 3;

/// Importances on inputs of one feature each: a panel a site.
pub(super) fn importances(when: &str, sites: &[Matrix]) -> Result<String, Fault> {
    let panels = sites.iter().map(|site| {
        let axes = Axes::new(&site.site, "component, reordered", "feature that is on");
        Panel::Heat(axes, Heat::from_zero(site))
    });
    grid(
        &format!("causal importances ({when})"),
        &panels.collect::<Vec<_>>(),
        COLUMNS,
    )
}

/// `V` and `U` of each site: two panels a site, components in columns in both.
pub(super) fn components(when: &str, sites: &[Matrix]) -> Result<String, Fault> {
    let panels = sites.iter().map(|site| {
        let label = match site.site.rsplit_once(' ') {
            Some((_, "U")) => "output",
            _ => "input",
        };
        let axes = Axes::new(&site.site, "component, reordered", label);
        Panel::Heat(axes, Heat::around_zero(site))
    });
    grid(
        &format!("components ({when})"),
        &panels.collect::<Vec<_>>(),
        2,
    )
}

/// Importances and logits of all positions: two panels a site.
pub(super) fn histograms(when: &str, all: &[Histogram]) -> Result<String, Fault> {
    let panels = all.iter().map(|histogram| {
        let what = match histogram.site.rsplit_once(' ') {
            Some((_, "logit")) => "logit before the gate",
            _ => "importance",
        };
        let axes = Axes::new(&histogram.site, what, "values");
        Panel::Steps(axes.log(), Steps::of(histogram))
    });
    grid(
        &format!("causal importances of all positions and components ({when})"),
        &panels.collect::<Vec<_>>(),
        2,
    )
}

/// How often components are active: a panel a site.
pub(super) fn densities(when: &str, all: &[Histogram]) -> Result<String, Fault> {
    let panels = all.iter().map(|histogram| {
        let axes = Axes::new(&histogram.site, "part of the positions", "components");
        Panel::Steps(axes, Steps::of(histogram))
    });
    grid(
        &format!("components by the part of the positions on which they are active ({when})"),
        &panels.collect::<Vec<_>>(),
        COLUMNS,
    )
}

/// Mean importances, largest first: two panels a site.
pub(super) fn means(when: &str, all: &[Means]) -> Result<String, Fault> {
    let panels = all.iter().flat_map(|site| {
        let axes = |title: &str| Axes::new(title, "component, largest first", "mean importance");
        let trace = || Trace {
            values: site.means.clone(),
        };
        [
            Panel::Trace(axes(&site.site), trace()),
            Panel::Trace(axes(&format!("{}, log scale", site.site)).log(), trace()),
        ]
    });
    grid(
        &format!("mean causal importance of each component ({when})"),
        &panels.collect::<Vec<_>>(),
        2,
    )
}
