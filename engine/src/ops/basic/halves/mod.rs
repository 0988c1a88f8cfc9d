//! Numbers of 16 bits, two in each word: what a store keeps in half the memory.
//!
//! A word is the 32 bits of a stored f32, which is read as a number nowhere else: column `2 i` is
//! its lower half, column `2 i + 1` its upper one, and the upper half behind an odd last column is
//! 0.
//!
//! ```text
//! bf16    the upper half of an f32, rounded to nearest, ties to even
//! unit    u / 65535 of a whole u, for numbers in [0, 1]; others are clamped
//!         u = floor(s + 1/2), or floor(s) + [draw < s - floor(s)], with s = 65535 x
//! ```
//!
//! With draws, uniform in `[0, 1)`, the mean of `u` is `s`: steps shorter than half a unit are not
//! lost.

mod cpu;
mod cuda;

use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// A number of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// bf16.
    Bf16,
    /// A whole number of 65535ths, in `[0, 1]`.
    Unit,
}

/// Words f32 `[.., ceil(c / 2)]` to their numbers f32 `[.., c]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unpack {
    /// The numbers.
    pub half: Half,
    /// Columns, `c`.
    pub columns: usize,
}

/// Numbers f32 `[.., c]`, and draws f32 `[.., c]` if there are any, to words f32
/// `[.., ceil(c / 2)]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pack {
    /// The numbers.
    pub half: Half,
    /// Whether draws decide how they are rounded.
    pub drawn: bool,
}

impl Half {
    /// Words of a row of so many columns.
    pub const fn words(columns: usize) -> usize {
        columns.div_ceil(2)
    }
}

impl Builder {
    /// The numbers in words: f32 `[.., ceil(columns / 2)]` to `[.., columns]`. They have no
    /// gradient.
    ///
    /// # Errors
    ///
    /// When there are more or fewer words.
    pub fn unpack(&mut self, words: Value, half: Half, columns: usize) -> Result<Value> {
        self.op1(Unpack { half, columns }, &[words])
    }

    /// Numbers in words: f32 `[.., c]`, and uniform draws in `[0, 1)` of that shape for numbers
    /// rounded at random, to f32 `[.., ceil(c / 2)]`. They have no gradient.
    ///
    /// # Errors
    ///
    /// When the shapes differ, or there are draws for bf16.
    pub fn pack(&mut self, x: Value, half: Half, draws: Option<Value>) -> Result<Value> {
        let drawn = draws.is_some();
        let operands: Vec<Value> = [x].into_iter().chain(draws).collect();
        self.op1(Pack { half, drawn }, &operands)
    }
}

impl Op for Unpack {
    op! {
        name "unpack"; is_constant;
        kernels(self) cpu::unpack(*self), cuda::unpack(*self);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[0].columns() != Half::words(self.columns) {
            return refuse!(
                self,
                "needs {} words a row for {} columns, found {}",
                Half::words(self.columns),
                self.columns,
                inputs[0]
            );
        }
        Ok(vec![inputs[0].with_columns(self.columns)])
    }
}

