//! How far is a toy from the solution that is known? Importances on single-feature inputs against a
//! pattern, and the directions of `V` and `U` against those of the weight.
//!
//! The patterns and their counts of errors are the reference's ("target CI error"); the two numbers
//! about directions are table 1 of the SPD paper.

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
    assert_eq!(
        importance.len(),
        features * c,
        "importances are [features, c]"
    );
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
    assert_eq!(
        importance.len(),
        features * c,
        "importances are [features, c]"
    );
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
pub fn dense_error(
    importance: &[f32],
    features: usize,
    c: usize,
    k: usize,
    tolerance: f32,
) -> usize {
    let columns = by_sum(importance, features, c);
    let (used, unused) = columns.split_at(k.min(c));
    let active = unused.iter().flatten().filter(|g| **g > tolerance);
    used.len() - strong(used, tolerance) + active.count()
}

/// Of the `k` columns of largest sum, those with an entry of at least `1 - tolerance`.
///
/// - `importance`: row-major `[features, c]`
pub fn columns_in_use(
    importance: &[f32],
    features: usize,
    c: usize,
    k: usize,
    tolerance: f32,
) -> usize {
    let columns = by_sum(importance, features, c);
    strong(&columns[..k.min(c)], tolerance)
}

fn strong(columns: &[Vec<f32>], tolerance: f32) -> usize {
    let has_one = |column: &&Vec<f32>| column.iter().any(|g| *g >= 1.0 - tolerance);
    columns.iter().filter(has_one).count()
}

/// The columns, of largest sum first.
fn by_sum(importance: &[f32], features: usize, c: usize) -> Vec<Vec<f32>> {
    assert_eq!(
        importance.len(),
        features * c,
        "importances are [features, c]"
    );
    let column = |at: usize| importance.iter().skip(at).step_by(c).copied().collect();
    sum_order(importance, c).into_iter().map(column).collect()
}

/// Do the components of a matrix point where its columns do, and how long are they? Mean max cosine
/// similarity and mean L2 ratio, both 1 for a perfect decomposition of an embedding.
///
/// Component `c` contributes `v[j, c] u[c, :]` to column `j` of `w`. For each column the component
/// of largest cosine with it is taken: the means are of that cosine, and of the contribution's
/// length over the column's. A contribution or a column of length 0 counts as cosine 0, ratio 0.
///
/// - `w_hf`: `[hidden, features]`; `v_fc`: `[features, c]`; `u_ch`: `[c, hidden]`, all row-major
pub fn mmcs_ml2r(w_hf: &[f32], v_fc: &[f32], u_ch: &[f32], features: usize) -> (f64, f64) {
    let (hidden, c) = (w_hf.len() / features, v_fc.len() / features);
    assert_eq!(
        (w_hf.len(), v_fc.len(), u_ch.len()),
        (hidden * features, features * c, c * hidden),
        "w is [hidden, features], v [features, c], u [c, hidden]"
    );
    let length = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let u_ch: Vec<Vec<f64>> = u_ch
        .chunks(hidden)
        .map(|row| row.iter().map(|&x| x.into()).collect())
        .collect();
    let (mut cosines, mut ratios) = (0.0, 0.0);
    for (feature, v_c) in v_fc.chunks(c).enumerate() {
        let w_h: Vec<f64> = w_hf
            .iter()
            .skip(feature)
            .step_by(features)
            .map(|&x| x.into())
            .collect();
        let of_w = length(&w_h);
        let (mut best, mut ratio) = (f64::NEG_INFINITY, 0.0);
        for (&v, u_h) in v_c.iter().zip(&u_ch) {
            let v = f64::from(v);
            let dot: f64 = u_h.iter().zip(&w_h).map(|(u, w)| v * u * w).sum();
            let of_component = v.abs() * length(u_h);
            let both = of_component * of_w;
            let cosine = if both > 0.0 { dot / both } else { 0.0 };
            if cosine > best {
                best = cosine;
                ratio = if both > 0.0 { of_component / of_w } else { 0.0 };
            }
        }
        cosines += best;
        ratios += ratio;
    }
    (cosines / features as f64, ratios / features as f64)
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
    if features.min(c) < GREEDY_FROM {
        best_match(importance, features, c)
    } else {
        greedy_match(importance, features, c)
    }
}

