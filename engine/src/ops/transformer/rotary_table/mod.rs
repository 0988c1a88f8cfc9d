//! Rotary positions: columns `i` and `i + size / 2` of a head, at position `p`, are a point of a plane that is turned by
//! the angle `p base^(-2 i / size)`.
//!
//! ```text
//! y_i = x_i cos - x_j sin        y_j = x_j cos + x_i sin        j = i + size / 2
//! ```
//!
//! A product of two such vectors depends on the difference of their positions alone. A rotation is orthogonal: the
//! gradient of `x` is that of `y`, turned back. Su et al., "RoFormer", 2021; columns are paired as in Llama.
//!
//! The table of cosines and sines is a value of the program, made once in a replay for all layers; whoever uses it
//! ([`Attention`](super::Attention)) turns vectors as it loads them, and they are never written turned.

mod cpu;
mod cuda;

pub(crate) use cpu::{turn, turn_back};

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::op::{BuildError, Builder, Op, Result};
use crate::value::{Type, Value};

/// Cosines and sines of all positions, f32 `[positions, size]`: a row holds first all cosines, then all sines. Angles are
/// computed in f64.
#[derive(Debug, Clone, Copy)]
pub struct RotaryTable {
    /// Number of positions, from 0.
    pub positions: usize,
    /// Columns of a head, an even number.
    pub size: usize,
    /// Ratio of the fastest angle to the slowest, nearly.
    pub base: f32,
}

impl Builder {
    /// Cosines and sines for heads of `size` columns, f32 `[positions, size]`.
    ///
    /// # Errors
    ///
    /// When `size` is odd.
    pub fn rotary_table(&mut self, positions: usize, size: usize, base: f32) -> Result<Value> {
        let op = RotaryTable {
            positions,
            size,
            base,
        };
        self.op1(op, &[])
    }
}

impl Op for RotaryTable {
    fn name(&self) -> &'static str {
        "rotary_table"
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.size % 2 == 1 {
            let reason = format!("{} columns cannot be paired", self.size);
            return Err(BuildError::new(self.name(), reason));
        }
        Ok(vec![Type::f32(&[self.positions, self.size])])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self, to);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Store;
    use crate::cpu::{Executor, Pool};
    use crate::ops::oracle::{close, random};

    fn table(positions: usize, size: usize, base: f32) -> Vec<f32> {
        let mut b = Builder::new();
        let table = b.rotary_table(positions, size, base).unwrap();
        b.output("table", table);
        let mut executor = Executor::new(&b, Arc::new(Pool::new(2).unwrap()));
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

    #[test]
    fn turning_back_undoes_a_turn() {
        let (x, table) = (random(&[8], 1).values, table(40, 8, 1e4));
        let (mut turned, mut back) = (vec![0.0; 8], vec![f32::NAN; 8]);
        turn(&table[39 * 8..], &x, &mut turned);
        assert!(
            turned
                .iter()
                .zip(&x)
                .any(|(turned, x)| (turned - x).abs() > 0.5)
        );
        turn_back(&table[39 * 8..], &turned, &mut back, false);
        // Two products and a sum, twice.
        close("x", &back, &x, 5e-7);
        turn_back(&table[39 * 8..], &turned, &mut back, true);
        let twice: Vec<f32> = x.iter().map(|x| 2.0 * x).collect();
        close("2 x", &back, &twice, 5e-7);
    }

    #[test]
    fn products_depend_on_the_difference_of_positions() {
        let (q, k) = (random(&[6], 1).values, random(&[6], 2).values);
        let table = table(50, 6, 1e4);
        let score = |p: usize, s: usize| {
            let [mut turned_q, mut turned_k] = [[0.0; 6]; 2];
            turn(&table[p * 6..][..6], &q, &mut turned_q);
            turn(&table[s * 6..][..6], &k, &mut turned_k);
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
                .rotary_table(2, 3, 1e4)
                .unwrap_err()
                .to_string(),
            "rotary_table: 3 columns cannot be paired"
        );
    }
}
