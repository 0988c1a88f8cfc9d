//! The numbers behind the figures.

use std::collections::BTreeMap;

use serde::Serialize;
use spd_configs::{KnownSolution, Sigmoid, pattern_matches};
use spd_dataloader::Batch;
use spd_engine::Store;

use crate::data::{eval_feed, fill};
use crate::decomposition::Decomposition;
use crate::decomposition_task::DecompositionTask;
use crate::fault::Fault;
use crate::metrics::known_importance::{identity_order, sum_order};
use crate::metrics::toy::{self, Answer};
use crate::task::{GoOn, in_arena_of};

/// Held-out batches that distributions are taken from, at most.
const BATCHES: u64 = 5;
/// Bins of the histograms.
const BINS: usize = 50;
/// Most rows or columns of a matrix of which most is 0, and of one that is full: an SVG names each cell that is not white.
const MOST_SPARSE: usize = 160;
const MOST_DENSE: usize = 64;
/// Slope of the upper gate above 1.
const LEAK: f32 = 0.01;

/// A matrix with a name, components in its columns.
#[derive(Debug, Serialize)]
pub(super) struct Matrix {
    /// Site, or site and part.
    pub(super) site: String,
    /// Numbers of the components, in the order of the columns.
    pub(super) order: Vec<usize>,
    /// Rows and columns that a value below stands for: it is the one of largest magnitude.
    pub(super) each: [usize; 2],
    /// Values, row by row.
    pub(super) rows: Vec<Vec<f32>>,
}

impl Matrix {
    /// `rows` rows of `value(row, component)`; where there are more than `most` rows or columns, neighbours share a value.
    fn new(
        site: String,
        order: &[usize],
        (rows, most): (usize, usize),
        value: impl Fn(usize, usize) -> f32,
    ) -> Self {
        let each = [rows, order.len()].map(|count| count.div_ceil(most).max(1));
        let larger = |a: f32, b: f32| if b.abs() > a.abs() { b } else { a };
        let shared = |row: usize, components: &[usize]| {
            let of_rows = row..rows.min(row + each[0]);
            let values = of_rows.flat_map(|row| components.iter().map(move |&c| (row, c)));
            values.fold(0.0, |a, (row, c)| larger(a, value(row, c)))
        };
        let shared_row = |row| order.chunks(each[1]).map(|c| shared(row, c)).collect();
        Self {
            rows: (0..rows).step_by(each[0]).map(shared_row).collect(),
            order: order.to_vec(),
            site,
            each,
        }
    }
}

/// What a toy answers to inputs of one feature each.
pub(super) struct Probed {
    /// Importances for masks, `[features, c]`.
    pub(super) lower: Vec<Matrix>,
    /// Importances for the penalty; only where they differ.
    pub(super) upper: Option<Vec<Matrix>>,
    /// `V` `[d_in, c]` and the transpose of `U`, `[d_out, c]`, of each site in turn.
    pub(super) components: Vec<Matrix>,
}

/// How values are distributed over bins of one width.
#[derive(Debug, Serialize)]
pub(super) struct Histogram {
    /// Site, or site and kind.
    pub(super) site: String,
    /// Lower border of the first bin.
    pub(super) low: f64,
    /// Upper border of the last bin.
    pub(super) high: f64,
    /// Values in each bin.
    pub(super) counts: Vec<u64>,
}

/// Mean importances of a site's components, largest first.
#[derive(Debug, Serialize)]
pub(super) struct Means {
    /// Site.
    pub(super) site: String,
    /// Numbers of the components, in the order of `means`.
    pub(super) order: Vec<usize>,
    /// Means over positions.
    pub(super) means: Vec<f64>,
}

/// What importances look like over held-out positions.
pub(super) struct Distributions {
    /// Importances, then logits, of each site in turn.
    pub(super) histograms: Vec<Histogram>,
    /// Components by the part of the positions on which they are active.
    pub(super) densities: Vec<Histogram>,
    /// By site.
    pub(super) means: Vec<Means>,
}

