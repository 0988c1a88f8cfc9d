use half::bf16;

use super::{Half, Pack, Unpack};
use crate::cpu::{Frame, Rows};
use crate::ops::grain_rows;

const LARGEST: f32 = 65535.0;

impl Half {
    /// The numbers of a row of words.
    pub fn unpack(self, words: &[f32], numbers: &mut [f32]) {
        for (word, pair) in words.iter().zip(numbers.chunks_mut(2)) {
            let word = word.to_bits().to_le_bytes();
            for (&half, number) in word.as_chunks::<2>().0.iter().zip(pair) {
                *number = self.read(u16::from_le_bytes(half));
            }
        }
    }

    /// The words of a row of numbers, which `draws` round if there are any.
    pub fn pack(self, numbers: &[f32], draws: Option<&[f32]>, words: &mut [f32]) {
        let half = |at: usize| match numbers.get(at) {
            Some(&number) => self.written(number, draws.map(|draws| draws[at])),
            None => 0,
        };
        for (pair, word) in words.iter_mut().enumerate() {
            let [low, high] = [half(2 * pair), half(2 * pair + 1)];
            *word = f32::from_bits(u32::from(high) << 16 | u32::from(low));
        }
    }

    fn read(self, bits: u16) -> f32 {
        match self {
            Self::Bf16 => bf16::from_bits(bits).to_f32(),
            Self::Unit => f32::from(bits) / LARGEST,
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number up to 65535"
    )]
    fn written(self, x: f32, draw: Option<f32>) -> u16 {
        match self {
            Self::Bf16 => bf16::from_f32(x).to_bits(),
            Self::Unit => {
                let scaled = x.clamp(0.0, 1.0) * LARGEST;
                let least = scaled.floor();
                let up = match draw {
                    Some(draw) => draw < scaled - least,
                    None => scaled - least >= 0.5,
                };
                least as u16 + u16::from(up)
            }
        }
    }
}

pub(super) fn unpack(op: Unpack, frame: &mut Frame<'_>) {
    let columns = op.columns.max(1);
    let words = Half::words(columns);
    let (x, out) = (frame.input(0), frame.output(0).values);
    let (rows, parts) = (out.len() / columns, Rows(out, columns));
    let grain = grain_rows(rows, columns);
    frame.pool.run(rows, grain, parts, |rows, out| {
        let x = x[rows.start * words..rows.end * words].chunks_exact(words);
        for (words, numbers) in x.zip(out.0.chunks_exact_mut(columns)) {
            op.half.unpack(words, numbers);
        }
    });
}

pub(super) fn pack(op: Pack, frame: &mut Frame<'_>) {
    let columns = frame.ty(0).columns().max(1);
    let words = Half::words(columns);
    let (x, out) = (frame.input(0), frame.output(0).values);
    let draws = op.drawn.then(|| frame.input(1));
    let (rows, parts) = (x.len() / columns, Rows(out, words));
    let grain = grain_rows(rows, columns);
    frame.pool.run(rows, grain, parts, |rows, out| {
        for (row, words) in rows.zip(out.0.chunks_exact_mut(words)) {
            let own = row * columns..(row + 1) * columns;
            let draws = draws.map(|draws| &draws[own.clone()]);
            op.half.pack(&x[own], draws, words);
        }
    });
}
