//! Positions of held-out text at which each component is most important, found in one pass and
//! constant memory.
//!
//! Contexts are ranked by the logit, from which the gates make the importance: half of all
//! importances may be exactly 1, and no two logits are the same but those of the same text. The
//! program of the figures has the logits of all positions. The length of what a component adds,
//! `|x V| |U|`, would be another measure, and another product `[positions, C]` of each site whose
//! importance function does not read `x V`; it is shown where removals are measured. Contexts of
//! equal logits are taken by lot.

use spd_dataloader::Source;

use crate::active_rows::{ActiveRows, Lots};
use crate::decomposition::Decomposition;
use crate::networks::Input;

/// Contexts of a component, each in a row of its own.
pub(crate) const CONTEXTS: usize = 12;

/// Tokens of a context before the peak, and as many after it.
pub(crate) const AROUND: usize = 20;

/// The longest context.
const WINDOW: usize = AROUND + 1 + AROUND;

/// Measured on shakespeare.toml, and rounded up: a component as it is written, with the texts of
/// its contexts.
const WRITTEN: usize = 12 << 10;

/// A parsed tokenizer is taken to be so many times as large as its file: two tables of the
/// vocabulary and one of the merges, all of them short strings.
const PARSED_TOKENIZER: usize = 16;

/// A row in which a component is important.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Context {
    /// Data position of the row.
    pub(crate) row: u64,
    /// The position where it is most important.
    pub(crate) peak: usize,
    /// Its logit there.
    pub(crate) logit: f32,
    /// The first position of the context.
    pub(crate) first: usize,
    /// Its positions.
    pub(crate) len: usize,
    /// Decides between equal logits.
    lot: f32,
    importances: [f32; WINDOW],
}

impl Context {
    /// The importance of the component at each position of the context.
    pub(crate) fn importances(&self) -> &[f32] {
        &self.importances[..self.len]
    }
}

/// The strongest contexts of each component of a site.
#[derive(Debug, Clone)]
pub(crate) struct Strongest {
    lots: Lots,
    of: Vec<Vec<Context>>,
    /// The peak of each component in a row.
    peaks: Vec<Peak>,
}

/// The highest logit in a row, where it is, and the lot of that position.
#[derive(Debug, Clone, Copy)]
struct Peak {
    logit: f32,
    position: usize,
    lot: f32,
}

const NOWHERE: Peak = Peak {
    logit: f32::NEG_INFINITY,
    position: 0,
    lot: 0.0,
};

impl Strongest {
    /// Of a site of `c` components, in no row yet.
    pub(crate) fn new(c: usize, lots: Lots) -> Self {
        Self {
            lots,
            of: vec![Vec::new(); c],
            peaks: vec![NOWHERE; c],
        }
    }

    /// The contexts of a component, strongest first. There are none where it is important nowhere.
    pub(crate) fn contexts(&self, component: usize) -> &[Context] {
        &self.of[component]
    }

    /// Looks at a row.
    ///
    /// - `row`: its data position
    /// - `importance`, `logits`: f32 `[t, c]`; a position counts where the importance is above 0
    ///   and the logit is a number
    pub(crate) fn add(&mut self, row: u64, importance: &[f32], logits: &[f32]) {
        let Self { lots, of, peaks } = self;
        let c = of.len();
        peaks.fill(NOWHERE);
        let positions = importance.chunks_exact(c).zip(logits.chunks_exact(c));
        for (position, (importances, logits)) in positions.enumerate() {
            let each = peaks.iter_mut().zip(importances).zip(logits).enumerate();
            for (component, ((peak, &g), &logit)) in each {
                if g > 0.0 && logit >= peak.logit {
                    let lot = lots.of_peak(row, position, component);
                    if logit > peak.logit || lot < peak.lot {
                        *peak = Peak {
                            logit,
                            position,
                            lot,
                        };
                    }
                }
            }
        }
        let t = importance.len() / c;
        for (component, (contexts, &peak)) in of.iter_mut().zip(&*peaks).enumerate() {
            let is_before = |context: &Context| {
                let by_logit = peak.logit.total_cmp(&context.logit);
                let by_lot = by_logit.then(context.lot.total_cmp(&peak.lot));
                by_lot.then(context.row.cmp(&row)).is_le()
            };
            let place = contexts.partition_point(is_before);
            if peak.logit == f32::NEG_INFINITY || place == CONTEXTS {
                continue;
            }
            contexts.reserve_exact(CONTEXTS - contexts.len());
            contexts.truncate(CONTEXTS - 1);
            let first = peak.position.saturating_sub(AROUND);
            let len = t.min(peak.position + 1 + AROUND) - first;
            let mut importances = [0.0; WINDOW];
            for (to, position) in importances[..len].iter_mut().zip(first..) {
                *to = importance[position * c + component];
            }
            let context = Context {
                row,
                peak: peak.position,
                logit: peak.logit,
                first,
                len,
                lot: peak.lot,
                importances,
            };
            contexts.insert(place, context);
        }
    }
}

