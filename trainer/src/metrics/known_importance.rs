//! How far is a toy from the solution that is known? Importances on single-feature inputs against a
//! pattern. The patterns and their counts of errors are the reference's ("target CI error").
//!
//! # Keys of `[eval]`
//!
//! - `known` | none | `IdentityCIError`: `identity_ci`, `dense_ci` | rows `{ pattern, identity =
//!   FEATURES }` or `{ pattern, dense = COLUMNS }`; toys only

use serde::Serialize;
use spd_configs::{
    all_read,
    reader::Table,
    values::{Size, Text},
};

use super::{Before, Metric};
use crate::assignment::assignment;
use crate::run_file::{
    decomposition::{Decomposition, surely_meant},
    pattern::{is_literal, pattern_matches},
};
use crate::sites::Site;

/// Solutions that are known.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Known {
    /// In the order of the file.
    #[serde(rename = "known")]
    pub rows: Vec<KnownImportance>,
}

/// The known importances of a site on single-feature inputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KnownImportance {
    /// Sites, as in `SitePattern`.
    pub pattern: String,
    /// The known solution.
    #[serde(flatten)]
    pub solution: KnownSolution,
}

/// A known pattern of importances, rows are features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KnownSolution {
    /// One component for each of so many features, up to a permutation.
    Identity(usize),
    /// So many of the largest columns are in use, the others are off.
    Dense(usize),
}

impl Metric for Known {
    fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<Self> {
        let rows = table.rows_or_none("known", |known| read(known, before));
        if let (Some(name), Some([_, ..])) = (before.target.of_tokens(), rows.as_deref()) {
            let message = format!(
                "expected a tms or resid_mlp target, whose features are known, found {name}"
            );
            table.refuse::<()>("known", message);
        }
        Some(Self { rows: rows? })
    }
}

fn read(table: &mut Table<'_>, before: &Before<'_>) -> Option<KnownImportance> {
    let pattern = table.need("pattern", Text::ANY);
    let identity = table.maybe("identity", Size::at_least(1));
    let dense = table.maybe("dense", Size::at_least(1));
    let solution = match (table.has("identity"), table.has("dense")) {
        (true, false) => identity?.map(KnownSolution::Identity),
        (false, true) => dense?.map(KnownSolution::Dense),
        (true, true) => table.refuse("dense", "expected either `identity` or `dense`, found both"),
        (false, false) => {
            table.refuse_table("expected `identity = FEATURES` or `dense = COLUMNS`, found neither")
        }
    };
    let known = all_read! { KnownImportance: pattern, solution }?;
    if let (KnownSolution::Identity(n), Some(features)) =
        (known.solution, before.target.n_features())
        && n != features
    {
        let message = format!("expected the target's {features} features, found {n}");
        table.refuse::<()>("identity", message);
    } else if let Some(decomposition) = before.decomposition {
        check(table, &known, decomposition);
    }
    Some(known)
}

/// A solution cannot use more components than its site has, nor be one of no site.
fn check(table: &mut Table<'_>, known: &KnownImportance, decomposition: &Decomposition) {
    let (key, in_use) = match known.solution {
        KnownSolution::Identity(n) => ("identity", n),
        KnownSolution::Dense(k) => ("dense", k),
    };
    let sites = decomposition.all_sites();
    let mut meant = surely_meant(&sites, &known.pattern).peekable();
    if meant.peek().is_none() && sites.iter().all(|site| is_literal(&site.pattern)) {
        let sites: Vec<_> = sites
            .iter()
            .map(|site| format!("{:?}", site.pattern))
            .collect();
        let message = format!(
            "expected one of the sites {}, found {:?}",
            sites.join(", "),
            known.pattern
        );
        table.refuse::<()>("pattern", message);
    }
    if let Some(site) = meant.find(|site| site.components < in_use) {
        let message = format!(
            "expected at most C = {} of {:?}, found {in_use}",
            site.components, site.pattern
        );
        table.refuse::<()>(key, message);
    }
}

