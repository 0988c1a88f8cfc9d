//! Random vectors over rows: delta masks and routes. They have no inputs, hence no gradient; a draw is a function of
//! the step and of the row's number in the whole batch.

mod cpu;

pub(crate) use cpu::row_number;

use spd_draws::Stream;

use crate::builder::Builder;
use crate::cpu::Frame;
use crate::gradients::Gradients;
use crate::op::{BuildError, NodeView, Op, Result};
use crate::value::{Type, Value};

/// One uniform draw in `[0, 1)` a row, f32 `[rows]`.
#[derive(Debug, Clone, Copy)]
pub struct UniformRows {
    /// What the draws are for.
    pub stream: Stream,
    /// Number of rows.
    pub rows: usize,
}

/// At each row a uniformly random subset, of uniformly random size 1..=sites, of the sites: for each site f32
/// `[rows]`, 1 where the site is in the subset and 0 elsewhere.
///
/// Column 0 of a row's draws gives the size; columns 1.. give one number a site, and the sites with the smallest
/// numbers are in. (Two equal 24-bit numbers at the border are both in: once in some 10^5 rows of 12 sites.)
#[derive(Debug, Clone, Copy)]
pub struct UniformSubsets {
    /// What the draws are for.
    pub stream: Stream,
    /// Number of rows.
    pub rows: usize,
    /// Number of sites.
    pub sites: usize,
}

impl Builder {
    /// One uniform draw in `[0, 1)` a row, f32 `[rows]`.
    ///
    /// # Errors
    ///
    /// Never: it has no inputs.
    pub fn uniform_rows(&mut self, stream: Stream, rows: usize) -> Result<Value> {
        self.op1(UniformRows { stream, rows }, &[])
    }

    /// For each site f32 `[rows]` of zeros and ones: see [`UniformSubsets`].
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

impl Op for UniformRows {
    fn name(&self) -> &'static str {
        "uniform_rows"
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::f32(&[self.rows])])
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::uniform_rows(self, frame);
    }
}

impl Op for UniformSubsets {
    fn name(&self) -> &'static str {
        "uniform_subsets"
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.sites == 0 {
            return Err(BuildError::new(
                self.name(),
                "there are no sites to choose from",
            ));
        }
        Ok(vec![Type::f32(&[self.rows]); self.sites])
    }

    fn scratch_bytes(&self, _inputs: &[&Type]) -> usize {
        4 * (self.rows + self.sites + 1)
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::uniform_subsets(self, frame);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spd_draws::{Purpose, Stream};

    use crate::{Builder, Executor, Pool, Store};

    fn routes(rows: usize, sites: usize, first_row: u32) -> Vec<Vec<f32>> {
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
        let mut executor = Executor::new(&b, Arc::new(Pool::new(2)));
        executor.parameters.first_row = first_row;
        let mut store = Store::new();
        executor.run(&mut store);
        (0..sites)
            .map(|site| executor.output(&site.to_string(), &store).to_vec())
            .collect()
    }

    // 6000 rows, 3 sites: each size has probability 1/3 and each site is in with probability 2/3; five
    // standard errors are 0.03.
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
    fn a_row_has_the_same_route_wherever_it_is_computed() {
        let whole = routes(10, 4, 0);
        let second_half = routes(5, 4, 5);
        for (whole, half) in whole.iter().zip(&second_half) {
            assert_eq!(whole[5..], half[..]);
        }
    }

    #[test]
    fn uniform_rows_are_the_stream_at_column_zero() {
        let stream = Stream::new(Purpose::Delta, 2, 3);
        let mut b = Builder::new();
        let delta = b.uniform_rows(stream, 9).unwrap();
        b.output("delta", delta);
        let mut executor = Executor::new(&b, Arc::new(Pool::new(1)));
        executor.parameters.seed = 5;
        executor.parameters.step = 6;
        executor.parameters.first_row = 7;
        let mut store = Store::new();
        executor.run(&mut store);
        for (row, value) in (7u32..).zip(executor.output("delta", &store)) {
            assert_eq!(value.to_bits(), stream.uniform(5, 6, row, 0).to_bits());
        }
    }
}