/// Importances of a toy on inputs of one feature each, and its components in the same order; nothing for other targets.
pub(super) fn probe(
    task: &mut DecompositionTask,
    store: &mut Store,
) -> Result<Option<Probed>, Fault> {
    let Some(answers) = toy::probe(task, store)? else {
        return Ok(None);
    };
    let decomposition = &task.decomposition;
    store.fetch()?;
    let leaks = decomposition.run.importance.sigmoid == Sigmoid::LeakyHard;
    let (mut lower, mut upper, mut components) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (site, answer)) in decomposition.sites.iter().zip(&answers).enumerate() {
        let c = site.components;
        let Answer { importance, logits } = answer;
        let features = importance.len() / c;
        let order = order(decomposition, site.path(), importance, (features, c));
        let named = |part: &str| format!("{}{part}", site.path());
        let of_probe = |value: &dyn Fn(usize) -> f32| {
            let size = (features, MOST_SPARSE);
            Matrix::new(named(""), &order, size, |row, component| {
                value(row * c + component)
            })
        };
        lower.push(of_probe(&|at| importance[at]));
        upper.push(of_probe(&|at| upper_leaky(logits[at])));
        let (v, u) = decomposition.component_values(store, index);
        let (d_in, d_out) = (site.layer.d_in, site.layer.d_out);
        let v = |row, component| v[row * c + component];
        components.push(Matrix::new(named(" V"), &order, (d_in, MOST_DENSE), v));
        let u = |row, component| u[component * d_out + row];
        components.push(Matrix::new(named(" U"), &order, (d_out, MOST_DENSE), u));
    }
    Ok(Some(Probed {
        lower,
        upper: leaks.then_some(upper),
        components,
    }))
}

/// The components of a site as they are shown: matched with features where each should have one, else by their sums.
fn order(
    decomposition: &Decomposition,
    path: &str,
    importance: &[f32],
    (features, c): (usize, usize),
) -> Vec<usize> {
    let mut known = decomposition.run.eval.known.iter();
    let known = known.find(|known| pattern_matches(&known.pattern, path));
    match known.map(|known| known.solution) {
        Some(KnownSolution::Identity { .. }) => identity_order(importance, features, c),
        Some(KnownSolution::Dense { .. }) | None => sum_order(importance, c),
    }
}

/// The upper one of the pair of leaky hard sigmoids.
fn upper_leaky(z: f32) -> f32 {
    if z > 1.0 {
        1.0 + LEAK * (z - 1.0)
    } else {
        z.max(0.0)
    }
}

/// Importances over held-out batches; `None` where it was not to go on.
pub(super) fn distributions(
    task: &mut DecompositionTask,
    store: &mut Store,
    go_on: &mut GoOn<'_>,
) -> Result<Option<Distributions>, Fault> {
    let run = task.decomposition.run.clone();
    let of_run = &task.decomposition.sites;
    let paths: Vec<String> = of_run.iter().map(|site| site.path().to_owned()).collect();
    let mut sites: Vec<Site> = of_run
        .iter()
        .map(|site| Site::new(site.components))
        .collect();
    let feed = eval_feed(run.seed, run.eval.batch_size);
    let mut batch = Batch::default();
    let source = task.held_out().clone();
    let (program, figures) = task.for_figures();
    let finished = in_arena_of(program, figures, |program| {
        for index in 0..run.eval.batches.min(BATCHES) {
            if !go_on() {
                return Ok(false);
            }
            source.fill(&feed, index * feed.rows as u64, &mut batch)?;
            fill(program, &batch);
            program.parameters().step = u32::try_from(index).unwrap_or(u32::MAX);
            program.run_and_fetch(store)?;
            for (site, path) in sites.iter_mut().zip(&paths) {
                let importance = program.output(&format!("importance {path}"), store);
                let logits = program.output(&format!("logits {path}"), store);
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "a threshold is rounded to f32"
                )]
                site.add(importance, logits, run.eval.alive_threshold as f32);
            }
        }
        Ok(true)
    })?;
    if !finished {
        return Ok(None);
    }
    let mut all = Distributions {
        histograms: Vec::new(),
        densities: Vec::new(),
        means: Vec::new(),
    };
    for (site, path) in sites.iter().zip(paths) {
        let named = |what: &str| format!("{path} {what}");
        all.histograms.push(histogram(
            named("importance"),
            (0.0, 1.0),
            &values(&site.importances),
        ));
        let logits = values(&site.logits);
        all.histograms
            .push(histogram(named("logit"), spread(&logits), &logits));
        let parts = site
            .active
            .iter()
            .map(|&n| n as f64 / site.positions as f64);
        let parts: Vec<(f64, u64)> = parts.map(|part| (part, 1)).collect();
        all.densities
            .push(histogram(path.clone(), (0.0, spread(&parts).1), &parts));
        let mut order: Vec<usize> = (0..site.sums.len()).collect();
        order.sort_by(|&a, &b| site.sums[b].total_cmp(&site.sums[a]).then(a.cmp(&b)));
        all.means.push(Means {
            means: order
                .iter()
                .map(|&i| site.sums[i] / site.positions as f64)
                .collect(),
            site: path,
            order,
        });
    }
    Ok(Some(all))
}

/// Sums over the positions of a site.
struct Site {
    positions: u64,
    sums: Vec<f64>,
    active: Vec<u64>,
    importances: Counts,
    logits: Counts,
}

/// How many values there are of each thousandth.
type Counts = BTreeMap<i64, u64>;

