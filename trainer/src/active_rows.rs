//! A sample of the positions of held-out text at which each component is active: a few rows by lot,
//! and in each a few positions by lot. It is found as rows come, in memory that does not grow with
//! them, and is the same in whatever order they come.
//!
//! A row is drawn with a chance that is proportional to the number of its positions where the
//! component is active, and each drawn row counts the same: so a mean over the sample is one over
//! all positions where the component is active, but for chance. If all of those rows are in the
//! sample, each counts by its number of positions instead.

use spd_draws::{Purpose, Stream};

/// Rows of a component.
pub(crate) const ROWS: usize = 2;

/// Positions of a row.
pub(crate) const POSITIONS: usize = 16;

/// Draws that decide between equals, each for a component of a site in a row of the data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lots {
    /// The run's.
    pub(crate) seed: u64,
    /// Number of the site.
    pub(crate) site: u16,
}

impl Lots {
    fn stream(self, sample: u8) -> Stream {
        Stream::new(Purpose::Contexts, sample, self.site)
    }

    /// That of a position among those of the same logit.
    pub(crate) fn of_peak(self, row: u64, position: usize, component: usize) -> f32 {
        self.of_position(0, row, position, component)
    }

    /// The lots of a row to be in the sample, by component.
    fn of_row(self, row: u64, lots: &mut [f32]) {
        self.stream(1).fill_uniform(self.seed, word(row), 0, lots);
    }

    fn of_position(self, sample: u8, row: u64, position: usize, component: usize) -> f32 {
        let [position, component] = [position, component].map(|number| word(number as u64));
        let stream = self.stream(sample);
        stream.uniform(self.seed, word(row), position, component)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "numbers that far apart may share a lot"
)]
fn word(number: u64) -> u32 {
    number as u32
}

/// A row in which a component is active.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ActiveRow {
    /// Its data position.
    pub(crate) row: u64,
    lot: f32,
    /// Its positions where the component is active.
    active: usize,
    positions: [u32; POSITIONS],
}

impl ActiveRow {
    /// The positions of the sample, in order.
    pub(crate) fn positions(&self) -> &[u32] {
        &self.positions[..self.active.min(POSITIONS)]
    }
}

/// The sample of each component of a site.
#[derive(Debug, Clone)]
pub(crate) struct ActiveRows {
    lots: Lots,
    alive: f32,
    of: Vec<Vec<ActiveRow>>,
    /// Rows in which each component is active.
    seen: Vec<usize>,
    /// Of a row: at how many positions each component is active, and its lots.
    active: Vec<usize>,
    of_row: Vec<f32>,
}

impl ActiveRows {
    /// Of a site of `c` components, which are active where their importance exceeds `alive`; of no
    /// row yet.
    pub(crate) fn new(c: usize, alive: f32, lots: Lots) -> Self {
        Self {
            lots,
            alive,
            of: vec![Vec::new(); c],
            seen: vec![0; c],
            active: vec![0; c],
            of_row: vec![0.0; c],
        }
    }

    /// Bytes that a component takes.
    pub(crate) const fn bytes_each() -> usize {
        let rows = size_of::<Vec<ActiveRow>>() + ROWS * size_of::<ActiveRow>();
        rows + 2 * size_of::<usize>() + size_of::<f32>()
    }

    /// The rows of a component; all in which it is active, where those are few.
    pub(crate) fn rows(&self, component: usize) -> &[ActiveRow] {
        &self.of[component]
    }

    /// The weight of each position of a row in a mean over the sample of a component.
    pub(crate) fn weight(&self, component: usize, row: &ActiveRow) -> f64 {
        let of_row = if self.seen[component] > ROWS {
            1.0
        } else {
            row.active as f64
        };
        of_row / row.positions().len() as f64
    }