/// Distances from 0 and 1 that still count as right, and what a value at each of them is called
/// after.
pub(super) const TOLERANCES: [(f32, &str); 2] = [(0.1, ""), (0.2, "_0p2")];

/// Importances against a known solution, on rows with one feature of 0.75 each.
pub(crate) struct Against {
    /// The solution.
    pub(crate) solution: KnownSolution,
    /// The reference's "target CI error" at each tolerance.
    pub(crate) errors: [usize; 2],
    /// Features with a component of their own, or columns in use, at each tolerance.
    pub(crate) matched: [usize; 2],
}

impl Known {
    /// The known solution of a site.
    pub(crate) fn solution(&self, path: &str) -> Option<KnownSolution> {
        let mut rows = self.rows.iter();
        let known = rows.find(|known| pattern_matches(&known.pattern, path))?;
        Some(known.solution)
    }

    /// The importances of a site against its known solution.
    ///
    /// - `importance`: row-major `[features, c]`
    pub(super) fn against(
        &self,
        site: &Site,
        importance: &[f32],
        features: usize,
    ) -> Option<Against> {
        let solution = self.solution(site.path())?;
        let c = site.components;
        let [errors, matched] = match solution {
            KnownSolution::Identity(_) => [identity_error, matched_features]
                .map(|count| TOLERANCES.map(|(within, _)| count(importance, features, c, within))),
            KnownSolution::Dense(k) => [dense_error, columns_in_use]
                .map(|count| TOLERANCES.map(|(within, _)| count(importance, c, k, within))),
        };
        Some(Against {
            solution,
            errors,
            matched,
        })
    }
}

/// From this many features and components on, the reference matches greedily instead of optimally.
const GREEDY_FROM: usize = 500;

/// Entries that contradict "one component a feature", up to the order of the components.
///
/// Each feature is matched with one component: so that the sum of the matched importances is as
/// large as can be or, from 500 features and components on, row by row with the largest that is
/// free. An error is a matched importance below `1 - tolerance`, or another above `tolerance`.
///
/// - `importance`: row-major `[features, c]`; with fewer components than features, the last
///   features stay unmatched
pub fn identity_error(importance: &[f32], features: usize, c: usize, tolerance: f32) -> usize {
    let matched = matches(importance, features, c);
    let mut errors = 0;
    for (feature, row) in importance.chunks(c.max(1)).enumerate() {
        for (component, &g) in row.iter().enumerate() {
            let own = matched.get(feature) == Some(&component);
            errors += usize::from(if own {
                g < 1.0 - tolerance
            } else {
                g > tolerance
            });
        }
    }
    errors
}

/// Features that have a component of their own: matched as by [`identity_error`], with no error in
/// the feature's row nor in the component's column.
///
/// - `importance`: row-major `[features, c]`
pub fn matched_features(importance: &[f32], features: usize, c: usize, tolerance: f32) -> usize {
    let matched = matches(importance, features, c);
    let own = matched.iter().enumerate().filter(|&(feature, &component)| {
        let row = &importance[feature * c..][..c];
        let column = importance.iter().skip(component).step_by(c);
        let silent = |(at, g): (usize, &f32), but: usize| at == but || *g <= tolerance;
        row[component] >= 1.0 - tolerance
            && row.iter().enumerate().all(|other| silent(other, component))
            && column.enumerate().all(|other| silent(other, feature))
    });
    own.count()
}

/// Entries that contradict "`k` components are in use, whatever for".
///
/// The dense columns are the `k` of largest sum. An error is one of them without an entry of at
/// least `1 - tolerance`, or an entry of another column above `tolerance`.
///
/// - `importance`: row-major `[features, c]`
pub fn dense_error(importance: &[f32], c: usize, k: usize, tolerance: f32) -> usize {
    let columns = by_sum(importance, c);
    let (used, unused) = columns.split_at(k.min(c));
    let active = unused.iter().flatten().filter(|g| **g > tolerance);
    used.len() - strong(used, tolerance) + active.count()
}