/// The component of each of the first `min(features, c)` features, so that the sum of their
/// importances is largest.
///
/// Shortest augmenting paths (the "Hungarian algorithm"), O(features^2 c): features join one at a
/// time, each along the cheapest chain of rearrangements, with prices that keep every reduced cost
/// at least 0.
fn best_match(importance: &[f32], features: usize, c: usize) -> Vec<usize> {
    const FREE: usize = usize::MAX;
    let rows = features.min(c);
    let cost = |row: usize, column: usize| -f64::from(importance[row * c + column]);
    let (mut row_price, mut column_price) = (vec![0.0; rows], vec![0.0; c]);
    let mut row_of = vec![FREE; c];
    for start in 0..rows {
        let mut reach = vec![f64::INFINITY; c];
        let mut before = vec![FREE; c];
        let mut done = vec![false; c];
        let (mut row, mut at, mut far) = (start, FREE, 0.0);
        // Walks to the nearest column until one is free.
        let free = loop {
            let mut next = FREE;
            for column in (0..c).filter(|&column| !done[column]) {
                let length = far + cost(row, column) - row_price[row] - column_price[column];
                if length < reach[column] {
                    (reach[column], before[column]) = (length, at);
                }
                if next == FREE || reach[column] < reach[next] {
                    next = column;
                }
            }
            done[next] = true;
            (at, far) = (next, reach[next]);
            if row_of[next] == FREE {
                break next;
            }
            row = row_of[next];
        };
        row_price[start] += far;
        for column in (0..c).filter(|&column| done[column]) {
            let slack = far - reach[column];
            column_price[column] -= slack;
            if row_of[column] != FREE {
                row_price[row_of[column]] += slack;
            }
        }
        let mut column = free;
        while before[column] != FREE {
            row_of[column] = row_of[before[column]];
            column = before[column];
        }
        row_of[column] = start;
    }
    let mut matched = vec![FREE; rows];
    for (column, &row) in row_of.iter().enumerate() {
        if row != FREE {
            matched[row] = column;
        }
    }
    matched
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
        assert_eq!(dense_error(&importance, 2, 3, 2, 0.1), 1);
        assert_eq!(dense_error(&importance, 2, 3, 3, 0.1), 1);
        assert_eq!(dense_error(&importance, 2, 3, 1, 0.1), 2);
        assert_eq!(dense_error(&[0.5, 0.5], 2, 1, 1, 0.1), 1);
        assert_eq!(columns_in_use(&importance, 2, 3, 3, 0.1), 2);
        assert_eq!(columns_in_use(&importance, 2, 3, 1, 0.1), 1);
        assert_eq!(columns_in_use(&[0.85, 0.5], 2, 1, 9, 0.1), 0);
        assert_eq!(columns_in_use(&[0.85, 0.5], 2, 1, 9, 0.2), 1);
    }

    // Column 0 is (3, 4), column 1 (0, 2). The first component is half of column 0, the second is
    // column 1 itself or, with the other sign, its opposite; then the first, which does not reach
    // column 1, has the larger cosine: 0.
    #[test]
    fn directions_and_lengths_are_those_of_the_best_component() {
        let w_hf = [3., 0., 4., 2.];
        let (v_fc, u_ch) = ([0.5, 0., 0., -1.], [3., 4., 0., -2.]);
        assert_eq!(mmcs_ml2r(&w_hf, &v_fc, &u_ch, 2), (1.0, 0.75));
        let (v_fc, u_ch) = ([0.5, 0., 0., 1.], [3., 4., 0., -2.]);
        assert_eq!(mmcs_ml2r(&w_hf, &v_fc, &u_ch, 2), (0.5, 0.25));
    }
}