    /// Looks at a row: its data position, and the importances f32 `[t, c]`.
    pub(crate) fn add(&mut self, row: u64, importance: &[f32]) {
        let c = self.of.len();
        self.active.fill(0);
        for importances in importance.chunks_exact(c) {
            for (active, &g) in self.active.iter_mut().zip(importances) {
                *active += usize::from(g > self.alive);
            }
        }
        self.lots.of_row(row, &mut self.of_row);
        for (component, rows) in self.of.iter_mut().enumerate() {
            let active = self.active[component];
            if active == 0 {
                continue;
            }
            self.seen[component] += 1;
            // The first of exponential times of that rate: a draw without replacement, by the
            // number of positions.
            let lot = -(1.0 - self.of_row[component]).ln() / active as f32;
            let place = rows.partition_point(|other| (other.lot, other.row) < (lot, row));
            if place == ROWS {
                continue;
            }
            let of_component = importance.iter().skip(component).step_by(c);
            let places = of_component.enumerate().filter(|(_, g)| **g > self.alive);
            let places = places.map(|(position, _)| position);
            let positions = chosen(places, |at| self.lots.of_position(2, row, at, component));
            rows.reserve_exact(ROWS - rows.len());
            rows.truncate(ROWS - 1);
            let found = ActiveRow {
                row,
                lot,
                active,
                positions,
            };
            rows.insert(place, found);
        }
    }
}

/// The places of the lowest lots, in order; zeros where there are fewer.
fn chosen(places: impl Iterator<Item = usize>, lot: impl Fn(usize) -> f32) -> [u32; POSITIONS] {
    let mut places: Vec<(f32, usize)> = places.map(|place| (lot(place), place)).collect();
    let by_lot = |a: &(f32, usize), b: &(f32, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    if places.len() > POSITIONS {
        places.select_nth_unstable_by(POSITIONS, by_lot);
        places.truncate(POSITIONS);
    }
    places.sort_by_key(|(_, place)| *place);
    let mut positions = [0; POSITIONS];
    for (to, (_, place)) in positions.iter_mut().zip(places) {
        *to = word(place as u64);
    }
    positions
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOTS: Lots = Lots { seed: 3, site: 1 };

    // By hand: one component, active above 0.5.
    #[test]
    fn few_rows_and_positions_are_all_there_in_the_order_of_positions() {
        let mut rows = ActiveRows::new(1, 0.5, LOTS);
        rows.add(4, &[0.6, 0.5, 0.9, f32::NAN]);
        rows.add(9, &[0.0, 0.1, 0.2, 0.3]);
        let found = rows.rows(0);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].row, found[0].positions()), (4, &[0, 2][..]));
        assert!((rows.weight(0, &found[0]) - 1.0).abs() < 1e-12);
    }

    // 500 components, each active at all of 24 positions in even rows and at the last 12 in odd
    // ones. Let its effect be 1 in even rows and 0 in odd ones: 2/3 over all active positions. The
    // deviation of an estimate is a third, that of their mean 0.015.
    #[test]
    fn a_mean_over_the_sample_is_that_over_all_active_positions() {
        let c = 500;
        let of = |order: &mut dyn Iterator<Item = u64>| {
            let mut rows = ActiveRows::new(c, 0.0, LOTS);
            for row in order {
                let mut importance = vec![1.0; 24 * c];
                if row % 2 == 1 {
                    importance[..12 * c].fill(0.0);
                }
                rows.add(row, &importance);
            }
            rows
        };
        let rows = of(&mut (0..40));
        let other = of(&mut (0..40).rev());
        let (mut mean, mut late, mut all) = (0.0, 0, 0);
        for component in 0..c {
            let found = rows.rows(component);
            assert_eq!(found, other.rows(component));
            assert_eq!(found.len(), ROWS);
            let of_row =
                |row: &ActiveRow| rows.weight(component, row) * row.positions().len() as f64;
            let even = found.iter().filter(|row| row.row % 2 == 0);
            let sum: f64 = found.iter().map(of_row).sum();
            mean += even.map(of_row).sum::<f64>() / sum / c as f64;
            let positions = found.iter().flat_map(ActiveRow::positions);
            all += positions.clone().count();
            late += positions.filter(|&&at| at >= 12).count();
        }
        assert!((mean - 2.0 / 3.0).abs() < 0.06, "{mean}");
        // Two rows of three have 16 positions, half of them late; the third has 12, all of them
        // late.
        let late = late as f64 / all as f64;
        assert!((late - 28.0 / 44.0).abs() < 0.03, "{late}");
    }

    // By hand: active at 1 position of the first row and at 3 of the second, and nowhere else.
    #[test]
    fn a_sample_of_all_rows_weighs_them_by_their_positions() {
        let mut rows = ActiveRows::new(1, 0.0, LOTS);
        rows.add(0, &[0.0, 1.0, 0.0]);
        rows.add(1, &[1.0, 1.0, 1.0]);
        let found = rows.rows(0).iter();
        let mut weights = found.map(|row| rows.weight(0, row));
        assert!(weights.all(|weight| (weight - 1.0).abs() < 1e-12));
    }
}
