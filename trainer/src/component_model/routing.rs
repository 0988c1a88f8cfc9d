//! Which sites a reconstruction masks at once: the end of its name, and `probability`.
//!
//! # Keys of `[[loss]]`
//!
//! - ..._subset, merged_recon: `probability` | none | `routing`: `p` | chance of each site at each
//!   position to go through its components; without it, a uniformly random subset of uniformly
//!   random size

use serde::Serialize;

use spd_configs::{reader::Table, values::Number};

/// Which sites go through components at which position.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub enum Routing {
    /// At each position each of them with this probability.
    #[serde(rename = "probability")]
    Probability(f64),
    /// All of them, everywhere.
    #[serde(untagged)]
    All,
    /// At each position a uniformly random subset of uniformly random size.
    #[serde(untagged)]
    UniformK,
    /// One site at a time, all in turn.
    #[serde(untagged)]
    Layerwise,
}

impl Routing {
    /// How many of the sites a pass masks: one, or all.
    pub fn sites_of_a_pass(self, sites: usize) -> usize {
        match self {
            Self::Layerwise => 1,
            Self::All | Self::UniformK | Self::Probability(_) => sites,
        }
    }

    /// Reads the keys of a routing.
    pub(crate) fn read(table: &mut Table<'_>, sites: Sites) -> Option<Self> {
        match sites {
            Sites::All => Some(Self::All),
            Sites::Layerwise => Some(Self::Layerwise),
            Sites::Subset => {
                let probability = table.maybe("probability", Number::PROBABILITY)?;
                Some(probability.map_or(Self::UniformK, Self::Probability))
            }
        }
    }
}

/// A routing without its numbers.
#[derive(Clone, Copy, PartialEq)]
pub enum Sites {
    /// All of them.
    All,
    /// Some of them at each position.
    Subset,
    /// One at a time.
    Layerwise,
}

impl Sites {
    /// `All` for what is no reconstruction.
    pub(crate) fn of(routing: Option<Routing>) -> Self {
        match routing {
            None | Some(Routing::All) => Self::All,
            Some(Routing::UniformK | Routing::Probability(_)) => Self::Subset,
            Some(Routing::Layerwise) => Self::Layerwise,
        }
    }
}
