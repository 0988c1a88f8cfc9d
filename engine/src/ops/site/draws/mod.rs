//! Random numbers over rows: delta masks, routes, initial sources of an adversary. They have no
//! inputs and so no gradient; a draw is a function of the step and of the row's number in the whole
//! batch.

mod cpu;
mod cuda;

use spd_draws::Stream;

use crate::op::{Builder, ExpensiveOps, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Uniform draws in `[0, 1)`, row by row, or which of them are below a number.
#[derive(Debug, Clone, PartialEq)]
pub struct Uniform {
    /// The use of the draws.
    pub stream: Stream,
    /// Shape of the result.
    pub dims: Vec<usize>,
    /// Number of draws in a row.
    pub columns: usize,
    /// Whether there is a single row, row 0 of the whole batch, for all parts of the batch.
    pub shared: bool,
    /// If a number is given, results are 1 for draws below it, else 0. It is then the probability
    /// of a 1, in effect rounded up to a multiple of 2^-24, as draws are multiples of that.
    pub below: Option<f32>,
}

impl Uniform {
    fn of(stream: Stream, dims: &[usize], columns: usize) -> Self {
        Self {
            stream,
            dims: dims.to_vec(),
            columns,
            shared: false,
            below: None,
        }
    }
}

/// For each row a uniformly random subset, of uniformly random size 1..=sites, of the sites: for
/// each site f32 `[rows]`, 1 if the site is in the subset and 0 otherwise.
///
/// Column 0 of a row's draws gives the size; columns 1.. give one number for each site, and the
/// sites with the smallest numbers are in the subset. (Two equal 24-bit numbers at the border are
/// both in: once in some 10^5 rows of 12 sites.)
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UniformSubsets {
    /// The use of the draws.
    pub stream: Stream,
    /// Number of rows.
    pub rows: usize,
    /// Number of sites.
    pub sites: usize,
}

impl Builder {
    /// One uniform draw in `[0, 1)` for each row, f32 `[rows]`.
    ///
    /// # Errors
    ///
    /// Never: it has no inputs.
    pub fn uniform_rows(&mut self, stream: Stream, rows: usize) -> Result<Value> {
        self.op1(Uniform::of(stream, &[rows], 1), &[])
    }

    /// Uniform draws in `[0, 1)`, f32 `dims`: one for each column; all dimensions but the last are
    /// rows.
    ///
    /// # Errors
    ///
    /// When there are no columns.
    pub fn uniform(&mut self, stream: Stream, dims: &[usize]) -> Result<Value> {
        let columns = dims.last().copied().unwrap_or(1);
        self.op1(Uniform::of(stream, dims, columns), &[])
    }

    /// One row of uniform draws in `[0, 1)`, f32 `[columns]`, the same for every part of a batch.
    ///
    /// # Errors
    ///
    /// When there are no columns.
    pub fn uniform_row(&mut self, stream: Stream, columns: usize) -> Result<Value> {
        let op = Uniform {
            shared: true,
            ..Uniform::of(stream, &[columns], columns)
        };
        self.op1(op, &[])
    }

    /// 1 with `probability` and else 0 for each row, f32 `[rows]`, by the draws of
    /// [`uniform_rows`](Self::uniform_rows).
    ///
    /// # Errors
    ///
    /// Never: it has no inputs.
    pub fn bernoulli(&mut self, stream: Stream, rows: usize, probability: f32) -> Result<Value> {
        let op = Uniform {
            below: Some(probability),
            ..Uniform::of(stream, &[rows], 1)
        };
        self.op1(op, &[])
    }

    /// For each site f32 `[rows]` of zeros and ones, as [`UniformSubsets`] draws them.
    ///
    /// # Errors
    ///
    /// When there are no sites.
    pub fn uniform_subsets(
        &mut self,
        stream: Stream,
        rows: usize,
        sites: usize,
    ) -> Result<Vec<Value>> {
        self.op(
            UniformSubsets {
                stream,
                rows,
                sites,
            },
            &[],
        )
    }
}

impl Op for Uniform {
    op! {
        name(self) if self.below.is_some() { "bernoulli" } else { "uniform" };
        draws_rows(self) !self.shared;
        kernels(self) cpu::uniform(self), cuda::uniform(self);
        expensive_ops(self, _inputs) drawn(self.dims.iter().product());
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.columns == 0 {
            return refuse!(self, "there are no columns to draw");
        }
        Ok(vec![Type::f32(&self.dims)])
    }
}

impl Op for UniformSubsets {
    op! {
        name "uniform_subsets"; draws_rows;
        kernels(self) cpu::uniform_subsets(self), cuda::uniform_subsets(self);
        scratch_bytes(self, _inputs) 4 * self.rows * (1 + 2 * self.sites);
        expensive_ops(self, _inputs) drawn(self.rows * (1 + self.sites));
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.sites == 0 {
            return refuse!(self, "there are no sites to choose from");
        }
        Ok(vec![Type::f32(&[self.rows]); self.sites])
    }
}

/// The cost of so many draws.
pub(crate) fn drawn(count: usize) -> ExpensiveOps {
    ExpensiveOps {
        draws: count as u64,
        ..ExpensiveOps::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_draws::{Purpose, Stream};

    use crate::cpu::{Alone, Pool};
    use crate::{Builder, Store, Value};

    fn routes(rows: usize, sites: usize, block: u32) -> Vec<Vec<f32>> {
        let mut b = Builder::new();
        let stream = Stream::new(Purpose::Routing, 0, 0);
        for (site, route) in b
            .uniform_subsets(stream, rows, sites)
            .unwrap()
            .into_iter()
            .enumerate()
        {
            b.output(site.to_string(), route);
        }
        let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
        executor.parameters.block = block;
        let mut store = Store::new();
        executor.run(&mut store);
        (0..sites)
            .map(|site| executor.output(&site.to_string(), &store).to_vec())
            .collect()
    }

    // 6000 rows, 3 sites: each size has probability 1/3, and each site is in the subset with
    // probability 2/3; five standard errors are 0.03.
    #[test]
    fn subsets_have_uniform_size_and_members() {
        let routes = routes(6000, 3, 0);
        let mut sizes = [0; 4];
        for row in 0..6000 {
            sizes[routes.iter().filter(|route| route[row] > 0.0).count()] += 1;
        }
        assert_eq!(sizes[0], 0);
        for size in &sizes[1..] {
            assert!(
                (f64::from(*size) / 6000.0 - 1.0 / 3.0).abs() < 0.03,
                "{sizes:?}"
            );
        }
        for route in &routes {
            let share = route.iter().sum::<f32>() / 6000.0;
            assert!((share - 2.0 / 3.0).abs() < 0.03, "{share}");
        }
    }

    #[test]
    fn a_row_has_the_same_route_in_any_part_of_a_batch() {
        let whole = routes(10, 4, 0);
        let second_half = routes(5, 4, 1);
        for (whole, half) in whole.iter().zip(&second_half) {
            assert_eq!(whole[5..], half[..]);
        }
    }

    const STREAM: Stream = Stream::new(Purpose::Delta, 2, 3);

    /// A draw for block 7 of a batch, at step 6 of seed 5.
    fn drawn(draw: impl Fn(&mut Builder) -> Value) -> Vec<f32> {
        let mut b = Builder::new();
        let value = draw(&mut b);
        b.output("drawn", value);
        let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
        executor.parameters.seed = 5;
        executor.parameters.step = 6;
        executor.parameters.block = 7;
        let mut store = Store::new();
        executor.run(&mut store);
        executor.output("drawn", &store).to_vec()
    }

    fn assert_same(ours: &[f32], expected: impl Iterator<Item = f32>) {
        let expected: Vec<u32> = expected.map(f32::to_bits).collect();
        let ours: Vec<u32> = ours.iter().map(|value| value.to_bits()).collect();
        assert_eq!(ours, expected);
    }

    #[test]
    fn uniform_rows_are_draws_of_column_zero() {
        let rows = drawn(|b| b.uniform_rows(STREAM, 9).unwrap());
        assert_same(&rows, (63..72).map(|row| STREAM.uniform(5, 6, row, 0)));
    }

    // 33 columns: whole counters of the generator and a partial one. 2 * 3 rows.
    #[test]
    fn uniform_draws_are_those_of_their_row_and_column() {
        let draws = drawn(|b| b.uniform(STREAM, &[2, 3, 33]).unwrap());
        let places = (42..48).flat_map(|row| (0..33).map(move |column| (row, column)));
        assert_same(
            &draws,
            places.map(|(row, column)| STREAM.uniform(5, 6, row, column)),
        );
    }

    #[test]
    fn a_shared_row_is_row_zero_in_any_part_of_a_batch() {
        let row = drawn(|b| b.uniform_row(STREAM, 40).unwrap());
        assert_same(&row, (0..40).map(|column| STREAM.uniform(5, 6, 0, column)));
    }

    #[test]
    fn bernoulli_is_one_for_draws_below_the_probability() {
        for probability in [0.0, 0.3, 1.0] {
            let ones = drawn(|b| b.bernoulli(STREAM, 9, probability).unwrap());
            let draws = (63..72).map(|row| STREAM.uniform(5, 6, row, 0));
            assert_same(
                &ones,
                draws.map(|draw| f32::from(u8::from(draw < probability))),
            );
        }
        // 20,000 rows: five standard errors are 0.016.
        let ones = drawn(|b| b.bernoulli(STREAM, 20_000, 0.3).unwrap());
        let share = ones.iter().sum::<f32>() / 20_000.0;
        assert!((share - 0.3).abs() < 0.016, "{share}");
    }
}
