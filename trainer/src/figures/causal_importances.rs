//! `causal_importances`: importances of a toy on inputs of one feature each, a panel a site;
//! `causal_importances_upper_leaky`: the same gates as the sparsity penalty sees them, where those
//! differ.

use super::axes::Axes;
use super::matrix::{MOST_SPARSE, Matrix};
use super::measured::{Probe, Probed};
use super::panel::{Heat, Panel};
use super::{Drawn, Figure};
use crate::component_model::Sigmoid;
use crate::fault::Fault;

/// Slope of the upper gate above 1.
const LEAK: f32 = 0.01;

pub(super) const OF_MASKS: Figure<Probe> = Figure::new("causal_importances", |probe| {
    draw(probe, |site, at| site.answer.importance[at])
});

pub(super) const OF_PENALTY: Figure<Probe> = Figure {
    name: "causal_importances_upper_leaky",
    is_drawn: |run| run.importance.sigmoid == Sigmoid::LeakyHard,
    draw: |probe| draw(probe, |site, at| upper_leaky(site.answer.logits[at])),
};

fn draw(probe: &Probe, value: impl Fn(&Probed, usize) -> f32) -> Result<Drawn, Fault> {
    let matrix = |site: &Probed| {
        let c = site.order.len();
        let rows = site.answer.importance.len() / c;
        let value = |row: usize, component: usize| value(site, row * c + component);
        Matrix::new(site.site.clone(), &site.order, rows, MOST_SPARSE, value)
    };
    let sites: Vec<Matrix> = probe.sites.iter().map(matrix).collect();
    let panels = sites.iter().map(|site| {
        let axes = Axes::new(&site.site, "component, reordered", "feature that is on");
        Panel::Heat(axes, Heat::from_zero(site))
    });
    Drawn::new("causal importances", &sites, panels, 1)
}

/// The upper one of the pair of leaky hard sigmoids.
fn upper_leaky(z: f32) -> f32 {
    if z > 1.0 {
        1.0 + LEAK * (z - 1.0)
    } else {
        z.max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_upper_gate_leaks_above_one() {
        let found = [-1.0, 0.25, 1.0, 3.0].map(|z| upper_leaky(z).to_bits());
        assert_eq!(found, [0.0, 0.25, 1.0, 1.02].map(f32::to_bits));
    }
}
