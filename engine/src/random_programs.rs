//! Random programs for tests of properties of every program: shared subexpressions, values read
//! near and far, gradients that are added to in place.

use candle_core::Tensor;

use crate::op::{Builder, Result};
use crate::ops::oracle::{Sample, random};
use crate::ops::{GeluKind, MatMul};
use crate::value::Value;

/// Sizes of dimensions: few, so that values fit together; uneven, so that tiles do not divide them.
const SIZES: [usize; 3] = [3, 17, 40];

/// A value computed from earlier ones.
#[derive(Debug, Clone, Copy)]
enum Step {
    Add(usize, usize),
    MatMul(usize, usize),
    Gelu(usize),
    Transpose(usize),
}

/// A loss that depends on all of its leaves, to be built as a program or with candle.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub(crate) leaves: Vec<Sample>,
    steps: Vec<Step>,
}

impl Recipe {
    pub(crate) fn new(seed: u64) -> Self {
        let mut column = 0;
        let mut below = |count: usize| {
            column += 1;
            spd_draws::block(seed, [column, 0, 0, 0])[0] as usize % count
        };
        let mut dims: Vec<[usize; 2]> = (0..3 + below(3))
            .map(|_| [SIZES[below(3)], SIZES[below(3)]])
            .collect();
        let leaves: Vec<Sample> = (10 * seed..)
            .zip(&dims)
            .map(|(seed, dims)| random(dims, seed))
            .collect();
        let mut steps = Vec::new();
        for _ in 0..6 + below(20) {
            let a = below(dims.len());
            let [rows, columns] = dims[a];
            let fitting = |fits: &dyn Fn(&[usize; 2]) -> bool| -> Vec<usize> {
                (0..dims.len()).filter(|&v| fits(&dims[v])).collect()
            };
            let same = fitting(&|other| *other == dims[a]);
            let right = fitting(&|other| other[0] == columns);
            let (step, made) = match below(4) {
                0 => (Step::Add(a, same[below(same.len())]), dims[a]),
                1 if !right.is_empty() => {
                    let b = right[below(right.len())];
                    (Step::MatMul(a, b), [rows, dims[b][1]])
                }
                2 => (Step::Transpose(a), [columns, rows]),
                _ => (Step::Gelu(a), dims[a]),
            };
            steps.push(step);
            dims.push(made);
        }
        Self { leaves, steps }
    }

    /// Values that are summed up in the loss, beside the leaves.
    fn summed(&self) -> impl Iterator<Item = usize> {
        let end = self.leaves.len() + self.steps.len();
        [end - 1, end - 4].into_iter()
    }

    /// A product that keeps the magnitude of its factors.
    fn product() -> MatMul {
        MatMul {
            a_transposed: false,
            b_transposed: false,
            alpha: 0.2,
        }
    }

    pub(crate) fn ours(&self, b: &mut Builder, leaves: &[Value]) -> Result<Value> {
        let mut values = leaves.to_vec();
        for &step in &self.steps {
            values.push(match step {
                Step::Add(x, y) => b.add(values[x], values[y])?,
                Step::MatMul(x, y) => b.op1(Self::product(), &[values[x], values[y]])?,
                Step::Gelu(x) => b.gelu(values[x], GeluKind::Exact)?,
                Step::Transpose(x) => b.transpose(values[x])?,
            });
        }
        let terms: Vec<(f64, Value)> = (0..leaves.len())
            .chain(self.summed())
            .map(|value| Ok((0.1, b.sum_squares(values[value])?)))
            .collect::<Result<_>>()?;
        b.weighted_sum(&terms)
    }

    pub(crate) fn candle(&self, leaves: &[Tensor]) -> candle_core::Result<Tensor> {
        let mut values = leaves.to_vec();
        for &step in &self.steps {
            values.push(match step {
                Step::Add(x, y) => (&values[x] + &values[y])?,
                Step::MatMul(x, y) => (values[x].matmul(&values[y])? * 0.2)?,
                Step::Gelu(x) => values[x].gelu_erf()?,
                Step::Transpose(x) => values[x].t()?.contiguous()?,
            });
        }
        let mut total = Tensor::new(0f32, &candle_core::Device::Cpu)?;
        for value in (0..leaves.len()).chain(self.summed()) {
            total = (total + (values[value].sqr()?.sum_all()? * 0.1)?)?;
        }
        Ok(total)
    }
}
