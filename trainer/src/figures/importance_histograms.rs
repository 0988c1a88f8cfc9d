//! `importance_histograms`: importances of all rows, and the logits before the gate, two
//! panels a site. The importances are values of the row too.

use spd_tracker::Value;

use super::axes::Axes;
use super::histogram::{Histogram, histogram, spread};
use super::measured::{SiteSums, Sums};
use super::panel::Panel;
use super::{Drawn, Figure};
use crate::fault::Fault;

/// The importances of a site.
fn importances(site: &SiteSums) -> Histogram {
    let name = format!("{} importance", site.site);
    histogram(name, (0.0, 1.0), &site.importances.values())
}

/// The importances of all sites, as the values of a row: `importance/SITE`.
pub(super) fn values(sums: &Sums) -> Vec<(String, Value)> {
    let value = |site: &SiteSums| {
        let name = format!("importance/{}", site.site);
        (name, Value::Histogram(importances(site).value()))
    };
    sums.sites.iter().map(value).collect()
}

pub(super) const FIGURE: Figure<Sums> = Figure::new("importance_histograms", draw);

fn draw(sums: &Sums) -> Result<Drawn, Fault> {
    let of_site = |site: &SiteSums| {
        let (name, logits) = (format!("{} logit", site.site), site.logits.values());
        [importances(site), histogram(name, spread(&logits), &logits)]
    };
    let all: Vec<Histogram> = sums.sites.iter().flat_map(of_site).collect();
    let labels = ["importance", "logit before the gate"].into_iter().cycle();
    let panels = all.iter().zip(labels).map(|(histogram, what)| {
        let axes = Axes::new(&histogram.site, what, "values");
        Panel::Steps(axes.log(), histogram.clone())
    });
    let title = "causal importances of all rows and components";
    Drawn::new(title, &all, panels, 2)
}
