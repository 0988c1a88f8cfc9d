//! Sparse counts: of a component, by token or by other component.

use rayon::prelude::*;

/// Counts by key, in the order of keys; keys without a count are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) keys: Vec<u32>,
    pub(crate) counts: Vec<u64>,
}

impl Row {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u64)> {
        self.keys.iter().copied().zip(self.counts.iter().copied())
    }

    pub(crate) fn add(&mut self, other: &Self) {
        if other.keys.is_empty() {
            return;
        }
        let most = self.keys.len() + other.keys.len();
        let mut sum = Self {
            keys: Vec::with_capacity(most),
            counts: Vec::with_capacity(most),
        };
        let (mut ours, mut theirs) = (self.iter().peekable(), other.iter().peekable());
        loop {
            let (key, count) = match (ours.peek(), theirs.peek()) {
                (Some(&(a, one)), Some(&(b, more))) if a == b => {
                    ours.next();
                    theirs.next();
                    (a, one + more)
                }
                (Some((a, _)), Some((b, _))) if a > b => theirs.next().expect("it is there"),
                (Some(_), _) => ours.next().expect("it is there"),
                (None, Some(_)) => theirs.next().expect("it is there"),
                (None, None) => break,
            };
            sum.keys.push(key);
            sum.counts.push(count);
        }
        drop((ours, theirs));
        sum.keys.shrink_to_fit();
        sum.counts.shrink_to_fit();
        *self = sum;
    }
}

/// Sums by key that become a row.
pub(crate) struct Sums {
    of: Vec<u64>,
    touched: Vec<u32>,
}

impl Sums {
    fn new(width: usize) -> Self {
        Self {
            of: vec![0; width],
            touched: Vec::new(),
        }
    }

    /// Adds to the sum of a key; `more` is above 0.
    #[inline]
    pub(crate) fn add(&mut self, key: u32, more: u64) {
        let sum = &mut self.of[key as usize];
        if *sum == 0 {
            self.touched.push(key);
        }
        *sum += more;
    }

    fn take(&mut self) -> Row {
        self.touched.sort_unstable();
        let counts = self.touched.iter();
        let counts = counts.map(|&key| std::mem::take(&mut self.of[key as usize]));
        let counts = counts.collect();
        Row {
            keys: std::mem::take(&mut self.touched),
            counts,
        }
    }
}

/// Adds to the row of each component what `each` adds of the positions where it is active.
///
/// - `width`: number of keys
pub(crate) fn add_rows(
    rows: &mut [Row],
    active_at: &[Vec<u32>],
    width: usize,
    each: impl Fn(usize, &[u32], &mut Sums) + Sync,
) {
    let components = rows.par_iter_mut().zip(active_at).enumerate();
    components.for_each_init(
        || Sums::new(width),
        |sums, (component, (row, positions))| {
            each(component, positions, sums);
            row.add(&sums.take());
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(of: &[(u32, u64)]) -> Row {
        let (keys, counts) = of.iter().copied().unzip();
        Row { keys, counts }
    }

    #[test]
    fn rows_add_up_key_by_key_in_any_order() {
        let (a, b) = (row(&[(1, 2), (5, 1)]), row(&[(0, 7), (5, 3), (9, 1)]));
        let expected = row(&[(0, 7), (1, 2), (5, 4), (9, 1)]);
        for (mut one, other) in [(a.clone(), &b), (b.clone(), &a)] {
            one.add(other);
            assert_eq!(one, expected);
        }
    }

    #[test]
    fn the_row_of_a_component_has_the_keys_of_its_positions() {
        let mut rows = vec![Row::default(), row(&[(3, 1)])];
        add_rows(
            &mut rows,
            &[vec![0, 2], vec![1]],
            4,
            |component, positions, sums| {
                for &at in positions {
                    sums.add(3, 1);
                    if component == 0 {
                        sums.add(at, 10);
                    }
                }
            },
        );
        assert_eq!(rows, [row(&[(0, 10), (2, 10), (3, 2)]), row(&[(3, 2)])]);
    }
}
