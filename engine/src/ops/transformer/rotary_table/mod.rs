//! Rotary positions: columns `i` and `i + size / 2` of a head, at position `p`, are a point of a
//! plane that is rotated by the angle `p base^(-2 i / size)`.
//!
//! ```text
//! y_i = x_i cos - x_j sin        y_j = x_j cos + x_i sin        j = i + size / 2
//! ```
//!
//! Llama 3.1 and later scale the angles for longer texts ([`RotaryScaling`]): with
//! `f = base^(-2 i / size)` and its number of turns in the original context,
//! `r = context f / 2 pi`,
//!
//! ```text
//! f                                r > high
//! f / factor                       r < low
//! f (m + (1 - m) / factor)         else, with m = (r - low) / (high - low)
//! ```
//!
//! A product of two rotated vectors depends only on the difference of their positions. A rotation
//! is orthogonal: the gradient of `x` is that of `y`, rotated backwards. Su et al., "RoFormer",
//! 2021; columns are paired as in Llama.
//!
//! The table of cosines and sines is a value of the program, made once in a replay for all layers;
//! [`Attention`](super::Attention) rotates vectors as it loads them, and never stores them rotated.
//!
//! The table of a discrete Fourier transform is such a table too, with the angles
//! `2 pi p f / period` of bins `f`: a product with it is a transform of real numbers.

mod cpu;
mod cuda;

use std::f64::consts::TAU;

pub(crate) use cpu::turn;

use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Cosines and sines of all positions, f32 `[positions, size]`: a row holds first all cosines, then
/// all sines. Angles are computed in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryTable {
    /// Number of positions, from 0.
    pub positions: usize,
    /// Columns of a head, an even number.
    pub size: usize,
    /// The angles.
    pub angles: Angles,
}

/// Angles by which a position turns the pairs of columns `i`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Angles {
    /// `p base^(-2 i / size)`.
    Rotary {
        /// Ratio of the fastest angle to the slowest, nearly.
        base: f64,
        /// Slower angles for longer texts.
        scaling: Option<RotaryScaling>,
    },
    /// `2 pi p i / period`.
    Fourier {
        /// Positions of a turn of bin 1.
        period: usize,
    },
}

/// Scaling of slow angles, for longer texts than those of the first training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryScaling {
    /// Divisor of the slowest angles.
    pub factor: f64,
    /// Angles with fewer turns in `context` positions are divided by the whole factor.
    pub low: f64,
    /// Angles with more turns are unchanged.
    pub high: f64,
    /// Positions of the first training.
    pub context: f64,
}

impl RotaryTable {
    /// The angle of columns `i` and `i + size / 2` at each position.
    fn angle(&self, i: usize) -> impl Fn(usize) -> f64 {
        let (step, period) = match self.angles {
            Angles::Rotary { base, scaling } => {
                let step = base.powf(-((2 * i) as f64) / self.size as f64);
                (
                    scaling.map_or(step, |scaling| scaling.scaled(step)),
                    usize::MAX,
                )
            }
            Angles::Fourier { period } => (TAU / period as f64, period),
        };
        // Whole turns are left out before anything is rounded.
        let multiple = if period == usize::MAX { 1 } else { i };
        move |position| (position * multiple % period) as f64 * step
    }
}

impl RotaryScaling {
    fn scaled(&self, angle: f64) -> f64 {
        let turns = self.context * angle / TAU;
        // Clamped, the formula for the middle also covers the two ends.
        let kept = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        angle * (kept + (1.0 - kept) / self.factor)
    }
}

impl Builder {
    /// Cosines and sines for `size` columns of a head, f32 `[positions, size]`.
    ///
    /// # Errors
    ///
    /// When `size` is odd.
    pub fn rotary_table(
        &mut self,
        positions: usize,
        size: usize,
        base: f64,
        scaling: Option<RotaryScaling>,
    ) -> Result<Value> {
        let angles = Angles::Rotary { base, scaling };
        self.op1(
            RotaryTable {
                positions,
                size,
                angles,
            },
            &[],
        )
    }

    /// Cosines and sines of `2 pi p f / period` for bins `f` below `bins`, f32
    /// `[positions, 2 bins]`: first all cosines, then all sines.
    ///
    /// # Errors
    ///
    /// Never.
    pub fn fourier_table(&mut self, positions: usize, bins: usize, period: usize) -> Result<Value> {
        let angles = Angles::Fourier { period };
        let size = 2 * bins;
        self.op1(
            RotaryTable {
                positions,
                size,
                angles,
            },
            &[],
        )
    }
}

