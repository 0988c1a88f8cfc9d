//! The order of a sum over blocks: `n` blocks are the largest power of two below `n`, and the rest;
//! each half is added first.

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

#[cfg(test)]
mod tests {
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
}
