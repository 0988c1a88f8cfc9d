//! Counts of a harvest, which add up to the same bytes in any order: integers, sums of rounded
//! numbers, and sets of examples.
//!
//! An importance is rounded to a multiple of 2^-24 before it is added, and an activation to one of
//! 2^-40: the mean of any number of them is off by at most 2^-25 and 2^-41.

use std::collections::BTreeSet;

use rayon::prelude::*;
use spd_draws::{Purpose, Stream};

use crate::examples::{Example, Examples, First, WINDOW};
use crate::setup::{Setup, Site};
use crate::sparse::Row;

/// Bins of importances: `floor(20 g)` in f32, and 19 for 1.
pub(crate) const IMPORTANCE_BINS: usize = 20;

/// Bins of activations, two an octave: the first begins at 0, the second at `1.5 * 2^-24`, the last
/// at `1.5 * 2^7`.
pub(crate) const ACTIVATION_BINS: usize = 64;

/// The half octave of 2^-24 in the bits of an f32.
const FIRST_HALF_OCTAVE: u32 = (127 - 24) * 2;

/// Strongest examples of a component, at most.
pub(crate) const STRONGEST: usize = 12;

const OF_IMPORTANCE: f64 = 16_777_216.0;
const OF_ACTIVATION: f64 = 1_099_511_627_776.0;

/// Measurements of a site on a batch.
#[derive(Debug, Clone, Copy)]
pub struct OfSite<'a> {
    /// Importances, f32 `[rows * positions, c]`.
    pub importance: &'a [f32],
    /// Logits behind them, of the same shape.
    pub logits: &'a [f32],
    /// `|x V| |U|`, of the same shape, where it is measured.
    pub activation: Option<&'a [f32]>,
}

/// Rows of a batch: the number of their dataset, the data position of the first, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) source: u16,
    pub(crate) first_row: u64,
    pub(crate) rows: usize,
}

/// Counts of a site.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SiteCounts {
    /// Of importances, by component, in units of 2^-24.
    pub(crate) importance: Vec<i64>,
    /// Of activations, in units of 2^-40: all, and those where the component is active.
    pub(crate) activation: [Vec<u128>; 2],
    /// Positions where the component is active.
    pub(crate) active: Vec<u64>,
    /// `[c, IMPORTANCE_BINS]` and `[c, ACTIVATION_BINS]`; no bins where it is not measured.
    pub(crate) histograms: [Vec<u64>; 2],
    pub(crate) sample: Examples,
    pub(crate) strongest: Examples,
}

impl SiteCounts {
    fn new(site: &Site, examples: usize) -> Self {
        let c = site.components;
        let measured = if site.activations { c } else { 0 };
        Self {
            importance: vec![0; c],
            activation: [vec![0; measured], vec![0; measured]],
            active: vec![0; c],
            histograms: [
                vec![0; c * IMPORTANCE_BINS],
                vec![0; measured * ACTIVATION_BINS],
            ],
            sample: Examples::new(c, First::Lot, examples),
            strongest: Examples::new(c, First::Strongest, STRONGEST),
        }
    }

    fn add(&mut self, other: &Self) {
        let Self {
            importance,
            activation,
            active,
            histograms,
            sample,
            strongest,
        } = self;
        sum(importance, &other.importance);
        for (ours, theirs) in activation.iter_mut().zip(&other.activation) {
            sum(ours, theirs);
        }
        sum(active, &other.active);
        for (ours, theirs) in histograms.iter_mut().zip(&other.histograms) {
            sum(ours, theirs);
        }
        sample.add(&other.sample);
        strongest.add(&other.strongest);
    }

    /// Adds a batch. Returns the positions where each component is active, numbered from `at`.
    pub(crate) fn measure(
        &mut self,
        (setup, number): (&Setup, u16),
        (place, at): (Place, u32),
        of: OfSite<'_>,
        active_at: &mut [Vec<u32>],
    ) -> Result<(), NotFinite> {
        let c = self.active.len();
        let (t, positions) = (setup.positions, place.rows * setup.positions);
        self.add_histograms(of, positions)?;
        let stream = Stream::new(Purpose::Contexts, 3, number);
        // The strongest position of each component in the row, and those that have one.
        let mut peaks: Vec<Option<Example>> = vec![None; c];
        let mut seen = Vec::new();
        let importances = of.importance.chunks_exact(t * c);
        let rows = (place.first_row..).zip(importances).take(place.rows);
        for (index, (row, of_row)) in rows.enumerate() {
            for (position, importances) in (0_u32..).zip(of_row.chunks_exact(c)) {
                let place_in = index * t + position as usize;
                let alive = importances.iter().enumerate();
                for (component, &importance) in alive.filter(|(_, g)| **g > setup.alive) {
                    active_at[component].push(at + word(place_in as u64));
                    self.active[component] += 1;
                    let place_of = place_in * c + component;
                    if let Some(activation) = of.activation {
                        self.activation[1][component] += rounded(activation[place_of]);
                    }
                    let lot =
                        stream.uniform(setup.seed, word(row), position, word(component as u64));
                    let example = Example {
                        source: place.source,
                        row,
                        position,
                        lot,
                        logit: of.logits[place_of],
                        importance,
                        window: [0; WINDOW],
                    };
                    self.sample.offer(component, example, || {
                        window(of_row, (c, component), example)
                    });
                    let peak = &mut peaks[component];
                    match peak {
                        None => {
                            seen.push(component);
                            *peak = Some(example);
                        }
                        Some(peak) if is_stronger(&example, peak) => *peak = example,
                        Some(_) => {}
                    }
                }
            }
            for component in seen.drain(..) {
                if let Some(peak) = peaks[component].take() {
                    self.strongest
                        .offer(component, peak, || window(of_row, (c, component), peak));
                }
            }
        }
        Ok(())
    }