impl Op for Pack {
    op! {
        name "pack"; is_constant;
        kernels(self) cpu::pack(*self), cuda::pack(*self);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let x = inputs[0];
        if self.drawn && (inputs[1] != x || self.half == Half::Bf16) {
            return refuse!(
                self,
                "needs draws of the shape of its numbers, for units, found {x} and {} for {:?}",
                inputs[1],
                self.half
            );
        }
        Ok(vec![x.with_columns(Half::words(x.columns()))])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cpu::{Alone, Pool};
    use crate::cuda::tests::agree;
    use crate::ops::oracle::random;
    use crate::{StepParameters, Store};

    /// Words of some numbers of rows of three, and what is read of them.
    fn through(half: Half, x: &[f32], draws: Option<&[f32]>) -> (Vec<u32>, Vec<f32>) {
        let (mut b, mut store) = (Builder::new(), Store::new());
        let dims = [x.len() / 3, 3];
        let given = store.add("x", &dims, x.to_vec());
        let given = b.persistent(&store, given);
        let draws = draws.map(|draws| {
            let slot = store.add("draws", &dims, draws.to_vec());
            b.persistent(&store, slot)
        });
        let words = b.pack(given, half, draws).unwrap();
        let numbers = b.unpack(words, half, 3).unwrap();
        b.output("words", words);
        b.output("numbers", numbers);
        let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
        executor.run(&mut store);
        let words = executor.output("words", &store).iter();
        let words = words.map(|word| word.to_bits()).collect();
        let numbers = executor.output("numbers", &store).to_vec();
        // Words may be NaN.
        b.outputs.retain(|(name, _)| name == "numbers");
        if x.iter().all(|x| x.is_finite()) {
            agree(&b, &store, &[], &StepParameters::default(), 0.0);
        }
        (words, numbers)
    }

    // By hand: 2/3 of 65535 is 43690; a half is between 32767 and 32768; 2 and -1 are clamped.
    #[test]
    fn units_are_whole_numbers_of_65535ths() {
        let (words, numbers) = through(Half::Unit, &[0.0, 1.0, 2.0 / 3.0, 0.5, 2.0, -1.0], None);
        assert_eq!(words, [0xffff_0000, 43690, 0xffff_8000, 0]);
        let unit = |u: f32| u / 65535.0;
        let expected = [0.0, 1.0, unit(43690.0), unit(32768.0), 1.0, 0.0];
        assert_eq!(numbers, expected);
        // Numbers that were read are written as the same words.
        assert_eq!(through(Half::Unit, &numbers, None).0, words);
    }

    // A quarter of a unit above 100: a quarter of all draws raise it.
    #[test]
    fn draws_decide_between_neighbours() {
        let x = [100.25 / 65535.0; 6];
        let draws = [0.0, 0.2, 0.26, 0.5, 0.9, 0.2];
        let (_, numbers) = through(Half::Unit, &x, Some(&draws));
        let found: Vec<f32> = numbers.iter().map(|x| (x * 65535.0).round()).collect();
        assert_eq!(found, [101.0, 101.0, 100.0, 100.0, 100.0, 101.0]);
    }

    #[test]
    fn the_mean_of_rounded_units_is_the_number() {
        let rows = 20_000;
        let x = vec![7.3 / 65535.0; 3 * rows];
        let draws: Vec<f32> = random(&[3 * rows], 1).values;
        // To [0, 1): `random` is normal, so its fractions are uniform but for a few thousandths.
        let draws: Vec<f32> = draws.iter().map(|x| (8.0 * x).rem_euclid(1.0)).collect();
        let (_, numbers) = through(Half::Unit, &x, Some(&draws));
        let sum: f64 = numbers.iter().map(|&x| f64::from(x) * 65535.0).sum();
        // Five standard errors of 60,000 draws.
        assert!((sum / (3 * rows) as f64 - 7.3).abs() < 5.0 * 0.46 / 60_000f64.sqrt() + 4e-3);
    }

    #[test]
    fn bf16_is_rounded_to_nearest_and_ties_to_even() {
        let bits = |bits: u32| f32::from_bits(bits);
        let x = [
            -1.5,
            bits(0x3f80_8000),
            bits(0x3f81_8000),
            bits(0x3f80_8001),
            f32::INFINITY,
            0.0,
        ];
        let (_, numbers) = through(Half::Bf16, &x, None);
        let found: Vec<u32> = numbers.iter().map(|x| x.to_bits() >> 16).collect();
        assert_eq!(found, [0xbfc0, 0x3f80, 0x3f82, 0x3f81, 0x7f80, 0]);
        let nan = through(Half::Bf16, &[f32::NAN, 1.0, 2.0], None).1;
        assert!(nan[0].is_nan() && nan[1..] == [1.0, 2.0], "{nan:?}");
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let mut b = Builder::new();
        let x = b.input("x", &Type::f32(&[2, 3])).unwrap();
        assert_eq!(
            b.unpack(x, Half::Unit, 8).unwrap_err().to_string(),
            "unpack: needs 4 words a row for 8 columns, found f32 [2, 3]"
        );
        assert_eq!(
            b.pack(x, Half::Bf16, Some(x)).unwrap_err().to_string(),
            "pack: needs draws of the shape of its numbers, for units, found f32 [2, 3] and f32 [2, 3] for Bf16"
        );
    }
}
