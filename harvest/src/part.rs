//! A part of a harvest: some batches, whose counts of tokens and of pairs are added to the others
//! together.

use rayon::prelude::*;

use crate::counts::{Counts, NotFinite, OfSite, Place, word};
use crate::sparse::{Sums, add_rows};

/// Next tokens of a smaller probability are passed over.
pub const LIKELY: f32 = 1e-3;

/// The unit of a sum of probabilities.
pub(crate) const OF_PROBABILITY: f64 = 4_294_967_296.0;

/// The text of a batch, and what the target expects after it.
#[derive(Debug, Clone, Copy)]
pub struct Text<'a> {
    /// Data position of the first row.
    pub first_row: u64,
    /// Rows that count; a batch may have others after them.
    pub rows: usize,
    /// Tokens of these rows, `[rows, positions]`.
    pub tokens: &'a [u32],
    /// Probabilities of the next token, f32 `[rows * positions, vocab]`.
    pub next: &'a [f32],
}

/// A part in the making.
#[derive(Debug)]
pub struct Part {
    source: u16,
    number: u64,
    /// By component of the harvest: positions of the part where it is active.
    active_at: Vec<Vec<u32>>,
    /// By position of the part.
    tokens: Vec<u32>,
    /// Likely next tokens of all positions, with their probability, and where those of each end.
    likely: Vec<(u32, u64)>,
    ends: Vec<usize>,
}

impl Part {
    /// A part of a dataset that has no batch yet.
    pub fn new(counts: &Counts, source: u16, number: u64) -> Self {
        Self {
            source,
            number,
            active_at: vec![Vec::new(); counts.setup.components()],
            tokens: Vec::new(),
            likely: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Adds a batch. If it fails, the counts are of no use.
    ///
    /// # Errors
    ///
    /// A line, when an importance or an activation is not finite.
    pub fn measure(
        &mut self,
        counts: &mut Counts,
        text: Text<'_>,
        sites: &[OfSite<'_>],
    ) -> Result<(), String> {
        let place = Place {
            source: self.source,
            first_row: text.first_row,
            rows: text.rows,
        };
        let at = word(self.tokens.len() as u64);
        let mut rest = &mut *self.active_at;
        let mut of_sites = Vec::with_capacity(sites.len());
        for site in &counts.setup.sites {
            let (own, others) = rest.split_at_mut(site.components);
            of_sites.push(own);
            rest = others;
        }
        let setup = &counts.setup;
        let measured = counts.sites.par_iter_mut().zip(of_sites).zip(sites);
        let measured = measured.enumerate().map(|(index, ((to, active_at), of))| {
            let number = u16::try_from(index).unwrap_or(u16::MAX);
            let ended = to.measure((setup, number), (place, at), *of, active_at);
            ended.map_err(|NotFinite { position, component }| {
                let row = text.first_row + (position / setup.positions) as u64;
                format!(
                    "{}:{component}: its importance or activation is not finite at position {} of row {row}; the checkpoint \
                     cannot be harvested",
                    setup.sites[index].name,
                    position % setup.positions
                )
            })
        });
        measured.collect::<Result<(), String>>()?;
        let positions = text.rows * setup.positions;
        self.tokens.extend(&text.tokens[..positions]);
        let vocab = setup.vocab;
        let of_positions = text.next[..positions * vocab].par_chunks_exact(vocab);
        let likely: Vec<Vec<(u32, u64)>> = of_positions.map(likely).collect();
        for of_position in likely {
            self.likely.extend(of_position);
            self.ends.push(self.likely.len());
        }
        Ok(())
    }

    /// Adds the part to the counts.
    pub fn finish(self, counts: &mut Counts) {
        let Self {
            active_at,
            tokens,
            likely,
            ends,
            ..
        } = self;
        let likely_at = |at: usize| {
            let start = at.checked_sub(1).map_or(0, |before| ends[before]);
            &likely[start..ends[at]]
        };
        let vocab = counts.setup.vocab;
        add_rows(
            &mut counts.input,
            &active_at,
            vocab,
            |_, positions, sums| {
                for &at in positions {
                    sums.add(tokens[at as usize], 1);
                }
            },
        );
        add_rows(&mut counts.next, &active_at, vocab, |_, positions, sums| {
            for &at in positions {
                for &(token, probability) in likely_at(at as usize) {
                    sums.add(token, probability);
                }
            }
        });
        if counts.setup.pairs {
            let pairs = Pairs::of(&active_at, tokens.len());
            let each = |component: usize, _: &[u32], sums: &mut Sums| pairs.add(component, sums);
            add_rows(&mut counts.pairs, &active_at, active_at.len(), each);
        }
        for &token in &tokens {
            counts.all_input[token as usize] += 1;
        }
        for &(token, probability) in &likely {
            counts.all_next[token as usize] += probability;
        }
        counts.positions += tokens.len() as u64;
        counts.parts.insert((self.source, self.number));
    }
}

/// The likely tokens of a position, with their probabilities in units of 2^-32.
fn likely(probabilities: &[f32]) -> Vec<(u32, u64)> {
    let tokens = (0..).zip(probabilities).filter(|(_, p)| **p >= LIKELY);
    let unit = |(token, &p): (u32, &f32)| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a probability is rounded to an integer"
        )]
        let units = (f64::from(p) * OF_PROBABILITY).round() as u64;
        (token, units)
    };
    tokens.map(unit).collect()
}

