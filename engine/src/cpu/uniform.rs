//! The draws of a tensor of rows, many counters at once.
//!
//! The numbers are those of [`Stream::uniform`]. A vector holds one word of as many counters as it
//! has lanes, and two vectors of each word are interleaved, because each round depends on the one
//! before. Counters run on from row to row, so short rows leave no lane idle.

#[cfg(target_arch = "x86_64")]
mod halves;

use pulp::{Simd, WithSimd};
use spd_draws::{MULTIPLIERS, ROUNDS, Stream, keys, uniform};

use super::math::on_vectors;
use crate::step_parameters::StepParameters;

/// Counters of a call of the widest vectors: two vectors of 16 lanes.
const COUNTERS: usize = 32;

/// Numbers from one counter.
const NUMBERS: usize = 4;

/// Vectors whose rounds are interleaved.
const VECTORS: usize = 2;

/// The draws of one tensor `[rows, columns]` in one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uniforms {
    keys: [[u32; 2]; ROUNDS],
    what: u32,
    step: u32,
    first_row: u32,
    columns: usize,
}

impl Uniforms {
    /// The draws of this program's block: its `rows` come behind those of the blocks before it.
    pub(crate) fn new(
        stream: Stream,
        parameters: &StepParameters,
        [rows, columns]: [usize; 2],
    ) -> Self {
        Self {
            keys: keys(parameters.seed),
            what: stream.word(),
            step: parameters.step,
            first_row: parameters.first_row(rows),
            columns,
        }
    }

    /// The same draws for every part of a batch: its rows count from 0.
    pub(crate) fn shared(self) -> Self {
        Self {
            first_row: 0,
            ..self
        }
    }

    /// The draws for `out`, from element `start` on; rows follow each other.
    #[inline(always)]
    pub(crate) fn fill(&self, start: usize, out: &mut [f32]) {
        if self.columns.is_multiple_of(NUMBERS) && start.is_multiple_of(NUMBERS) {
            self.counters(start / NUMBERS, out);
        } else {
            self.ragged(start, out);
        }
    }

    /// The first draw of each row, from row `start` on.
    #[inline(always)]
    pub(crate) fn first_of_rows(&self, start: usize, out: &mut [f32]) {
        let alone = Self {
            columns: NUMBERS,
            ..*self
        };
        // To find the first counters of a call takes as long as a hundred draws.
        const ROWS: usize = 16 * COUNTERS;
        let mut numbers = [0.0; NUMBERS * ROWS];
        for (index, out) in out.chunks_mut(ROWS).enumerate() {
            let numbers = &mut numbers[..NUMBERS * out.len()];
            alone.counters(start + index * ROWS, numbers);
            for (out, four) in out.iter_mut().zip(numbers.as_chunks::<NUMBERS>().0) {
                *out = four[0];
            }
        }
    }

    /// A counter's four numbers may span the end of a row: row by row, surplus numbers of the last
    /// counter are dropped.
    fn ragged(&self, start: usize, out: &mut [f32]) {
        let padded = Self {
            columns: self.columns.next_multiple_of(NUMBERS),
            ..*self
        };
        let mut numbers = [0.0; NUMBERS * COUNTERS];
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((start + done) / self.columns, (start + done) % self.columns);
            let first = column - column % NUMBERS;
            let rest = &mut out[done..];
            let count = (self.columns - column)
                .min(rest.len())
                .min(numbers.len() - NUMBERS);
            let counters = (column - first + count).div_ceil(NUMBERS);
            padded.counters(
                (row * padded.columns + first) / NUMBERS,
                &mut numbers[..NUMBERS * counters],
            );
            rest[..count].copy_from_slice(&numbers[column - first..][..count]);
            done += count;
        }
    }

    /// The numbers of counters `first..`; a row has `columns / 4` of them.
    #[inline(always)]
    fn counters(&self, first: usize, out: &mut [f32]) {
        on_vectors(Counters {
            draws: self,
            first,
            out: &mut *out,
        });
    }
}