/// Of the `k` columns of largest sum, those with an entry of at least `1 - tolerance`.
///
/// - `importance`: row-major `[features, c]`
pub fn columns_in_use(importance: &[f32], c: usize, k: usize, tolerance: f32) -> usize {
    let columns = by_sum(importance, c);
    strong(&columns[..k.min(c)], tolerance)
}

fn strong(columns: &[Vec<f32>], tolerance: f32) -> usize {
    let has_one = |column: &&Vec<f32>| column.iter().any(|g| *g >= 1.0 - tolerance);
    columns.iter().filter(has_one).count()
}

/// The columns, of largest sum first.
fn by_sum(importance: &[f32], c: usize) -> Vec<Vec<f32>> {
    let column = |at: usize| importance.iter().skip(at).step_by(c).copied().collect();
    sum_order(importance, c).into_iter().map(column).collect()
}

/// All components, in the order in which they are shown beside features: the one matched with each
/// feature first, as for [`identity_error`], then the others by their sums.
pub fn identity_order(importance: &[f32], features: usize, c: usize) -> Vec<usize> {
    let mut order = matches(importance, features, c);
    let mut matched = vec![false; c];
    for &component in &order {
        matched[component] = true;
    }
    let others = sum_order(importance, c).into_iter();
    order.extend(others.filter(|&other| !matched[other]));
    order
}

/// All components, those of largest sum first, as for [`dense_error`].
pub fn sum_order(importance: &[f32], c: usize) -> Vec<usize> {
    let mut sums = vec![0.0; c];
    for row in importance.chunks(c.max(1)) {
        for (sum, &g) in sums.iter_mut().zip(row) {
            *sum += f64::from(g);
        }
    }
    let mut order: Vec<usize> = (0..c).collect();
    order.sort_by(|&a, &b| sums[b].total_cmp(&sums[a]).then(a.cmp(&b)));
    order
}

/// The component of each of the first `min(features, c)` features.
fn matches(importance: &[f32], features: usize, c: usize) -> Vec<usize> {
    assert_eq!(
        importance.len(),
        features * c,
        "importances are [features, c]"
    );
    if features.min(c) < GREEDY_FROM {
        best_match(importance, features, c)
    } else {
        greedy_match(importance, features, c)
    }
}

/// The component of each of the first `min(features, c)` features, so that the sum of their
/// importances is largest.
fn best_match(importance: &[f32], features: usize, c: usize) -> Vec<usize> {
    let rows = features.min(c);
    let matched = assignment(&importance[..rows * c], rows, c);
    matched
        .into_iter()
        .map(|(_, component)| component)
        .collect()
}

