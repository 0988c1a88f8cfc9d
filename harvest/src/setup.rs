//! The settings of a harvest, which two that are merged share.

use serde::{Deserialize, Serialize};

/// A decomposed matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Module path.
    pub name: String,
    /// Number of its components.
    pub components: usize,
    /// Whether `|x V| |U|` is measured: the site has a row for each position.
    pub activations: bool,
}

/// The settings of a harvest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// The sites, in the run's order.
    pub sites: Vec<Site>,
    /// Number of tokens of the vocabulary.
    pub vocab: usize,
    /// Positions of a row.
    pub positions: usize,
    /// A component is active where its importance exceeds this.
    pub alive: f32,
    /// The seed of the draws that choose examples.
    pub seed: u64,
    /// Examples of a component by lot, at most.
    pub examples: usize,
    /// Whether pairs of components are counted.
    pub pairs: bool,
}

impl Setup {
    /// Number of components of all sites.
    pub fn components(&self) -> usize {
        self.sites.iter().map(|site| site.components).sum()
    }

    /// The site of each component of the harvest, and its number there, in order.
    pub fn each(&self) -> impl Iterator<Item = (&Site, usize)> {
        let sites = self.sites.iter();
        sites.flat_map(|site| (0..site.components).map(move |index| (site, index)))
    }
}
