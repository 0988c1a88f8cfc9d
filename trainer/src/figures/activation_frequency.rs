//! `activation_frequency`: in which part of a site's rows each component is active, most frequent
//! first, on a linear and a log scale, two panels a site.
//!
//! `f_c` is the number of rows where the importance of component `c` exceeds
//! `eval.alive_threshold`, over all rows. The frequencies of a site add up to its L0 in these rows,
//! and components with `f_c = 0` are dead in them. The title of the linear panel has both.

use serde::Serialize;

use super::axes::Axes;
use super::measured::{SiteSums, Sums};
use super::panel::Panel;
use super::{Drawn, Figure};
use crate::fault::Fault;

/// How often a site's components are active, most frequent first.
#[derive(Debug, Serialize)]
struct Frequencies {
    /// Site.
    site: String,
    /// Numbers of the components, in the order of `frequencies`.
    order: Vec<usize>,
    /// Parts of the rows.
    frequencies: Vec<f64>,
}

pub(super) const FIGURE: Figure<Sums> = Figure::new("activation_frequency", draw);

fn frequencies(site: &str, active: &[u64], rows: u64) -> Frequencies {
    let mut order: Vec<usize> = (0..active.len()).collect();
    order.sort_by_key(|&component| std::cmp::Reverse(active[component]));
    let part = |&component: &usize| active[component] as f64 / rows as f64;
    Frequencies {
        site: site.to_owned(),
        frequencies: order.iter().map(part).collect(),
        order,
    }
}

impl Frequencies {
    fn title(&self) -> String {
        let l0: f64 = self.frequencies.iter().sum();
        let dead = self.frequencies.iter().filter(|part| **part == 0.0).count();
        let components = self.frequencies.len();
        format!("{}: L0 {l0:.2}, {dead} of {components} dead", self.site)
    }
}

fn draw(sums: &Sums) -> Result<Drawn, Fault> {
    let of_site = |site: &SiteSums| frequencies(&site.site, &site.active, site.rows);
    let all: Vec<Frequencies> = sums.sites.iter().map(of_site).collect();
    let panels = all.iter().flat_map(|site| {
        let axes = |title: &str| Axes::new(title, "component, most frequent first", "frequency");
        let values = || site.frequencies.clone();
        [
            Panel::Trace(axes(&site.title()), values()),
            Panel::Trace(axes(&format!("{}, log scale", site.site)).log(), values()),
        ]
    });
    let title = "part of the rows in which each component is active";
    Drawn::new(title, &all, panels, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    // By hand, over 4 rows: 3/4, 1/4, 1/4 and 0; L0 is their sum, 1.25.
    #[test]
    fn frequencies_fall_and_add_up_to_l0() {
        let mut site = SiteSums::new("linear1", 4);
        let importance = [
            [0.0, 0.9, 0.0, 0.0],
            [0.6, 0.2, 0.0, 0.0],
            [0.0, 0.0, 0.0, 1.0],
            [0.1, 0.7, 0.0, 0.1],
        ];
        let importance = importance.as_flattened();
        site.add(importance, importance, 0.1);
        let found = frequencies(&site.site, &site.active, site.rows);
        assert_eq!(found.order, [1, 0, 3, 2]);
        assert_eq!(found.frequencies, [0.75, 0.25, 0.25, 0.0]);
        assert_eq!(found.title(), "linear1: L0 1.25, 1 of 4 dead");
        let sums = Sums {
            sites: vec![site],
            subsets: Vec::new(),
        };
        let svg = draw(&sums).unwrap().svg("toy, step 1").unwrap();
        assert!(svg.contains("linear1: L0 1.25, 1 of 4 dead"));
    }
}
