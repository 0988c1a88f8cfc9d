//! `mean_importance`: mean importance of each component, largest first; `activation_frequency`: in
//! which part of a site's rows each component is active, most frequent first. Both are on a linear
//! and a log scale, two panels a site.
//!
//! A frequency `f_c` is the number of rows where the importance of component `c` exceeds
//! `eval.alive_threshold`, over all rows. The frequencies of a site add up to its L0 in these rows,
//! and components with `f_c = 0` are dead in them. The title of the linear panel has both.

use serde_json::json;

use super::axes::Axes;
use super::measured::{SiteSums, Sums};
use super::panel::Panel;
use super::{Drawn, Figure};
use crate::fault::Fault;

pub(super) const MEAN_IMPORTANCE: Figure<Sums> = Figure::new("mean_importance", |sums| {
    let title = "mean causal importance of each component";
    let axes = ["component, largest first", "mean importance"];
    let importance = |site: &SiteSums| site.sums.clone();
    let name = |site: &str, _: &[f64]| site.to_owned();
    draw(sums, (title, "means"), axes, importance, name)
});

pub(super) const ACTIVATION_FREQUENCY: Figure<Sums> = Figure::new("activation_frequency", |sums| {
    let title = "part of the rows in which each component is active";
    let axes = ["component, most frequent first", "frequency"];
    let active = |site: &SiteSums| site.active.iter().map(|&rows| rows as f64).collect();
    draw(sums, (title, "frequencies"), axes, active, with_l0)
});

/// The name of a site, with its L0 and how many of its components are dead.
fn with_l0(site: &str, frequencies: &[f64]) -> String {
    let l0: f64 = frequencies.iter().sum();
    let dead = frequencies.iter().filter(|part| **part == 0.0).count();
    format!("{site}: L0 {l0:.2}, {dead} of {} dead", frequencies.len())
}

/// Draws numbers of components over the rows of a site, the largest first.
///
/// - `key`: of the numbers in the JSON file
/// - `sums_of`: what of a site is added up over its rows, by component
/// - `named`: the title of a site's linear panel
fn draw(
    sums: &Sums,
    (title, key): (&'static str, &str),
    [x, y]: [&'static str; 2],
    sums_of: impl Fn(&SiteSums) -> Vec<f64>,
    named: impl Fn(&str, &[f64]) -> String,
) -> Result<Drawn, Fault> {
    let (mut all, mut panels) = (Vec::new(), Vec::new());
    for site in &sums.sites {
        let sums = sums_of(site);
        let mut order: Vec<usize> = (0..sums.len()).collect();
        order.sort_by(|&a, &b| sums[b].total_cmp(&sums[a]));
        let part = |&component: &usize| sums[component] / site.rows as f64;
        let parts: Vec<f64> = order.iter().map(part).collect();
        all.push(json!({ "site": site.site, "order": order, key: parts }));
        let axes = |title: &str| Axes::new(title, x, y);
        let log = axes(&format!("{}, log scale", site.site)).log();
        let linear = axes(&named(&site.site, &parts));
        panels.push(Panel::Trace(linear, parts.clone()));
        panels.push(Panel::Trace(log, parts));
    }
    Drawn::new(title, &all, panels, 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

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
        let sums = Sums {
            sites: vec![site],
            subsets: Vec::new(),
        };
        let drawn = (ACTIVATION_FREQUENCY.draw)(&sums).unwrap();
        let found: Value = serde_json::from_slice(&drawn.json).unwrap();
        let expected = json!({
            "site": "linear1",
            "order": [1, 0, 3, 2],
            "frequencies": [0.75, 0.25, 0.25, 0.0],
        });
        assert_eq!(found, json!([expected]));
        let svg = drawn.svg("toy, step 1").unwrap();
        assert!(svg.contains("linear1: L0 1.25, 1 of 4 dead"));
    }
}