/// Philox 4x32 on vectors: see `spd_draws`.
struct Counters<'a> {
    draws: &'a Uniforms,
    first: usize,
    out: &'a mut [f32],
}

/// A word of each of several vectors of counters.
type Word<S> = [<S as Simd>::u32s; VECTORS];

impl WithSimd for Counters<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { draws, first, out } = self;
        let call = VECTORS * S::U32_LANES;
        let mut place = Place::new(simd, draws, first);
        let mut chunks = out.chunks_exact_mut(NUMBERS * call);
        for chunk in &mut chunks {
            draws.turn(simd, &place, chunk);
            place.advance(simd);
        }
        let rest = chunks.into_remainder();
        if !rest.is_empty() {
            let mut numbers = [0.0; NUMBERS * COUNTERS];
            draws.turn(simd, &place, &mut numbers[..NUMBERS * call]);
            rest.copy_from_slice(&numbers[..rest.len()]);
        }
    }
}

impl Uniforms {
    /// The numbers of the counters at `place`, in order.
    #[inline(always)]
    fn turn<S: Simd>(&self, simd: S, place: &Place<S>, out: &mut [f32]) {
        let splat = |word| [simd.splat_u32s(word); VECTORS];
        let words = [place.block, place.row, splat(self.what), splat(self.step)];
        let words = rounds(simd, words, &self.keys);
        let (vectors, _) = S::as_mut_simd_f32s(out);
        for (vector, four) in vectors.as_chunks_mut::<NUMBERS>().0.iter_mut().enumerate() {
            let bits = words.map(|word| simd.transmute_f32s_u32s(word[vector]));
            *four = simd.interleave_shfl_f32s(bits);
        }
        for out in out {
            *out = uniform(out.to_bits());
        }
    }
}

/// The words of all counters after the last round.
#[inline(always)]
fn rounds<S: Simd>(simd: S, mut words: [Word<S>; 4], keys: &[[u32; 2]; ROUNDS]) -> [Word<S>; 4] {
    #[cfg(target_arch = "x86_64")]
    if let Some(words) = halves::rounds(simd, words, keys) {
        return words;
    }
    let [m0, m1] = MULTIPLIERS.map(|multiplier| simd.splat_u32s(multiplier));
    for key in keys {
        let [k0, k1] = key.map(|key| simd.splat_u32s(key));
        let [w0, w1, w2, w3] = words;
        for vector in 0..VECTORS {
            let (low0, high0) = simd.widening_mul_u32s(m0, w0[vector]);
            let (low1, high1) = simd.widening_mul_u32s(m1, w2[vector]);
            words[0][vector] = simd.xor_u32s(simd.xor_u32s(high1, w1[vector]), k0);
            words[1][vector] = low1;
            words[2][vector] = simd.xor_u32s(simd.xor_u32s(high0, w3[vector]), k1);
            words[3][vector] = low0;
        }
    }
    words
}

/// The counters of a call: for each lane its counter within the row, and the row.
struct Place<S: Simd> {
    block: Word<S>,
    row: Word<S>,
    per_row: u32,
}

impl<S: Simd> Place<S> {
    #[inline(always)]
    fn new(simd: S, draws: &Uniforms, first: usize) -> Self {
        let per_row = draws.columns / NUMBERS;
        // The counter of each lane's numbers, after interleaving.
        let mut order = [0.0; NUMBERS * COUNTERS];
        let numbers = (0u32..).map(f32::from_bits);
        order
            .iter_mut()
            .zip(numbers)
            .for_each(|(to, number)| *to = number);
        let (vectors, _) = S::as_simd_f32s(&order);
        let vectors = *vectors
            .first_chunk::<NUMBERS>()
            .expect("as long as the longest vectors");
        let [lanes, ..] = simd.deinterleave_shfl_f32s(vectors);
        S::as_mut_simd_f32s(&mut order).0[0] = lanes;
        // To divide the number of each counter takes as long as many draws.
        let end = narrow(per_row);
        let mut next = [first % per_row, first / per_row].map(narrow);
        let places: [_; COUNTERS] = std::array::from_fn(|_| {
            let [block, row] = next;
            next = if block + 1 == end {
                [0, row + 1]
            } else {
                [block + 1, row]
            };
            [block, row]
        });
        let (mut block, mut row) = ([0; COUNTERS], [0; COUNTERS]);
        for at in 0..VECTORS * S::U32_LANES {
            let (vector, lane) = (at / S::U32_LANES, at % S::U32_LANES);
            let number = order[lane].to_bits() as usize;
            let place = places[vector * S::U32_LANES + number / NUMBERS];
            (block[at], row[at]) = (place[0], draws.first_row + place[1]);
        }
        let word = |values: &[u32; COUNTERS]| {
            let (vectors, _) = S::as_simd_u32s(values);
            *vectors.first_chunk::<VECTORS>().expect("as above")
        };
        Self {
            block: word(&block),
            row: word(&row),
            per_row: end,
        }
    }

