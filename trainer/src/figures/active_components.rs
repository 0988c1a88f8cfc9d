//! `active_components`: components that are active in a row of a site, on average (L0), as bars: of
//! groups of sites, which are the sums of their sites, and of each site.

use serde::Serialize;

use super::axes::Axes;
use super::bars::Bars;
use super::measured::Sums;
use super::panel::Panel;
use super::{Drawn, Figure};
use crate::fault::Fault;

/// Most bars of a panel.
const BARS: usize = 24;

/// A site, or several.
#[derive(Debug, Serialize)]
struct Active {
    /// Module path; or the name of an `[[eval.subset]]`, or `all sites`.
    name: String,
    /// Its components.
    components: usize,
    /// Mean number of those that are active in a row; of several sites the sum.
    l0: f64,
}

/// The data of the bars.
#[derive(Debug, Serialize)]
struct Bar {
    groups: Vec<Active>,
    sites: Vec<Active>,
}

pub(super) const FIGURE: Figure<Sums> = Figure::new("active_components", draw);

fn draw(sums: &Sums) -> Result<Drawn, Fault> {
    let sites = sums.sites.iter().map(|site| Active {
        name: site.site.clone(),
        components: site.active.len(),
        l0: site.l0(),
    });
    let sites: Vec<Active> = sites.collect();
    let group = |name: &str, has: &dyn Fn(&str) -> bool| {
        let inside = || sites.iter().filter(|site| has(&site.name));
        Active {
            name: name.to_owned(),
            components: inside().map(|site| site.components).sum(),
            l0: inside().map(|site| site.l0).sum(),
        }
    };
    let mut groups = vec![group("all sites", &|_| true)];
    let subsets = sums.subsets.iter();
    groups.extend(subsets.map(|subset| group(&subset.name, &|site| subset.has(site))));
    let all = Bar { groups, sites };
    let panel = |title: &str, bars: &[Active], most: f64| {
        let bars = bars.iter();
        let bars = bars.map(|bar| (format!("{} ({})", bar.name, bar.components), bar.l0));
        let axes = Axes::new(title, "active components", "");
        Panel::Bars(
            axes,
            Bars {
                bars: bars.collect(),
                most,
            },
        )
    };
    let most = |bars: &[Active]| bars.iter().map(|bar| bar.l0).fold(0.0, f64::max);
    let groups = all.groups.chunks(BARS);
    let mut panels: Vec<Panel> = groups
        .map(|bars| panel("groups of sites", bars, most(&all.groups)))
        .collect();
    let sites = all.sites.chunks(BARS);
    panels.extend(sites.map(|bars| panel("sites", bars, most(&all.sites))));
    let title = "components that are active in a row of a site (of so many), mean";
    Drawn::new(title, &all, panels, 1)
}
