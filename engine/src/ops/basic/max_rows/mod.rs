//! The largest value of each column over all rows of a batch, its blocks together.
//!
//! Blocks are all-reduced by sums. So a block puts the maxima of its rows into its own row of a
//! table of all blocks, f32 `[blocks, c]`, which is 0 elsewhere: the sum has the row of every
//! block, whatever the order in which it is added, and the largest of those is the largest of all.
//!
//! No gradient passes. A NaN is passed over: losses and gradients tell of it.

mod cpu;
mod cuda;

use crate::op::{Builder, Op, Result, op, refuse};
use crate::ops::row_chunks;
use crate::value::{DType, Type, Value};

/// The largest value of each column over the rows of all inputs, f32 `[.., c]` each, in the row of
/// this block of f32 `[blocks, c]`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MaxRows {
    blocks: usize,
}

impl Builder {
    /// For each group of values, f32 `[.., c]`, the largest value of each column over their rows in
    /// all blocks of the batch, f32 `[1, c]`, by one all-reduce.
    ///
    /// # Errors
    ///
    /// When a group is empty, or the values of one differ in their last dimension.
    pub fn max_rows(&mut self, groups: &[Vec<Value>]) -> Result<Vec<Value>> {
        let blocks = self.blocks();
        let of_block = groups
            .iter()
            .map(|group| self.op1(MaxRows { blocks }, group));
        let of_block = of_block.collect::<Result<Vec<_>>>()?;
        if blocks == 1 {
            return Ok(of_block);
        }
        let joined = self.concatenate(&of_block)?;
        let table = self.all_reduce(joined)?;
        let all = self.op1(MaxRows { blocks: 1 }, &[table])?;
        let mut end = 0;
        let slice = |&group: &Value| {
            let start = end;
            end += self.ty(group).columns();
            self.slice(all, start..end)
        };
        of_block.iter().map(slice).collect()
    }
}

impl Op for MaxRows {
    op! {
        name "max_rows"; is_constant; draws_rows(self) self.blocks > 1;
        kernels(self) cpu::run(*self), cuda::value(*self);
        flops(self, inputs) inputs.iter().map(|ty| ty.len() as u64).sum();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let columns = inputs.first().map_or(0, |ty| ty.columns());
        let fits = |ty: &&Type| ty.dtype == DType::F32 && ty.columns() == columns;
        if columns == 0 || !inputs.iter().all(fits) {
            return refuse!(self, "needs f32 of as many columns, found {inputs:?}");
        }
        Ok(vec![Type::f32(&[self.blocks, columns])])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let partials = inputs.iter().map(|ty| row_chunks(ty) * ty.columns());
        4 * partials.max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::cpu::{Alone, Pool};
    use crate::ops::oracle::{Sample, random};
    use crate::{Builder, Store, Type, Value};

    /// The largest value of each column.
    fn largest(samples: &[Sample]) -> Vec<f32> {
        let columns = samples[0].dims.last().copied().unwrap();
        let mut all = vec![f32::NEG_INFINITY; columns];
        for row in samples.iter().flat_map(|x| x.values.chunks_exact(columns)) {
            all.iter_mut()
                .zip(row)
                .for_each(|(most, x)| *most = most.max(*x));
        }
        all
    }

    // Nothing is rounded. A row longer than a chunk, and more rows than one.
    #[test]
    fn the_largest_of_several_values_are_found() {
        for dims in [
            [&[3, 2, 20_001][..], &[1, 20_001]],
            [&[7000, 5], &[11, 5]],
            [&[1, 1], &[2, 1]],
        ] {
            let samples = [random(dims[0], 1), random(dims[1], 2)];
            let (mut b, mut store) = (Builder::new(), Store::new());
            let values: Vec<Value> = (0..)
                .zip(&samples)
                .map(|(index, x): (usize, _)| {
                    let slot = store.add(index.to_string(), &x.dims, x.values.clone());
                    b.persistent(&store, slot)
                })
                .collect();
            let found = b.max_rows(&[values.clone(), vec![values[1]]]).unwrap();
            for (name, value) in ["both", "one"].into_iter().zip(found) {
                b.output(name, value);
            }
            let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
            executor.run(&mut store);
            assert_eq!(executor.output("both", &store), largest(&samples));
            assert_eq!(executor.output("one", &store), largest(&samples[1..]));
        }
    }

    #[test]
    fn values_of_other_columns_are_refused() {
        let mut b = Builder::new();
        let [x, y] =
            [("x", 2), ("y", 3)].map(|(name, c)| b.input(name, &Type::f32(&[4, c])).unwrap());
        assert_eq!(
            b.max_rows(&[vec![x, y]]).unwrap_err().to_string(),
            "max_rows: needs f32 of as many columns, found [Type { dtype: F32, dims: [4, 2] }, Type { dtype: F32, dims: [4, 3] }]"
        );
        assert!(b.max_rows(&[Vec::new()]).is_err());
    }
}