/// Fine bins that values are counted in as they come, before the borders of the histogram are known.
const FINE: f64 = 1000.0;

impl Site {
    fn new(c: usize) -> Self {
        Self {
            positions: 0,
            sums: vec![0.0; c],
            active: vec![0; c],
            importances: Counts::new(),
            logits: Counts::new(),
        }
    }

    fn add(&mut self, importance: &[f32], logits: &[f32], alive: f32) {
        let c = self.sums.len();
        for row in importance.chunks(c) {
            self.positions += 1;
            for (index, &g) in row.iter().enumerate() {
                self.sums[index] += f64::from(g);
                self.active[index] += u64::from(g > alive);
            }
        }
        count(&mut self.importances, importance);
        count(&mut self.logits, logits);
    }
}

/// Adds values, rounded to a thousandth; a value that is not finite is no value.
fn count(counts: &mut Counts, values: &[f32]) {
    for &value in values.iter().filter(|value| value.is_finite()) {
        *counts.entry(rounded(f64::from(value))).or_insert(0) += 1;
    }
}

/// The values of counts, and how many there are of each.
fn values(counts: &Counts) -> Vec<(f64, u64)> {
    let values = counts.iter();
    values
        .map(|(&value, &count)| (value as f64 / FINE, count))
        .collect()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "saturates, far outside of every figure"
)]
fn rounded(value: f64) -> i64 {
    (value * FINE).round() as i64
}

/// Smallest and largest value.
fn spread(values: &[(f64, u64)]) -> (f64, f64) {
    let low = values
        .iter()
        .map(|(value, _)| *value)
        .fold(f64::INFINITY, f64::min);
    let high = values
        .iter()
        .map(|(value, _)| *value)
        .fold(f64::NEG_INFINITY, f64::max);
    if low < high {
        (low, high)
    } else {
        (low.min(0.0), high.max(0.0) + 1e-3)
    }
}

fn histogram(site: String, (low, high): (f64, f64), values: &[(f64, u64)]) -> Histogram {
    let mut counts = vec![0; BINS];
    for &(value, count) in values {
        let place = (value - low) / (high - low) * BINS as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a bin, and the last one for its upper border"
        )]
        let bin = (place.max(0.0) as usize).min(BINS - 1);
        counts[bin] += count;
    }
    Histogram {
        site,
        low,
        high,
        counts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_one_bin() {
        let values = [(0.0, 2), (0.019, 1), (0.02, 1), (0.5, 3), (1.0, 4)];
        let found = histogram("a".into(), (0.0, 1.0), &values);
        assert_eq!((found.counts[0], found.counts[1]), (3, 1));
        assert_eq!((found.counts[25], found.counts[49]), (3, 4));
        assert_eq!(found.counts.iter().sum::<u64>(), 11);
    }

    #[test]
    fn many_rows_and_columns_share_the_value_of_largest_magnitude() {
        let value = |row: usize, component: usize| match (row, component) {
            (5, 1) => -2.0,
            (5, 2) => 1.0,
            _ => 0.0,
        };
        let found = Matrix::new("a".into(), &[2, 1, 0], (7, 3), value);
        assert_eq!((found.each, found.rows.len()), ([3, 1], 3));
        assert_eq!(found.rows[1], [1.0, -2.0, 0.0]);
        let found = Matrix::new("a".into(), &[2, 1, 0], (7, 2), value);
        assert_eq!(
            (found.each, found.rows.len(), found.rows[0].len()),
            ([4, 2], 2, 2)
        );
        assert_eq!(found.rows[1], [-2.0, 0.0]);
    }

    #[test]
    fn values_are_counted_to_a_thousandth() {
        let mut counts = Counts::new();
        count(&mut counts, &[0.5, f32::NAN, 0.500_1]);
        count(&mut counts, &[-1.0, f32::INFINITY]);
        let counts = values(&counts);
        assert_eq!(counts, [(-1.0, 1), (0.5, 2)]);
        assert_eq!(spread(&counts), (-1.0, 0.5));
        assert_eq!(spread(&[(0.0, 3)]), (0.0, 1e-3));
    }

    #[test]
    fn a_site_adds_up_its_positions() {
        let mut site = Site::new(2);
        site.add(&[0.5, 0.0, 1.0, 0.05], &[0.5, -1.0, 3.0, 0.05], 0.1);
        assert_eq!((site.positions, &site.active[..]), (2, &[2, 0][..]));
        assert!((site.sums[0] - 1.5).abs() < 1e-6);
    }

    #[test]
    fn the_upper_gate_leaks_above_one() {
        let found = [-1.0, 0.25, 1.0, 3.0].map(|z| upper_leaky(z).to_bits());
        assert_eq!(found, [0.0, 0.25, 1.0, 1.02].map(f32::to_bits));
    }
}
