//! `mean_importance`: mean importance of each component, largest first, on a linear and a log
//! scale, two panels a site.

use serde::Serialize;

use super::axes::Axes;
use super::measured::{SiteSums, Sums};
use super::panel::Panel;
use super::{Drawn, Figure};
use crate::fault::Fault;

/// Mean importances of a site's components, largest first.
#[derive(Debug, Serialize)]
struct Means {
    /// Site.
    site: String,
    /// Numbers of the components, in the order of `means`.
    order: Vec<usize>,
    /// Means over rows.
    means: Vec<f64>,
}

pub(super) const FIGURE: Figure<Sums> = Figure::new("mean_importance", draw);

fn draw(sums: &Sums) -> Result<Drawn, Fault> {
    let of_site = |site: &SiteSums| {
        let mut order: Vec<usize> = (0..site.sums.len()).collect();
        order.sort_by(|&a, &b| site.sums[b].total_cmp(&site.sums[a]).then(a.cmp(&b)));
        let mean = |&component: &usize| site.sums[component] / site.rows as f64;
        Means {
            site: site.site.clone(),
            means: order.iter().map(mean).collect(),
            order,
        }
    };
    let all: Vec<Means> = sums.sites.iter().map(of_site).collect();
    let panels = all.iter().flat_map(|site| {
        let axes = |title: &str| Axes::new(title, "component, largest first", "mean importance");
        let values = || site.means.clone();
        [
            Panel::Trace(axes(&site.site), values()),
            Panel::Trace(axes(&format!("{}, log scale", site.site)).log(), values()),
        ]
    });
    Drawn::new("mean causal importance of each component", &all, panels, 2)
}