    /// Adds all positions to sums and histograms.
    fn add_histograms(&mut self, of: OfSite<'_>, positions: usize) -> Result<(), NotFinite> {
        let c = self.active.len();
        let [bins, _] = &mut self.histograms;
        // Most importances are 0.
        for bins in bins.chunks_exact_mut(IMPORTANCE_BINS) {
            bins[0] += positions as u64;
        }
        for (position, importances) in of.importance.chunks_exact(c).take(positions).enumerate() {
            for (component, &g) in importances.iter().enumerate() {
                if g == 0.0 {
                    continue;
                }
                if !g.is_finite() {
                    return Err(NotFinite {
                        position,
                        component,
                    });
                }
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a number of a bin"
                )]
                let bin = (g * IMPORTANCE_BINS as f32) as usize;
                self.importance[component] += nearest(f64::from(g) * OF_IMPORTANCE);
                let bins = &mut bins[component * IMPORTANCE_BINS..][..IMPORTANCE_BINS];
                bins[0] -= 1;
                bins[bin.min(IMPORTANCE_BINS - 1)] += 1;
            }
        }
        let [_, bins] = &mut self.histograms;
        let activations = of.activation.unwrap_or(&[]).chunks_exact(c);
        for (position, activations) in activations.take(positions).enumerate() {
            for (component, &size) in activations.iter().enumerate() {
                if !size.is_finite() {
                    return Err(NotFinite {
                        position,
                        component,
                    });
                }
                self.activation[0][component] += rounded(size);
                let half_octave = (size.to_bits() >> 22).saturating_sub(FIRST_HALF_OCTAVE) as usize;
                let bin = half_octave.min(ACTIVATION_BINS - 1);
                bins[component * ACTIVATION_BINS + bin] += 1;
            }
        }
        Ok(())
    }
}

/// A place at which an importance or an activation is no number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotFinite {
    pub(crate) position: usize,
    pub(crate) component: usize,
}

fn is_stronger(example: &Example, than: &Example) -> bool {
    let by_logit = than.logit.total_cmp(&example.logit);
    by_logit.then(example.lot.total_cmp(&than.lot)).is_lt()
}

/// The nearest integer, away from 0 if there are two, of a number that an f32 can hold. It is
/// [`f64::round`] without its call: the sum is exact below 2^52, and such a number is even above.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a number that is rounded to an integer"
)]
fn nearest(x: f64) -> i64 {
    (x + 0.5_f64.copysign(x)) as i64
}

/// An activation in units of 2^-40; it is at least 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a number that is at least 0, and an integer if it is as large"
)]
fn rounded(activation: f32) -> u128 {
    let units = f64::from(activation) * OF_ACTIVATION;
    // A conversion to 128 bits is slow.
    if units < 1e18 {
        nearest(units) as u128
    } else {
        units as u128
    }
}

/// The importances around an example in 255ths, of those of its row, f32 `[t, c]`.
fn window(of_row: &[f32], (c, component): (usize, usize), example: Example) -> [u8; WINDOW] {
    let mut window = [0; WINDOW];
    let places = example.places(of_row.len() / c);
    for (to, position) in window.iter_mut().zip(places) {
        let g = of_row[position * c + component].clamp(0.0, 1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and 255"
        )]
        let in_255ths = (g * 255.0).round() as u8;
        *to = in_255ths;
    }
    window
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "numbers that far apart may share a draw"
)]
pub(crate) fn word(number: u64) -> u32 {
    number as u32
}

