//! Every random number of a run, as a function of its purpose and position.
//!
//! A draw is named by `(seed, purpose, sample, site, step, row, column)` and computed by Philox
//! 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//! There is no stream: nothing to save in a checkpoint, nothing to restore. Every rank and thread
//! gets the same draw, and a draw can be made again instead of being kept.
//!
//! ```text
//! key      seed, low and high word
//! counter  0: column / 4      component, feature or element; a counter gives four columns
//!          1: row             global row of the step (batch row * sequence length + position)
//!          2: stream          purpose << 24 | sample << 16 | site
//!          3: step            optimizer step, or another running number of the purpose
//! ```

mod philox;

pub use philox::{MULTIPLIERS, ROUNDS, block, keys, uniform};

/// The use of a draw. Two purposes never share a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// Component sources of stochastic masks; one `sample` for each term and mask sample.
    Source = 1,
    /// Delta masks.
    Delta = 2,
    /// Routing of positions to sites.
    Routing = 3,
    /// Noise on importance logits (binomial sampling).
    LogitNoise = 4,
    /// Generated features of a batch.
    Features = 5,
    /// Starting values of a target that is trained here; `site` is the number of the tensor.
    TargetInit = 6,
    /// The order of samples.
    Order = 7,
    /// Starting values of components and importance functions; `site` is the number of the tensor.
    Init = 8,
    /// Choice among equally strong contexts of a component, and of the positions at which a
    /// component is measured; `step` is the row of the data.
    Contexts = 9,
    /// Starting values of the state of losses; `site` is the number of the tensor.
    State = 10,
    /// Which elements of a batch an adversary attacks.
    Attacked = 11,
    /// Which of its particles attacks an element of a batch.
    Particle = 12,
    /// How an adversary's sources of 16 bits are rounded.
    Rounding = 13,
}

/// A family of draws: every part of the name but the seed, the step, the row and the column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream {
    /// The use of the draws.
    pub purpose: Purpose,
    /// Distinguishes several draws for one purpose in one step.
    pub sample: u8,
    /// Index of the site, parameter or dataset.
    pub site: u16,
}

impl Stream {
    /// A family of draws.
    pub const fn new(purpose: Purpose, sample: u8, site: u16) -> Self {
        Self {
            purpose,
            sample,
            site,
        }
    }

    /// The third word of the counter.
    pub const fn word(self) -> u32 {
        (self.purpose as u32) << 24 | (self.sample as u32) << 16 | self.site as u32
    }

    /// The draw at one position, uniform in `[0, 1)`.
    pub fn uniform(self, seed: u64, step: u32, row: u32, column: u32) -> f32 {
        let words = block(seed, [column / 4, row, self.word(), step]);
        uniform(words[(column % 4) as usize])
    }

    /// Fills `out` with the draws of one row, columns `0..out.len()`.
    pub fn fill_uniform(self, seed: u64, step: u32, row: u32, out: &mut [f32]) {
        for (block_index, four) in (0u32..).zip(out.chunks_mut(4)) {
            let words = block(seed, [block_index, row, self.word(), step]);
            for (value, word) in four.iter_mut().zip(words) {
                *value = uniform(word);
            }
        }
    }

    /// Fills `out` with standard normal draws of one row (Box and Muller on pairs of columns).
    pub fn fill_normal(self, seed: u64, step: u32, row: u32, out: &mut [f32]) {
        for (block_index, four) in (0u32..).zip(out.chunks_mut(4)) {
            let words = block(seed, [block_index, row, self.word(), step]);
            let mut normals = [0f32; 4];
            for pair in 0..2 {
                // In (0, 1], so that the logarithm is finite.
                let radius = 1.0 - f64::from(uniform(words[2 * pair]));
                let angle = std::f64::consts::TAU * f64::from(uniform(words[2 * pair + 1]));
                let length = (-2.0 * radius.ln()).sqrt();
                #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
                {
                    normals[2 * pair] = (length * angle.cos()) as f32;
                    normals[2 * pair + 1] = (length * angle.sin()) as f32;
                }
            }
            four.copy_from_slice(&normals[..four.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filled_row_holds_the_single_draws() {
        let stream = Stream::new(Purpose::Source, 3, 9);
        let mut row = [0f32; 11];
        stream.fill_uniform(42, 7, 100, &mut row);
        for (column, value) in (0u32..).zip(row) {
            assert_eq!(
                value.to_bits(),
                stream.uniform(42, 7, 100, column).to_bits()
            );
        }
    }

    #[test]
    fn every_part_of_the_name_changes_the_draw() {
        let base = Stream::new(Purpose::Source, 0, 0).uniform(1, 2, 3, 4);
        let others = [
            Stream::new(Purpose::Delta, 0, 0).uniform(1, 2, 3, 4),
            Stream::new(Purpose::Source, 1, 0).uniform(1, 2, 3, 4),
            Stream::new(Purpose::Source, 0, 1).uniform(1, 2, 3, 4),
            Stream::new(Purpose::Source, 0, 0).uniform(2, 2, 3, 4),
            Stream::new(Purpose::Source, 0, 0).uniform(1 << 32, 2, 3, 4),
            Stream::new(Purpose::Source, 0, 0).uniform(1, 3, 3, 4),
            Stream::new(Purpose::Source, 0, 0).uniform(1, 2, 4, 4),
            Stream::new(Purpose::Source, 0, 0).uniform(1, 2, 3, 5),
        ];
        assert!(
            others.iter().all(|other| other.to_bits() != base.to_bits()),
            "{base} {others:?}"
        );
    }

    // 40,000 draws: the standard error is 0.005 for a normal mean and 0.007 for its variance,
    // 0.0015 for a uniform mean; the bounds are five of them.
    #[test]
    fn moments_are_those_of_the_distributions() {
        let stream = Stream::new(Purpose::Init, 0, 0);
        let mut normals = vec![0f32; 40_000];
        stream.fill_normal(0, 0, 0, &mut normals);
        let mean = normals.iter().sum::<f32>() / 40_000.0;
        let variance = normals.iter().map(|n| n * n).sum::<f32>() / 40_000.0;
        assert!(
            mean.abs() < 0.025 && (variance - 1.0).abs() < 0.035,
            "{mean} {variance}"
        );
        stream.fill_uniform(0, 0, 1, &mut normals);
        let mean = normals.iter().sum::<f32>() / 40_000.0;
        assert!((mean - 0.5).abs() < 0.0075, "{mean}");
    }
}