impl Op for RotaryTable {
    op! {
        name "rotary_table";
        kernels(self) cpu::run(self), cuda::value(self);
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.size % 2 == 1 {
            return refuse!(self, "{} columns cannot be paired", self.size);
        }
        Ok(vec![Type::f32(&[self.positions, self.size])])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Store;
    use crate::cpu::{Alone, Output, Pool};
    use crate::ops::oracle::{close, random};

    fn table(positions: usize, size: usize, base: f64) -> Vec<f32> {
        scaled_table((positions, size), base, None)
    }

    fn scaled_table(
        (positions, size): (usize, usize),
        base: f64,
        scaling: Option<RotaryScaling>,
    ) -> Vec<f32> {
        let mut b = Builder::new();
        let table = b.rotary_table(positions, size, base, scaling).unwrap();
        b.output("table", table);
        let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
        let mut store = Store::new();
        executor.run(&mut store);
        executor.output("table", &store).to_vec()
    }

    // By hand: angles p and p / 10 for four columns and base 100.
    #[test]
    fn angles_fall_from_column_to_column() {
        let expected: Vec<f32> = [0f32, 1.0, 2.0]
            .into_iter()
            .flat_map(|p| [p.cos(), (0.1 * p).cos(), p.sin(), (0.1 * p).sin()])
            .collect();
        close("table", &table(3, 4, 100.0), &expected, 1e-7);
    }

    // By hand: angles 1, 1 / 10, 1 / 100 and 1 / 1000 make 15.9, 1.59, 0.159 and 0.0159 turns in
    // 100 positions: the first is unchanged, of the second the share 0.0915 / 0.5 is unchanged, and
    // the others are divided by 4.
    #[test]
    fn angles_of_few_turns_are_scaled() {
        let scaling = RotaryScaling {
            factor: 4.0,
            low: 1.5,
            high: 2.0,
            context: 100.0,
        };
        let found = scaled_table((2, 8), 1e4, Some(scaling));
        let kept = (100.0 * 0.1 / std::f64::consts::TAU - 1.5) / 0.5;
        let angles = [1.0, 0.1 * (kept + (1.0 - kept) / 4.0), 0.0025, 0.000_25];
        #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
        let expected = [angles.map(f64::cos), angles.map(f64::sin)]
            .concat()
            .into_iter()
            .map(|x| x as f32)
            .collect::<Vec<f32>>();
        assert!((0.1..0.3).contains(&kept), "{kept}");
        close("angles", &found[8..], &expected, 1e-7);
    }

    // By hand: a quarter of a turn for each position of bin 1, half of one for bin 2.
    #[test]
    fn bins_turn_by_multiples() {
        let mut b = Builder::new();
        let table = b.fourier_table(5, 3, 4).unwrap();
        b.output("table", table);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        let mut store = Store::new();
        executor.run(&mut store);
        let expected = [
            [1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
            [1.0, 0.0, -1.0, 0.0, 1.0, 0.0],
            [1.0, -1.0, 1.0, 0.0, 0.0, 0.0],
            [1.0, 0.0, -1.0, 0.0, -1.0, 0.0],
            [1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
        ];
        close(
            "table",
            executor.output("table", &store),
            expected.as_flattened(),
            1e-15,
        );
    }

    // B17. Sums over a whole period: T on the diagonal, 0 elsewhere (Parseval).
    #[test]
    fn bins_are_orthogonal() {
        let (mut b, period) = (Builder::new(), 12);
        let table = b.fourier_table(period, period, period).unwrap();
        let transposed = b.transpose(table).unwrap();
        let gram = b.matmul(table, transposed).unwrap();
        b.output("gram", gram);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        let mut store = Store::new();
        executor.run(&mut store);
        let mut expected = vec![0.0; period * period];
        expected
            .iter_mut()
            .step_by(period + 1)
            .for_each(|one| *one = 12.0);
        // Sums of 24 products below 1.
        close("gram", executor.output("gram", &store), &expected, 2e-6);
    }

    #[test]
    fn backward_rotation_inverts_rotation() {
        let (x, table) = (random(&[8], 1).values, table(40, 8, 1e4));
        let (mut turned, mut back) = (vec![0.0; 8], vec![f32::NAN; 8]);
        turn(&table[39 * 8..], &x, Output::overwrite(&mut turned), false);
        assert!(
            turned
                .iter()
                .zip(&x)
                .any(|(turned, x)| (turned - x).abs() > 0.5)
        );
        turn(
            &table[39 * 8..],
            &turned,
            Output::overwrite(&mut back),
            true,
        );
        // Two products and a sum, twice.
        close("x", &back, &x, 5e-7);
        turn(
            &table[39 * 8..],
            &turned,
            Output::new(&mut back, true),
            true,
        );
        let twice: Vec<f32> = x.iter().map(|x| 2.0 * x).collect();
        close("2 x", &back, &twice, 5e-7);
    }

    #[test]
    fn products_depend_only_on_the_difference_of_positions() {
        let (q, k) = (random(&[6], 1).values, random(&[6], 2).values);
        let table = table(50, 6, 1e4);
        let score = |p: usize, s: usize| {
            let [mut turned_q, mut turned_k] = [[0.0; 6]; 2];
            turn(
                &table[p * 6..][..6],
                &q,
                Output::overwrite(&mut turned_q),
                false,
            );
            turn(
                &table[s * 6..][..6],
                &k,
                Output::overwrite(&mut turned_k),
                false,
            );
            turned_q
                .iter()
                .zip(turned_k)
                .map(|(q, k)| q * k)
                .sum::<f32>()
        };
        // Six products of numbers below 3.
        assert!((score(7, 2) - score(45, 40)).abs() < 5e-6);
        assert!((score(7, 2) - score(7, 3)).abs() > 1e-2);
    }

    #[test]
    fn an_odd_number_of_columns_is_refused() {
        assert_eq!(
            Builder::new()
                .rotary_table(2, 3, 1e4, None)
                .unwrap_err()
                .to_string(),
            "rotary_table: 3 columns cannot be paired"
        );
    }
}
