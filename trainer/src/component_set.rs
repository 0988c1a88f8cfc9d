//! Components of a run as a command line names them: `SITE:INDEX,...`. SITE is a module path, or a
//! pattern as in run files; INDEX a number, a range like `3-7`, or `*`. An INDEX without a SITE is of
//! the site before it: `linear1:3,7-9`.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::fault::Fault;
use crate::run_file::pattern_matches;
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

/// Reads the value of a flag: the set of each site, in order.
pub(crate) fn read(flag: &str, text: &str, sites: &[Site]) -> Result<Vec<BTreeSet<usize>>, Fault> {
    let refused = |why: String| Fault::BadInput(format!("{flag} {text}: {why}"));
    let mut sets = vec![BTreeSet::new(); sites.len()];
    let mut pattern = None;
    for item in text.split(',') {
        let index = match item.rsplit_once(':') {
            Some((site, index)) => {
                pattern = Some(site.trim());
                index.trim()
            }
            None => item.trim(),
        };
        let of = pattern.zip(Index::read(index));
        let Some((pattern, index)) = of.filter(|(pattern, _)| !pattern.is_empty()) else {
            return Err(refused(format!(
                "expected SITE:INDEX, like linear1:3 or linear1:0-4, found {item:?}"
            )));
        };
        let mut is_found = false;
        for (site, set) in sites.iter().zip(&mut sets) {
            if !pattern_matches(pattern, site.path()) {
                continue;
            }
            is_found = true;
            let (first, last) = match index {
                Index::All => (0, site.components - 1),
                Index::Range(first, last) => (first, last),
            };
            if last >= site.components {
                return Err(refused(format!(
                    "expected components from 0 to {} of {}, found {last}",
                    site.components - 1,
                    site.path()
                )));
            }
            set.extend(first..=last);
        }
        if !is_found {
            return Err(refused(format!(
                "expected a site, found {pattern:?}; the sites are {}",
                paths(sites)
            )));
        }
    }
    Ok(sets)
}

/// The first sites.
fn paths(sites: &[Site]) -> String {
    const SHOWN: usize = 6;
    let paths: Vec<&str> = sites.iter().take(SHOWN).map(Site::path).collect();
    let more = if sites.len() > SHOWN { ", ..." } else { "" };
    format!("{}{more}", paths.join(", "))
}

#[derive(Clone, Copy)]
enum Index {
    All,
    /// First and last.
    Range(usize, usize),
}

impl Index {
    fn read(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::All);
        }
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let range = (first.parse().ok()?, last.parse().ok()?);
        (range.0 <= range.1).then_some(Self::Range(range.0, range.1))
    }
}

#[cfg(test)]
mod tests {
    use spd_engine::Store;

    use super::*;
    use crate::bench::{Overrides, preset};
    use crate::decomposition::Decomposition;

    /// `linear1` and `linear2` of a toy.
    fn sites() -> Vec<Site> {
        let run = preset("tiny-tms", &Overrides::default()).unwrap().run;
        let mut sites = Decomposition::new(&run, &mut Store::new())
            .unwrap()
            .model
            .sites;
        for (site, components) in sites.iter_mut().zip([20, 9]) {
            site.components = components;
        }
        sites
    }

    #[test]
    fn numbers_ranges_and_patterns_are_read_and_written() {
        let sites = sites();
        let read = |text: &str| {
            let sets = read("--keep", text, &sites).unwrap();
            let found = named(&sites, &sets).into_iter();
            let found = found.map(|set| format!("{}:{}", set.site, set.ranges()));
            found.collect::<Vec<_>>().join(",")
        };
        assert_eq!(read("linear1:3"), "linear1:3");
        assert_eq!(read("linear2:8, 1-3,linear1:0"), "linear1:0,linear2:1-3,8");
        assert_eq!(read("*:4-5"), "linear1:4-5,linear2:4-5");
        assert_eq!(read("linear[2]:*"), "linear2:0-8");
    }

    #[test]
    fn what_is_not_there_is_named_with_what_is() {
        let sites = sites();
        for (text, why) in [
            (
                "linear1:20",
                "expected components from 0 to 19 of linear1, found 20",
            ),
            (
                "*:3-9",
                "expected components from 0 to 8 of linear2, found 9",
            ),
            (
                "linear9:3",
                "expected a site, found \"linear9\"; the sites are linear1, linear2",
            ),
            (
                "linear1",
                "expected SITE:INDEX, like linear1:3 or linear1:0-4, found \"linear1\"",
            ),
            (
                "linear1:7-3",
                "expected SITE:INDEX, like linear1:3 or linear1:0-4, found \"linear1:7-3\"",
            ),
            (
                "linear1:3,",
                "expected SITE:INDEX, like linear1:3 or linear1:0-4, found \"\"",
            ),
            (
                ":3",
                "expected SITE:INDEX, like linear1:3 or linear1:0-4, found \":3\"",
            ),
            (
                "linear1:-1",
                "expected SITE:INDEX, like linear1:3 or linear1:0-4, found \"linear1:-1\"",
            ),
        ] {
            let fault = read("--remove", text, &sites).unwrap_err();
            assert_eq!(fault.to_string(), format!("--remove {text}: {why}"));
        }
    }
}
