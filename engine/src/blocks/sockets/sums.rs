//! Sums in progress: pieces that a rank has started, and slices that others have sent.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::frame::{Frame, MOST};

/// Sums and messages of a rank in progress.
#[derive(Default)]
pub(super) struct State {
    /// Number of pieces started so far.
    started: u64,
    /// For each sum of a program: its pieces.
    newest: BTreeMap<usize, Range<u64>>,
    /// Pieces that are not read yet: all ranks start the same in the same order.
    pieces: BTreeMap<u64, Piece>,
    /// Messages of the first rank that this rank has not read.
    pub(super) broadcasts: VecDeque<Vec<f32>>,
    /// Another rank wants to stop.
    pub(super) stop_requested: bool,
    pub(super) has_told_enough: bool,
    /// Frames to send, for each rank.
    pub(super) out: Vec<VecDeque<Frame>>,
    /// Number of frames that are not sent whole.
    pub(super) unsent: usize,
    /// Ranks that take nothing any more.
    pub(super) is_gone: Vec<bool>,
    /// This rank needs nothing more from the others.
    pub(super) has_left: bool,
    /// The thread of this rank is to end.
    pub(super) is_over: bool,
    pub(super) spare: Vec<Vec<f32>>,
}

/// A piece of a sum in progress, short enough that a slice of it is one frame.
#[derive(Default)]
pub(super) struct Piece {
    /// Number of its elements, once this rank has started it.
    pub(super) len: Option<usize>,
    /// This rank's slice of each rank's part.
    pub(super) parts: Vec<Option<Vec<f32>>>,
    /// Each rank's slice of the sum.
    pub(super) slices: Vec<Option<Vec<f32>>>,
    /// Its own slice is added, or is being added.
    pub(super) is_added: bool,
}

/// The slice that a rank adds of a piece of so many elements.
pub(super) fn slice(len: usize, rank: usize, size: usize) -> Range<usize> {
    len * rank / size..len * (rank + 1) / size
}

impl Piece {
    /// Another rank of which rank `rank` lacks the part, or else the slice of the sum.
    fn missing(&self, rank: usize) -> Option<usize> {
        let of = |all: &[Option<Vec<f32>>]| {
            let mut others = (0..all.len()).filter(|&other| other != rank);
            others.find(|&other| all[other].is_none())
        };
        let part = if self.is_added { None } else { of(&self.parts) };
        part.or_else(|| of(&self.slices))
    }

    /// Whether a slice has the expected length, if that is known.
    pub(super) fn fits(&self, values: &[f32], of: usize) -> bool {
        let len = self.len.map(|len| slice(len, of, self.parts.len()).len());
        len.is_none_or(|len| len == values.len())
    }
}

/// The pieces of a sum of so many elements, over so many ranks; at least one.
pub(super) fn pieces(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let each = MOST * size;
    let starts = (0..len.max(1)).step_by(each);
    starts.map(move |start| start..len.min(start + each))
}

impl State {
    /// State of a rank in a world of so many.
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

    /// Copies a piece of a sum to `to`, if it is whole.
    ///
    /// # Errors
    ///
    /// Another rank from which something is missing.
    pub(super) fn take(
        &mut self,
        number: u64,
        rank: usize,
        whole: &mut [f32],
    ) -> Result<(), usize> {
        let size = self.out.len();
        // If nothing is missing from the others, this rank has added its own slice.
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

    /// A buffer with these values.
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

    // All ranks cut a sum into the same pieces, and a slice of a piece is one frame.
    #[test]
    fn pieces_cover_a_sum_and_each_slice_is_one_frame() {
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