/// The largest free component of each of the first `min(features, c)` features in turn.
fn greedy_match(importance: &[f32], features: usize, c: usize) -> Vec<usize> {
    let mut free = vec![true; c];
    let rows = importance.chunks(c).take(features.min(c));
    rows.map(|row| {
        let columns = (0..c).filter(|&column| free[column]);
        let largest = columns.max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
        let largest = largest.expect("no more rows than columns");
        free[largest] = false;
        largest
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERFECT: [f32; 12] = [0., 0., 1., 0., 1., 0., 0., 0., 0., 0., 0., 1.];

    fn changed(entry: usize, g: f32) -> [f32; 12] {
        let mut importance = PERFECT;
        importance[entry] = g;
        importance
    }

    #[test]
    fn one_component_a_feature_in_any_order_is_no_error() {
        assert_eq!(identity_error(&PERFECT, 3, 4, 0.1), 0);
    }

    #[test]
    fn a_weak_match_and_a_second_component_are_errors() {
        assert_eq!(identity_error(&changed(2, 0.5), 3, 4, 0.1), 1);
        assert_eq!(identity_error(&changed(0, 0.3), 3, 4, 0.2), 1);
        assert_eq!(identity_error(&changed(0, 0.15), 3, 4, 0.2), 0);
    }

    // Of the three features of PERFECT, in columns 2, 0 and 3. A weak match costs its feature; a
    // second component costs the feature that it joins; a component that is active for two costs
    // both.
    #[test]
    fn a_feature_is_matched_when_its_component_is_its_own() {
        assert_eq!(matched_features(&PERFECT, 3, 4, 0.1), 3);
        assert_eq!(matched_features(&changed(2, 0.85), 3, 4, 0.1), 2);
        assert_eq!(matched_features(&changed(2, 0.85), 3, 4, 0.2), 3);
        assert_eq!(matched_features(&changed(1, 0.3), 3, 4, 0.1), 2);
        assert_eq!(matched_features(&changed(0, 0.3), 3, 4, 0.1), 1);
        assert_eq!(matched_features(&[1., 0., 0., 1., 0., 0.], 3, 2, 0.1), 2);
    }

    // Greedily the first feature takes 0.9 and leaves 0 to the second: 3 errors. Matched for the
    // sum, 0.8 + 0.8: the 0.9 and both 0.8.
    #[test]
    fn features_are_matched_for_the_largest_sum() {
        let importance = [0.9, 0.8, 0.8, 0.0];
        assert_eq!(best_match(&importance, 2, 2), [1, 0]);
        assert_eq!(greedy_match(&importance, 2, 2), [0, 1]);
        assert_eq!(identity_error(&importance, 2, 2, 0.1), 3);
        assert_eq!(identity_error(&importance, 2, 2, 0.25), 1);
    }

    // Against all 6 * 5 * 4 * 3 ways to give 4 features one of 6 components each.
    #[test]
    fn no_other_match_has_a_larger_sum() {
        let draw = |index: u32| (index.wrapping_mul(2_654_435_761) >> 16 & 0xff) as f32 / 255.0;
        for matrix in 0..50 {
            let g: Vec<f32> = (0..24).map(|entry| draw(1 + 24 * matrix + entry)).collect();
            let sum = |columns: &[usize]| -> f32 {
                let rows = columns.iter().enumerate();
                rows.map(|(row, column)| g[6 * row + column]).sum()
            };
            let mut best = 0f32;
            for code in 0..6usize.pow(4) {
                let columns = [code % 6, code / 6 % 6, code / 36 % 6, code / 216];
                let distinct = (0..4).all(|a| (0..a).all(|b| columns[a] != columns[b]));
                if distinct {
                    best = best.max(sum(&columns));
                }
            }
            assert!((sum(&best_match(&g, 4, 6)) - best).abs() < 1e-6);
        }
    }

    #[test]
    fn fewer_components_than_features_leave_the_last_features_unmatched() {
        assert_eq!(identity_error(&[1., 0., 0., 1., 1., 0.], 3, 2, 0.1), 1);
    }

    // Features 0, 1, 2 have components 2, 0, 3; component 1 is left over. By sums: 0 and 2 and 3
    // have 1, 1 has none.
    #[test]
    fn components_are_shown_beside_their_features() {
        assert_eq!(identity_order(&PERFECT, 3, 4), [2, 0, 3, 1]);
        assert_eq!(sum_order(&PERFECT, 4), [0, 2, 3, 1]);
        assert_eq!(identity_order(&[0.5, 1.0], 2, 1), [0]);
    }

    // Columns sum to 1.5, 1.0 and 0.5. Two in use: the third's 0.5 is an error; and one of 1.0 that
    // no entry makes alone.
    #[test]
    fn dense_columns_are_those_of_largest_sum() {
        let importance = [0.5, 1.0, 0.5, 1.0, 0.0, 0.0];
        assert_eq!(dense_error(&importance, 3, 2, 0.1), 1);
        assert_eq!(dense_error(&importance, 3, 3, 0.1), 1);
        assert_eq!(dense_error(&importance, 3, 1, 0.1), 2);
        assert_eq!(dense_error(&[0.5, 0.5], 1, 1, 0.1), 1);
        assert_eq!(columns_in_use(&importance, 3, 3, 0.1), 2);
        assert_eq!(columns_in_use(&importance, 3, 1, 0.1), 1);
        assert_eq!(columns_in_use(&[0.85, 0.5], 1, 9, 0.1), 0);
        assert_eq!(columns_in_use(&[0.85, 0.5], 1, 9, 0.2), 1);
    }
}