    /// Moves to the counters of the next call.
    #[inline(always)]
    fn advance(&mut self, simd: S) {
        let call = narrow(VECTORS * S::U32_LANES);
        let (rows, blocks) = (call / self.per_row, call % self.per_row);
        let per_row = simd.splat_u32s(self.per_row);
        for (block, row) in self.block.iter_mut().zip(&mut self.row) {
            let next = simd.add_u32s(*block, simd.splat_u32s(blocks));
            let wraps = simd.greater_than_or_equal_u32s(next, per_row);
            *block = simd.select_u32s(wraps, simd.sub_u32s(next, per_row), next);
            let (more, less) = (simd.splat_u32s(rows + 1), simd.splat_u32s(rows));
            *row = simd.add_u32s(*row, simd.select_u32s(wraps, more, less));
        }
    }
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number)
        .expect("a batch has fewer than 2^32 rows, and a row fewer than 2^34 columns")
}

#[cfg(test)]
mod tests {
    use pulp::{Scalar, Scalar128b, Scalar512b};
    use spd_draws::Purpose;

    use super::*;

    const PARAMETERS: StepParameters = StepParameters {
        seed: 0x1234_5678_9abc,
        step: 9,
        block: 5,
        scalars: Vec::new(),
    };
    const STREAM: Stream = Stream::new(Purpose::Source, 1, 2);

    fn expected(columns: usize, start: usize, len: usize) -> Vec<f32> {
        let one = |element: usize| {
            let (row, column) = (narrow(element / columns), narrow(element % columns));
            STREAM.uniform(PARAMETERS.seed, PARAMETERS.step, 5 * 3 + row, column)
        };
        (start..start + len).map(one).collect()
    }

    #[test]
    fn draws_of_a_tensor_equal_those_of_its_elements() {
        for columns in [1, 3, 4, 20, 37, 64, 200, 301] {
            let draws = Uniforms::new(STREAM, &PARAMETERS, [3, columns]);
            for (start, len) in [(0, 1), (0, 700), (columns, 130), (2 * columns + 1, 333)] {
                let mut out = vec![f32::NAN; len];
                draws.fill(start, &mut out);
                assert_eq!(out, expected(columns, start, len), "{columns} {start}");
            }
            let mut firsts = [f32::NAN; 70];
            draws.first_of_rows(2, &mut firsts);
            let expected: Vec<f32> = (2..72)
                .flat_map(|row| expected(columns, row * columns, 1))
                .collect();
            assert_eq!(firsts.to_vec(), expected);
        }
    }

    #[test]
    fn all_vector_widths_give_the_same_draws() {
        let draws = &Uniforms::new(STREAM, &PARAMETERS, [3, 20]);
        let expected = expected(20, 40, 500);
        let with = |draw: &dyn Fn(Counters<'_>)| {
            let mut out = vec![f32::NAN; 500];
            draw(Counters {
                draws,
                first: 10,
                out: &mut out,
            });
            assert_eq!(out, expected);
        };
        with(&|counters| counters.with_simd(Scalar));
        with(&|counters| counters.with_simd(Scalar128b));
        with(&|counters| counters.with_simd(Scalar512b));
    }
}