/// Bytes that the components of a run take while they are looked for and written; 0 where it shows
/// none.
pub(crate) fn shown_bytes(decomposition: &Decomposition, held_out: &Source) -> usize {
    let shown = decomposition.run.eval.components;
    let Input::Tokens { vocab, .. } = decomposition.target.input() else {
        return 0;
    };
    if shown == 0 {
        return 0;
    }
    let of_site = |c: usize| {
        let contexts = size_of::<Vec<Context>>() + CONTEXTS * size_of::<Context>();
        let looked_for = c * (contexts + size_of::<Peak>() + ActiveRows::bytes_each());
        looked_for + c.min(shown) * WRITTEN
    };
    let sites = decomposition.sites.iter();
    let sites: usize = sites.map(|site| of_site(site.components)).sum();
    let tokenizer = match held_out {
        Source::Tokens(windows) => windows.dataset().tokenizer_bytes(),
        Source::Features(_) => 0,
    };
    let tokenizer = usize::try_from(tokenizer).unwrap_or(usize::MAX);
    // A sum for each token, and those of them that may have moved farthest.
    let moved = vocab * (size_of::<f64>() + size_of::<(u32, f64)>());
    sites + tokenizer.saturating_mul(PARSED_TOKENIZER) + moved
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOTS: Lots = Lots { seed: 7, site: 0 };

    fn clamped(logits: &[f32]) -> Vec<f32> {
        logits.iter().map(|logit| logit.clamp(0.0, 1.0)).collect()
    }

    // The importance is 1 in all of them.
    #[test]
    fn contexts_are_of_different_rows_and_the_highest_logit_comes_first() {
        let mut strongest = Strongest::new(2, LOTS);
        for row in 0..40_u64 {
            // Any order of 1.5 to 41.5. Component 1 is important nowhere.
            let high = (row * 17 % 40) as f32 + 1.5;
            let logits = [1.0, -1.0, high, f32::NAN, high - 0.25, -1.0];
            strongest.add(row, &clamped(&logits), &logits);
        }
        let found = strongest.contexts(0).iter();
        let found: Vec<_> = found.map(|at| (at.logit, at.peak)).collect();
        let expected: Vec<_> = (0..12_u8).map(|i| (40.5 - f32::from(i), 1)).collect();
        assert_eq!(found, expected);
        let rows = strongest.contexts(0).iter().map(|context| context.row);
        assert!(rows.clone().all(|row| row < 40), "{rows:?}");
        assert_eq!(strongest.contexts(0)[0].importances(), [1.0, 1.0, 1.0]);
        assert!(strongest.contexts(1).is_empty());
    }

    // 12 of 60 rows, 100 components: 1200 contexts, a fifth of them in the first fifth of the rows.
    // The deviation of that share is 1 %, that of the share of either position 1.5 %.
    #[test]
    fn equal_contexts_are_taken_by_lot_and_the_same_whatever_the_order_of_rows() {
        let c = 100;
        let of = |rows: &mut dyn Iterator<Item = u64>| {
            let mut strongest = Strongest::new(c, LOTS);
            for row in rows {
                strongest.add(row, &vec![1.0; 2 * c], &vec![3.0; 2 * c]);
            }
            let found = (0..c).flat_map(|component| strongest.contexts(component).to_vec());
            found.collect::<Vec<_>>()
        };
        let found = of(&mut (0..60));
        assert_eq!(found, of(&mut (0..60).rev()));
        assert_eq!(found.len(), c * CONTEXTS);
        let part = |is: &dyn Fn(&Context) -> bool| {
            found.iter().filter(|context| is(context)).count() as f64 / found.len() as f64
        };
        let (early, first) = (part(&|at| at.row < 12), part(&|at| at.peak == 0));
        assert!((early - 0.2).abs() < 0.05, "{early}");
        assert!((first - 0.5).abs() < 0.075, "{first}");
    }

    #[test]
    fn a_context_ends_where_its_row_does() {
        let mut row = vec![0.0; 60];
        for (peak, first, len) in [(0, 0, 21), (30, 10, 41), (59, 39, 21)] {
            row.fill(0.1);
            row[peak] = 1.0;
            let mut strongest = Strongest::new(1, LOTS);
            strongest.add(7, &row, &row);
            let context = strongest.contexts(0)[0];
            assert_eq!((context.first, context.len, context.row), (first, len, 7));
            assert_eq!(context.importances(), &row[first..first + len]);
        }
    }
}
