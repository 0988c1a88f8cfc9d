//! Examples of each component: positions where it is active, some by lot and the strongest.
//!
//! An example is kept or not by its key alone: the examples of lowest keys are kept, whatever the
//! order in which they come. So the examples of two harvests together are those of one over the
//! data of both.

/// Tokens of an example before its position, and as many after it.
pub const AROUND: usize = 20;

/// Importances of the longest example.
pub(crate) const WINDOW: usize = AROUND + 1 + AROUND;

/// A position where a component is active.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Example {
    /// The number of its dataset among those of the harvest.
    pub source: u16,
    /// Data position of its row there.
    pub row: u64,
    /// Its position in the row.
    pub position: u32,
    /// The draw that decides whether it is kept, uniform in `[0, 1)`.
    pub lot: f32,
    /// The logit behind its importance.
    pub logit: f32,
    /// Its importance.
    pub importance: f32,
    /// The importances of the component around it, in 255ths, as far as the row goes.
    pub(crate) window: [u8; WINDOW],
}

impl Example {
    /// The first position of the text around it.
    pub fn first(&self) -> usize {
        (self.position as usize).saturating_sub(AROUND)
    }

    /// The positions of the text around it, in a row of so many.
    pub fn places(&self, positions: usize) -> std::ops::Range<usize> {
        self.first()..positions.min(self.position as usize + 1 + AROUND)
    }

    /// The importances of the component there, rounded to 255ths.
    pub fn importances(&self, positions: usize) -> impl Iterator<Item = f32> {
        let len = self.places(positions).len();
        self.window[..len].iter().map(|&g| f32::from(g) / 255.0)
    }
}

/// The examples that are kept first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum First {
    /// Any, by lot.
    Lot,
    /// The examples of the highest logit; of equal ones some by lot.
    Strongest,
}

type Key = (u64, u16, u64, u32);

impl First {
    fn key(self, example: &Example) -> Key {
        let lot = u64::from(example.lot.to_bits());
        let rank = match self {
            Self::Lot => lot,
            Self::Strongest => (u64::from(descending(example.logit)) << 32) | lot,
        };
        (rank, example.source, example.row, example.position)
    }
}

/// A number that is smaller where `x` is larger.
fn descending(x: f32) -> u32 {
    let bits = x.to_bits();
    let ascending = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    !ascending
}

/// The examples of each component of a site: at most so many of each.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Examples {
    first: First,
    most: usize,
    of: Vec<Vec<Example>>,
    /// Beyond this key an example is not kept.
    bounds: Vec<Option<Key>>,
}

impl Examples {
    pub(crate) fn new(components: usize, first: First, most: usize) -> Self {
        Self {
            first,
            most,
            of: vec![Vec::new(); components],
            bounds: vec![None; components],
        }
    }

    /// Keeps an example if it is among the first. `example` makes it without its window, and
    /// `window` that, if it is to be kept.
    pub(crate) fn offer(
        &mut self,
        component: usize,
        mut example: Example,
        window: impl FnOnce() -> [u8; WINDOW],
    ) {
        let key = self.first.key(&example);
        if self.most == 0 || self.bounds[component].is_some_and(|bound| key > bound) {
            return;
        }
        example.window = window();
        let of = &mut self.of[component];
        of.push(example);
        if of.len() >= 2 * self.most {
            self.trim(component);
        }
    }

    fn trim(&mut self, component: usize) {
        let (first, most, of) = (self.first, self.most, &mut self.of[component]);
        if of.len() > most {
            of.select_nth_unstable_by_key(most - 1, |example| first.key(example));
            of.truncate(most);
        }
        if of.len() == most {
            self.bounds[component] = of.iter().map(|example| first.key(example)).max();
        }
    }

    /// Sorts all, and drops those that are not kept: the same examples are then the same bytes.
    pub(crate) fn settle(&mut self) {
        for component in 0..self.of.len() {
            self.trim(component);
            let first = self.first;
            self.of[component].sort_unstable_by_key(|example| first.key(example));
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (component, examples) in other.of.iter().enumerate() {
            for &example in examples {
                self.offer(component, example, || example.window);
            }
        }
        self.settle();
    }

    /// The examples of a component, first ones first, once they are settled.
    pub(crate) fn of(&self, component: usize) -> &[Example] {
        &self.of[component]
    }

    /// Gives each dataset another number.
    pub(crate) fn renumber(&mut self, new: impl Fn(u16) -> u16) {
        for example in self.of.iter_mut().flatten() {
            example.source = new(example.source);
        }
        self.bounds.fill(None);
    }

    pub(crate) fn set(&mut self, component: usize, examples: Vec<Example>) {
        self.of[component] = examples;
        self.trim(component);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(row: u64, lot: f32, logit: f32) -> Example {
        Example {
            source: 0,
            row,
            position: 3,
            lot,
            logit,
            importance: 1.0,
            window: [0; WINDOW],
        }
    }

    #[test]
    fn larger_numbers_come_first_in_descending_order() {
        let numbers = [
            f32::INFINITY,
            2.0,
            1.0,
            1e-30,
            0.0,
            -0.0,
            -1.0,
            -2.0,
            f32::NEG_INFINITY,
        ];
        assert!(numbers.map(descending).is_sorted());
    }

    #[test]
    fn the_first_are_kept_whatever_the_order_and_the_cut() {
        let all: Vec<Example> = (0..100_u64)
            .map(|row| example(row, (row * 37 % 100) as f32 / 100.0, (row * 13 % 7) as f32))
            .collect();
        for first in [First::Lot, First::Strongest] {
            let kept = |all: &mut dyn Iterator<Item = &Example>| {
                let mut kept = Examples::new(1, first, 5);
                all.for_each(|&example| kept.offer(0, example, || [0; WINDOW]));
                kept.settle();
                kept
            };
            let whole = kept(&mut all.iter());
            assert_eq!(whole, kept(&mut all.iter().rev()));
            let mut half = kept(&mut all[..31].iter());
            half.add(&kept(&mut all[31..].iter()));
            assert_eq!(whole, half);
            let mut sorted = all.clone();
            sorted.sort_by_key(|example| first.key(example));
            assert_eq!(whole.of(0), &sorted[..5]);
        }
    }
}
