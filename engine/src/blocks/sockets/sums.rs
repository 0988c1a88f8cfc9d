//! Sums on their way: what a rank has begun, and what others have sent.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::frame::{Frame, MOST};

/// What a rank has begun, and what others have sent.
#[derive(Default)]
pub(super) struct State {
    /// Pieces of sums that were started, in all.
    started: u64,
    /// By number of a sum: its pieces.
    newest: BTreeMap<usize, Range<u64>>,
    /// Those that are not read yet: all ranks start the same in the same order.
    pieces: BTreeMap<u64, Piece>,
    /// What the first rank has said, and nobody has heard.
    pub(super) said: VecDeque<Vec<f32>>,
    /// Someone does not want to go on.
    pub(super) is_enough: bool,
    pub(super) has_told_enough: bool,
    /// What is to be sent to each rank.
    pub(super) out: Vec<VecDeque<Frame>>,
    /// Frames that are not sent whole.
    pub(super) unsent: usize,
    /// Who takes nothing any more.
    pub(super) is_gone: Vec<bool>,
    /// This rank needs nothing more of the others.
    pub(super) has_left: bool,
    /// This one is to end.
    pub(super) is_over: bool,
    pub(super) spare: Vec<Vec<f32>>,
}

/// A piece of a sum on its way: so many elements that a slice of it is one frame.
#[derive(Default)]
pub(super) struct Piece {
    /// Its elements, once this rank has started it.
    pub(super) len: Option<usize>,
    /// This rank's slice of each rank's part.
    pub(super) parts: Vec<Option<Vec<f32>>>,
    /// Each rank's slice of the sum.
    pub(super) slices: Vec<Option<Vec<f32>>>,
    /// Its own is added, or is being added.
    pub(super) is_added: bool,
}

/// What a rank adds of a piece of so many elements.
pub(super) fn slice(len: usize, rank: usize, size: usize) -> Range<usize> {
    len * rank / size..len * (rank + 1) / size
}

impl Piece {
    /// Another rank whose part, or else whose slice of the sum, has not come to rank `rank`.
    fn missing(&self, rank: usize) -> Option<usize> {
        let of = |all: &[Option<Vec<f32>>]| {
            let mut others = (0..all.len()).filter(|&other| other != rank);
            others.find(|&other| all[other].is_none())
        };
        let part = if self.is_added { None } else { of(&self.parts) };
        part.or_else(|| of(&self.slices))
    }

    /// Whether a slice is as long as it should be, as far as that is known.
    pub(super) fn fits(&self, values: &[f32], of: usize) -> bool {
        let len = self.len.map(|len| slice(len, of, self.parts.len()).len());
        len.is_none_or(|len| len == values.len())
    }
}

/// The pieces of a sum of so many elements, by so many ranks; one at least.
pub(super) fn pieces(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let each = MOST * size;
    let starts = (0..len.max(1)).step_by(each);
    starts.map(move |start| start..len.min(start + each))
}

impl State {
    /// Of a world of so many ranks.
    pub(super) fn new(size: usize) -> Self {
        Self {
            out: (0..size).map(|_| VecDeque::new()).collect(),
            is_gone: vec![false; size],
            ..Self::default()
        }
    }

    /// Numbers the pieces of a sum that this rank starts.
    pub(super) fn number(&mut self, sum: usize, pieces: usize) -> Range<u64> {
        let first = self.started + 1;
        self.started += pieces as u64;
        let numbers = first..first + pieces as u64;
        self.newest.insert(sum, numbers.clone());
        numbers
    }

    /// The pieces of the newest sum of a number.
    pub(super) fn newest(&self, sum: usize) -> Range<u64> {
        self.newest[&sum].clone()
    }

    pub(super) fn piece(&mut self, number: u64, size: usize) -> &mut Piece {
        self.pieces.entry(number).or_insert_with(|| Piece {
            parts: vec![None; size],
            slices: vec![None; size],
            ..Piece::default()
        })
    }

    /// A piece whose parts are all there, and are to be added.
    pub(super) fn ready(&mut self) -> Option<(u64, &mut Piece)> {
        let is_ready = |piece: &Piece| {
            !piece.is_added && piece.len.is_some() && piece.parts.iter().all(Option::is_some)
        };
        let mut pieces = self.pieces.iter_mut();
        let ready = pieces.find(|(_, piece)| is_ready(piece));
        ready.map(|(&number, piece)| (number, piece))
    }

    /// Gives rank `rank` a piece of a sum, if it is whole.
    ///
    /// # Errors
    ///
    /// Another rank that it lacks something of.
    pub(super) fn take(
        &mut self,
        number: u64,
        rank: usize,
        whole: &mut [f32],
    ) -> Result<(), usize> {
        let size = self.out.len();
        // Where nothing of the others is missing, this rank has added its own slice.
        if let Some(other) = self.piece(number, size).missing(rank) {
            return Err(other);
        }
        let piece = self.pieces.remove(&number).unwrap_or_default();
        let len = whole.len();
        for (of, values) in piece.slices.into_iter().flatten().enumerate() {
            whole[slice(len, of, size)].copy_from_slice(&values);
            self.spare.push(values);
        }
        Ok(())
    }

    /// A buffer that holds these values.
    pub(super) fn copy(&mut self, values: &[f32]) -> Vec<f32> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend(values);
        buffer
    }

    pub(super) fn send(&mut self, to: usize, frame: Frame) {
        if !self.is_gone[to] {
            self.out[to].push_back(frame);
            self.unsent += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // All ranks cut a sum into the same pieces, and a slice of a piece is a frame.
    #[test]
    fn pieces_are_a_sum_and_their_slices_are_frames() {
        for size in [2, 3, 8] {
            for len in [
                0,
                1,
                MOST,
                size * MOST,
                size * MOST + 1,
                3 * size * MOST - 1,
            ] {
                let pieces: Vec<Range<usize>> = pieces(len, size).collect();
                assert_eq!((pieces[0].start, pieces[pieces.len() - 1].end), (0, len));
                for pair in pieces.windows(2) {
                    assert_eq!(pair[0].end, pair[1].start);
                }
                for piece in &pieces {
                    let slices = (0..size).map(|rank| slice(piece.len(), rank, size));
                    assert!(slices.clone().all(|slice| slice.len() <= MOST));
                    assert_eq!(slices.map(|slice| slice.len()).sum::<usize>(), piece.len());
                }
            }
        }
    }
}