fn sum<T: Copy + std::ops::AddAssign>(to: &mut [T], from: &[T]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

/// A mean of importances, from their sum and how many there are.
pub(crate) fn mean_importance(sum: i64, of: u64) -> f64 {
    sum as f64 / OF_IMPORTANCE / of as f64
}

/// A mean of activations, likewise.
pub(crate) fn mean_activation(sum: u128, of: u64) -> f64 {
    sum as f64 / OF_ACTIVATION / of as f64
}

/// Counts of all components over some parts of a harvest.
#[derive(Debug, Clone, PartialEq)]
pub struct Counts {
    /// The settings.
    pub setup: Setup,
    /// The parts that are counted, of each dataset.
    pub(crate) parts: BTreeSet<(u16, u64)>,
    pub(crate) positions: u64,
    pub(crate) sites: Vec<SiteCounts>,
    /// Of all components of the harvest: of input tokens where it is active; of probability of next
    /// tokens there, in units of 2^-32; of positions where another, of a higher number, is active
    /// too.
    pub(crate) input: Vec<Row>,
    pub(crate) next: Vec<Row>,
    pub(crate) pairs: Vec<Row>,
    /// Of all positions, by token.
    pub(crate) all_input: Vec<u64>,
    pub(crate) all_next: Vec<u64>,
}

impl Counts {
    /// Of no part yet.
    pub fn new(setup: Setup) -> Self {
        let rows = vec![Row::default(); setup.components()];
        let sites = setup.sites.iter();
        Self {
            parts: BTreeSet::new(),
            positions: 0,
            sites: sites
                .map(|site| SiteCounts::new(site, setup.examples))
                .collect(),
            input: rows.clone(),
            next: rows.clone(),
            pairs: rows,
            all_input: vec![0; setup.vocab],
            all_next: vec![0; setup.vocab],
            setup,
        }
    }

    /// Whether a part of a dataset is counted.
    pub fn has(&self, source: u16, part: u64) -> bool {
        self.parts.contains(&(source, part))
    }

    /// Number of parts that are counted.
    pub fn parts(&self) -> u64 {
        self.parts.len() as u64
    }

    /// The parts that are counted: the number of the dataset, and that of the part there.
    pub fn each_part(&self) -> impl Iterator<Item = (u16, u64)> {
        self.parts.iter().copied()
    }

    /// Components that are active somewhere.
    pub fn active(&self) -> usize {
        let all = self.sites.iter().flat_map(|site| &site.active);
        all.filter(|&&active| active > 0).count()
    }

    /// Positions that are counted.
    pub fn positions(&self) -> u64 {
        self.positions
    }

    /// Whether some part is counted in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        !self.parts.is_disjoint(&other.parts)
    }

    /// Adds the counts of other parts, of a harvest of the same settings.
    pub fn add(&mut self, other: &Self) {
        self.parts.extend(&other.parts);
        self.positions += other.positions;
        let sites = self.sites.par_iter_mut().zip(&other.sites);
        sites.for_each(|(ours, theirs)| ours.add(theirs));
        for (ours, theirs) in [
            (&mut self.input, &other.input),
            (&mut self.next, &other.next),
            (&mut self.pairs, &other.pairs),
        ] {
            let rows = ours.par_iter_mut().zip(theirs);
            rows.for_each(|(ours, theirs)| ours.add(theirs));
        }
        sum(&mut self.all_input, &other.all_input);
        sum(&mut self.all_next, &other.all_next);
    }

    /// Gives each dataset another number, as those of a harvest that is merged with others:
    /// `numbers` has those of all, in order.
    pub fn renumber(&mut self, numbers: &[u16]) {
        let new = |source: u16| numbers.get(usize::from(source)).copied().unwrap_or(source);
        let parts = std::mem::take(&mut self.parts).into_iter();
        self.parts = parts.map(|(source, part)| (new(source), part)).collect();
        for site in &mut self.sites {
            site.sample.renumber(new);
            site.strongest.renumber(new);
        }
    }

    /// Puts examples in order, which makes equal counts equal bytes.
    pub(crate) fn settle(&mut self) {
        self.sites.par_iter_mut().for_each(|site| {
            site.sample.settle();
            site.strongest.settle();
        });
    }

    /// The examples of a component of a site that were taken by lot, in order.
    pub fn sample(&self, site: usize, component: usize) -> &[Example] {
        self.sites[site].sample.of(component)
    }

    /// The strongest examples of a component of a site, the strongest first.
    pub fn strongest(&self, site: usize, component: usize) -> &[Example] {
        self.sites[site].strongest.of(component)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the plain form"
    )]
    fn numbers_are_rounded_as_by_the_standard_library() {
        let halves = [0.5, 1.5, 2.5, 0.499_999_97, 8_388_607.5, 8_388_609.0];
        let halves = halves.into_iter().map(|x: f32| x / OF_ACTIVATION as f32);
        let all = (0..u32::MAX / 2).step_by(9_973).map(f32::from_bits);
        for x in all.chain(halves).filter(|x| x.is_finite()) {
            let units = f64::from(x) * OF_ACTIVATION;
            assert_eq!(rounded(x), units.round() as u128, "{x:e}");
            let units = f64::from(x) * OF_IMPORTANCE;
            assert_eq!(nearest(units), units.round() as i64, "{x:e}");
            assert_eq!(nearest(-units), (-units).round() as i64, "{x:e}");
        }
    }
}
