//! Components of a run, by site.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::sites::Site;

/// Components of a site.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SiteSet {
    /// Module path.
    pub site: String,
    /// Their numbers, in order.
    pub components: Vec<usize>,
}

impl SiteSet {
    /// The numbers as a command line has them: `3,7-9`.
    pub fn ranges(&self) -> String {
        let runs = self.components.chunk_by(|a, b| a + 1 == *b);
        let runs = runs.map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            one => one.iter().map(usize::to_string).collect(),
        });
        runs.collect::<Vec<_>>().join(",")
    }
}

/// Sets by site, without sites that have none.
///
/// - `sets`: of each site, in order
pub(crate) fn named(sites: &[Site], sets: &[BTreeSet<usize>]) -> Vec<SiteSet> {
    let sets = sites.iter().zip(sets).filter(|(_, set)| !set.is_empty());
    sets.map(|(site, set)| SiteSet {
        site: site.path().to_owned(),
        components: set.iter().copied().collect(),
    })
    .collect()
}
