//! `compare.svg`: components of two or more runs, matched one to one. Two panels for each pair of
//! runs and site: the cosines of the matched components, largest first; and the cosines of all
//! components of one run (rows) with all of the other (columns), in the order of the matches, which
//! are on the diagonal.

use super::axes::Axes;
use super::matrix::{MOST_SPARSE, Matrix};
use super::panel::{Heat, Panel, grid};
use crate::fault::Fault;

/// The picture of a comparison.
#[derive(Default)]
pub(crate) struct Compared {
    panels: Vec<Panel>,
}

impl Compared {
    /// Adds a site of a pair of runs. One without matches has nothing to show.
    ///
    /// - `matched`: cosines of the matched components, largest first
    /// - `rows`, `columns`: components of either run, the matched ones first
    /// - `cosine`: of a component of the first run with one of the other
    pub(crate) fn add(
        &mut self,
        title: &str,
        matched: &[f64],
        (rows, columns): (&[usize], &[usize]),
        cosine: impl Fn(usize, usize) -> f32,
    ) {
        if matched.is_empty() {
            return;
        }
        let axes = Axes::new(title, "matched pair, largest first", "cosine");
        self.panels.push(Panel::Trace(axes, matched.to_vec()));
        let value = |row: usize, column: usize| cosine(rows[row], column);
        let site = title.to_owned();
        let all = Matrix::new(site, columns, rows.len(), MOST_SPARSE, value);
        let axes = Axes::new(title, "component, in the order of the matches", "component");
        self.panels.push(Panel::Heat(axes, Heat::from_zero(&all)));
    }

    /// The text of the SVG file.
    pub(crate) fn svg(&self, title: &str) -> Result<String, Fault> {
        grid(title, &self.panels, 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_has_two_panels_and_one_without_matches_none() {
        let mut picture = Compared::default();
        let cosine = |row: usize, column: usize| if row == column { 1.0 } else { 0.5 };
        picture.add("linear1", &[1.0, 0.5], (&[1, 0], &[1, 2, 0]), cosine);
        picture.add("linear2", &[], (&[], &[0]), cosine);
        let svg = picture.svg("a and b").unwrap();
        assert_eq!(svg.matches("linear1").count(), 2);
        assert!(!svg.contains("linear2") && svg.contains("a and b"), "{svg}");
        assert!(Compared::default().svg("none").is_ok());
    }
}
