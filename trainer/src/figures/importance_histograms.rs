//! `importance_histograms`: importances of all positions, and the logits before the gate, two panels a site.

use super::Figure;
use super::axes::Axes;
use super::histogram::{Histogram, histogram, spread};
use super::measured::{SiteSums, Sums};
use super::panel::{Panel, Steps, grid};
use crate::fault::Fault;

pub(super) fn figure(sums: &Sums, when: &str) -> Result<Option<Figure>, Fault> {
    let of_site = |site: &SiteSums| {
        let named = |what: &str| format!("{} {what}", site.site);
        let (importances, logits) = (site.importances.values(), site.logits.values());
        [
            histogram(named("importance"), (0.0, 1.0), &importances),
            histogram(named("logit"), spread(&logits), &logits),
        ]
    };
    let all: Vec<Histogram> = sums.sites.iter().flat_map(of_site).collect();
    let labels = ["importance", "logit before the gate"].into_iter().cycle();
    let panels = all.iter().zip(labels).map(|(histogram, what)| {
        let axes = Axes::new(&histogram.site, what, "values");
        Panel::Steps(axes.log(), Steps::of(histogram))
    });
    let title = format!("causal importances of all positions and components ({when})");
    let svg = grid(&title, &panels.collect::<Vec<_>>(), 2)?;
    Figure::new("importance_histograms", &all, svg).map(Some)
}