/// The pairs of components that are active at one position.
///
/// A component that is active often is a bitmap of positions: it meets another by the bits that both
/// have. A component that is active at fewer positions than a bitmap has words goes through the
/// others at each of them.
struct Pairs<'a> {
    active_at: &'a [Vec<u32>],
    bitmaps: Vec<Option<Vec<u64>>>,
    components: Components,
}

impl<'a> Pairs<'a> {
    fn of(active_at: &'a [Vec<u32>], positions: usize) -> Self {
        let words = positions.div_ceil(64);
        let bitmap = |at: &Vec<u32>| {
            (at.len() >= words).then(|| {
                let mut bits = vec![0_u64; words];
                at.iter()
                    .for_each(|&at| bits[at as usize / 64] |= 1 << (at % 64));
                bits
            })
        };
        Self {
            active_at,
            bitmaps: active_at.par_iter().map(bitmap).collect(),
            components: Components::of(active_at, positions),
        }
    }

    /// Adds the positions that a component shares with each of those of higher numbers.
    fn add(&self, component: usize, sums: &mut Sums) {
        let Some(own) = &self.bitmaps[component] else {
            for &at in &self.active_at[component] {
                for &other in self.components.after(at as usize, component) {
                    sums.add(other, 1);
                }
            }
            return;
        };
        let others = self.bitmaps.iter().zip(self.active_at);
        for (other, (bits, at)) in (0_u32..).zip(others).skip(component + 1) {
            let both = match bits {
                Some(bits) => {
                    let words = own.iter().zip(bits);
                    words.map(|(a, b)| u64::from((a & b).count_ones())).sum()
                }
                None => {
                    let has = |at: u32| own[at as usize / 64] >> (at % 64) & 1;
                    at.iter().map(|&at| has(at)).sum::<u64>()
                }
            };
            if both > 0 {
                sums.add(other, both);
            }
        }
    }
}

/// The components that are active at each position, in the order of their numbers.
struct Components {
    of: Vec<u32>,
    ends: Vec<usize>,
}

impl Components {
    fn of(active_at: &[Vec<u32>], positions: usize) -> Self {
        let mut ends = vec![0; positions + 1];
        for &at in active_at.iter().flatten() {
            ends[at as usize + 1] += 1;
        }
        for at in 0..positions {
            ends[at + 1] += ends[at];
        }
        // Each is filled from its start, which is where the one before it ends.
        let mut of = vec![0; ends[positions]];
        for (component, positions) in (0..).zip(active_at) {
            for &at in positions {
                let next = &mut ends[at as usize];
                of[*next] = component;
                *next += 1;
            }
        }
        Self { of, ends }
    }

    /// The active components of higher numbers than `component`, at a position.
    fn after(&self, at: usize, component: usize) -> &[u32] {
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        let all = &self.of[start..self.ends[at]];
        &all[all.partition_point(|&other| other as usize <= component)..]
    }
}
