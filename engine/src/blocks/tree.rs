//! The order of a sum over blocks: `n` blocks are the largest power of two below `n`, and the rest;
//! each half is added first.

use crate::cpu::{Pool, Rows};
use crate::ops::GRAIN;

/// Adds parts along the tree into `to`, element by element.
///
/// # Panics
///
/// When there is no part, or one is shorter than `to`.
pub fn sum(parts: &[&[f32]], to: &mut [f32]) {
    assert!(!parts.is_empty(), "a sum of at least one part");
    for (index, to) in to.chunks_mut(PIECE).enumerate() {
        sum_piece(parts, index * PIECE, to);
    }
}

/// Elements that are added at once: half the parts of that many stay in the nearest cache.
const PIECE: usize = 1024;

/// Adds the elements from `first` on.
fn sum_piece(parts: &[&[f32]], first: usize, to: &mut [f32]) {
    let piece = |part: usize| &parts[part][first..first + to.len()];
    match parts.len() {
        1 => to.copy_from_slice(piece(0)),
        2 => {
            let (one, other) = (piece(0), piece(1));
            for ((to, one), other) in to.iter_mut().zip(one).zip(other) {
                *to = one + other;
            }
        }
        count => {
            let (halves, rest) = parts.split_at(half(count));
            let mut of_rest = [0.0; PIECE];
            let of_rest = &mut of_rest[..to.len()];
            sum_piece(halves, first, to);
            sum_piece(rest, first, of_rest);
            to.iter_mut()
                .zip(of_rest)
                .for_each(|(to, rest)| *to += *rest);
        }
    }
}

/// The largest power of two below `parts`, which is at least two.
fn half(parts: usize) -> usize {
    parts.next_power_of_two() / 2
}

/// A sum of parts that arrive one after the other. It holds one subtree of each size, and one more.
#[derive(Debug, Default)]
pub struct Running {
    /// Sums of 1, 2, 4, .. parts, if there is one.
    subtrees: Vec<Option<Vec<f32>>>,
    /// Unused buffers.
    spare: Vec<Vec<f32>>,
}

impl Running {
    /// Most buffers of a sum of this many parts.
    pub fn buffers(parts: usize) -> usize {
        parts.max(1).ilog2() as usize + 1
    }

    /// Adds the next part, in pieces.
    pub fn add<'p>(&mut self, pool: &Pool, part: impl IntoIterator<Item = &'p [f32]>) {
        let first = match self.subtrees.first_mut() {
            Some(first) => first.take(),
            None => {
                self.subtrees.push(None);
                None
            }
        };
        let mut carried = match first {
            None => {
                let mut buffer = self.spare.pop().unwrap_or_default();
                buffer.clear();
                part.into_iter().for_each(|piece| buffer.extend(piece));
                self.subtrees[0] = Some(buffer);
                return;
            }
            Some(mut first) => {
                let mut rest = &mut first[..];
                for piece in part {
                    let (to, others) = rest.split_at_mut(piece.len());
                    add(pool, to, piece);
                    rest = others;
                }
                first
            }
        };
        for size in 1.. {
            if size == self.subtrees.len() {
                self.subtrees.push(None);
            }
            match self.subtrees[size].take() {
                None => {
                    self.subtrees[size] = Some(carried);
                    return;
                }
                Some(subtree) => {
                    add(pool, &mut carried, &subtree);
                    self.spare.push(subtree);
                }
            }
        }
    }

    /// The sum of all parts, which resets it; the next part begins another sum.
    ///
    /// # Panics
    ///
    /// When there was no part.
    pub fn finish(&mut self, pool: &Pool) -> &mut [f32] {
        let (subtrees, spare) = (&mut self.subtrees, &mut self.spare);
        let parts = subtrees.iter_mut().filter_map(Option::take);
        let whole = parts.reduce(|smaller, mut larger| {
            add(pool, &mut larger, &smaller);
            spare.push(smaller);
            larger
        });
        spare.push(whole.expect("a sum of at least one part"));
        spare.last_mut().expect("put there")
    }
}

fn add(pool: &Pool, to: &mut [f32], part: &[f32]) {
    pool.run(to.len(), GRAIN, Rows(to, 1), |range, to| {
        to.0.iter_mut()
            .zip(&part[range])
            .for_each(|(to, part)| *to += part);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::oracle::random;

    fn parts(count: usize) -> Vec<Vec<f32>> {
        let part = |index| random(&[37], index as u64).values;
        (0..count).map(part).collect()
    }

    fn whole(parts: &[Vec<f32>]) -> Vec<u32> {
        let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        let mut sum = vec![0.0; 37];
        super::sum(&parts, &mut sum);
        sum.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn halves_are_added_first() {
        let parts = parts(7);
        let at = |index: usize| parts[index][5];
        let seven = ((at(0) + at(1)) + (at(2) + at(3))) + ((at(4) + at(5)) + at(6));
        assert_eq!(whole(&parts)[5], seven.to_bits());
    }

    // A rank with a whole subtree adds it alone.
    #[test]
    fn subtrees_may_be_added_separately() {
        for (blocks, ranks) in [(2, 2), (4, 2), (8, 2), (8, 4), (16, 8)] {
            let parts = parts(blocks);
            let of_ranks: Vec<Vec<f32>> = parts
                .chunks(blocks / ranks)
                .map(|chunk| whole(chunk).into_iter().map(f32::from_bits).collect())
                .collect();
            assert_eq!(whole(&of_ranks), whole(&parts), "{blocks} {ranks}");
        }
    }

    #[test]
    fn a_running_sum_equals_the_sum_of_all_parts() {
        let (pool, mut running) = (Pool::single(), Running::default());
        for count in 1..20 {
            let parts = parts(count);
            for part in &parts {
                running.add(&pool, [&part[..3], &part[3..]]);
            }
            let found: Vec<u32> = running.finish(&pool).iter().map(|x| x.to_bits()).collect();
            assert_eq!(found, whole(&parts), "{count}");
            let held = running.subtrees.iter().flatten().count() + running.spare.len();
            assert!(held <= Running::buffers(19), "{held}");
        }
    }
}
