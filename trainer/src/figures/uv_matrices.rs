//! `uv_matrices`: `V` and the transpose of `U` of each site of a toy, two panels a site, components
//! in columns in both.

use super::axes::Axes;
use super::matrix::Matrix;
use super::measured::Probe;
use super::panel::{Heat, Panel};
use super::{Drawn, Figure};
use crate::fault::Fault;

pub(super) const FIGURE: Figure<Probe> = Figure::new("uv_matrices", draw);

fn draw(probe: &Probe) -> Result<Drawn, Fault> {
    let all = probe.sites.iter().flat_map(|site| &site.components);
    let all: Vec<&Matrix> = all.collect();
    let panels = all.iter().zip(["input", "output"].into_iter().cycle());
    let panels = panels.map(|(matrix, label)| {
        let axes = Axes::new(&matrix.site, "component, reordered", label);
        Panel::Heat(axes, Heat::around_zero(matrix))
    });
    Drawn::new("components", &all, panels, 2)
}
