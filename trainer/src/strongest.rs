//! Where in held-out text each component is most important: found as rows come, in memory that does not grow with them.

use spd_configs::Input;
use spd_dataloader::Source;

use crate::decomposition::Decomposition;

/// Contexts of a component, each in a row of its own.
const CONTEXTS: usize = 4;

/// Tokens of a context before the peak, and after it.
const AROUND: [usize; 2] = [12, 6];

/// The longest context.
const WINDOW: usize = AROUND[0] + 1 + AROUND[1];

/// Measured on shakespeare.toml, and rounded up: a component as it is written, with the texts of its contexts.
const WRITTEN: usize = 12 << 10;

/// A parsed tokenizer is taken to be so many times as large as its file: two tables of the vocabulary and one of the merges, all of them
/// short strings.
const PARSED_TOKENIZER: usize = 16;

/// A row in which a component is important.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Context {
    /// Data position of the row.
    pub(crate) row: u64,
    /// The position where it is most important.
    pub(crate) peak: usize,
    /// The first position of the context.
    pub(crate) first: usize,
    /// Its positions.
    pub(crate) len: usize,
    importances: [f32; WINDOW],
}

impl Context {
    /// The importance of the component at each position of the context.
    pub(crate) fn importances(&self) -> &[f32] {
        &self.importances[..self.len]
    }

    /// The importance at the peak.
    fn strength(&self) -> f32 {
        self.importances[self.peak - self.first]
    }
}

/// The strongest contexts of each component of a site.
#[derive(Debug, Clone)]
pub(crate) struct Strongest {
    of: Vec<Vec<Context>>,
    /// The highest importance of each component in a row, and where it is.
    highest: Vec<(f32, usize)>,
}

impl Strongest {
    /// Of a site of `c` components, in no row yet.
    pub(crate) fn new(c: usize) -> Self {
        Self {
            of: vec![Vec::new(); c],
            highest: vec![(0.0, 0); c],
        }
    }

    /// The contexts of a component, strongest first; of equally strong ones those of earlier rows first. There are none where it is
    /// important nowhere.
    pub(crate) fn contexts(&self, component: usize) -> &[Context] {
        &self.of[component]
    }

    /// Looks at a row.
    ///
    /// - `row`: its data position
    /// - `importance`: f32 `[t, c]`; one that is no number counts as none
    pub(crate) fn add(&mut self, row: u64, importance: &[f32]) {
        let Self { of, highest } = self;
        let c = of.len();
        highest.fill((0.0, 0));
        for (position, importances) in importance.chunks_exact(c).enumerate() {
            for (highest, &g) in highest.iter_mut().zip(importances) {
                // Of equal ones the first stays.
                if g > highest.0 {
                    *highest = (g, position);
                }
            }
        }
        let t = importance.len() / c;
        for (component, (contexts, &(g, peak))) in of.iter_mut().zip(&*highest).enumerate() {
            let place = contexts.partition_point(|context| context.strength() >= g);
            if g <= 0.0 || place == CONTEXTS {
                continue;
            }
            contexts.truncate(CONTEXTS - 1);
            let first = peak.saturating_sub(AROUND[0]);
            let len = t.min(peak + 1 + AROUND[1]) - first;
            let mut importances = [0.0; WINDOW];
            for (to, position) in importances[..len].iter_mut().zip(first..) {
                *to = importance[position * c + component];
            }
            let context = Context {
                row,
                peak,
                first,
                len,
                importances,
            };
            contexts.insert(place, context);
        }
    }
}

/// Bytes that the components of a run take while they are looked for and written; 0 where it shows none.
pub(crate) fn shown_bytes(decomposition: &Decomposition, held_out: &Source) -> usize {
    let shown = decomposition.run.eval.components;
    let Input::Tokens { vocab, .. } = decomposition.target.input() else {
        return 0;
    };
    if shown == 0 {
        return 0;
    }
    let of_site = |c: usize| {
        let looked_for = c * (size_of::<Vec<Context>>() + CONTEXTS * size_of::<Context>());
        looked_for + c.min(shown) * WRITTEN
    };
    let sites = decomposition.sites.iter();
    let sites: usize = sites.map(|site| of_site(site.components)).sum();
    let tokenizer = match held_out {
        Source::Tokens(windows) => windows.dataset().tokenizer_bytes(),
        Source::Features(_) => 0,
    };
    let tokenizer = usize::try_from(tokenizer).unwrap_or(usize::MAX);
    // A change of each token.
    sites + tokenizer.saturating_mul(PARSED_TOKENIZER) + vocab * size_of::<(u32, f64)>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_of_different_rows_strongest_first_and_ties_go_to_the_earlier_row() {
        let mut strongest = Strongest::new(2);
        for (row, high) in [0.5, 0.25, 0.5, 0.75, 0.5, 0.125].into_iter().enumerate() {
            // Component 0 peaks twice in a row, component 1 nowhere.
            strongest.add(row as u64, &[0.0, 0.0, high, f32::NAN, high, -1.0]);
        }
        let found = strongest.contexts(0).iter();
        let found: Vec<_> = found.map(|at| (at.row, at.peak, at.strength())).collect();
        assert_eq!(found, [(3, 1, 0.75), (0, 1, 0.5), (2, 1, 0.5), (4, 1, 0.5)]);
        assert_eq!(strongest.contexts(0)[0].importances(), [0.0, 0.75, 0.75]);
        assert!(strongest.contexts(1).is_empty());
    }

    #[test]
    fn a_context_ends_where_its_row_does() {
        let mut row = vec![0.0; 40];
        for (peak, first, len) in [(0, 0, 7), (20, 8, 19), (39, 27, 13)] {
            row.fill(0.1);
            row[peak] = 1.0;
            let mut strongest = Strongest::new(1);
            strongest.add(7, &row);
            let context = strongest.contexts(0)[0];
            assert_eq!((context.first, context.len, context.row), (first, len, 7));
            assert_eq!(context.importances(), &row[first..first + len]);
        }
    }
}
