//! `activation_density`: how many components are active in which part of a site's rows, a panel a
//! site.

use super::axes::Axes;
use super::histogram::{Histogram, histogram, spread};
use super::measured::{SiteSums, Sums};
use super::panel::Panel;
use super::{Drawn, Figure};
use crate::fault::Fault;

pub(super) const FIGURE: Figure<Sums> = Figure::new("activation_density", draw);

fn draw(sums: &Sums) -> Result<Drawn, Fault> {
    let of_site = |site: &SiteSums| {
        let parts = site.active.iter();
        let parts = parts.map(|&active| (active as f64 / site.rows as f64, 1));
        let parts: Vec<(f64, u64)> = parts.collect();
        histogram(site.site.clone(), (0.0, spread(&parts).1), &parts)
    };
    let all: Vec<Histogram> = sums.sites.iter().map(of_site).collect();
    let panels = all.iter().map(|histogram| {
        let axes = Axes::new(&histogram.site, "part of the rows", "components");
        Panel::Steps(axes, histogram.clone())
    });
    let title = "components by the part of the rows in which they are active";
    Drawn::new(title, &all, panels, 1)
}
