//! Sums over the [`blocks`](crate::blocks) of a batch.
//!
//! A loss over a batch is `L = sum_k f_k(w, s)`, a sum over blocks `k`, with `s = sum_k s_k` the
//! sums that the blocks share. [`PerBlock`] marks a `w` that every block reads: its gradient is
//! `dL/dw = sum_k df_k/dw`, an all-reduce of each block's gradient. [`AllReduce`] computes `s` from
//! the `s_k`: as `ds/ds_k = 1`, each block's gradient is that of `s`.

use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::op::{Gradients, NodeView, Op, Result, op, refuse};
use crate::ops::Elementwise;
use crate::value::{DType, Type, Value};

/// The sum of a value over all blocks. The op copies this rank's part; the executor adds those of
/// other ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AllReduce;

/// A value shared by all blocks, as one block reads it. A tensor of the store is read in place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PerBlock;

fn check(op: &dyn Op, inputs: &[&Type]) -> Result<Vec<Type>> {
    match inputs {
        [ty] if ty.dtype == DType::F32 => Ok(vec![(*ty).clone()]),
        _ => refuse!(op, "needs f32, found {inputs:?}"),
    }
}

fn copy(frame: &mut Frame<'_>) {
    Elementwise::sum(1).run(frame);
}

fn copy_on_device(to: &mut Lowering<'_>) {
    Elementwise::sum(1).cuda(to);
}

impl Op for AllReduce {
    op! {
        name "all_reduce"; kernels(self) copy(), copy_on_device();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        check(self, inputs)
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        gradients.pass(node.inputs[0], g)
    }
}

impl Op for PerBlock {
    op! {
        name "per_block"; formats [Either] => [Either]; carries;
        kernels(self) copy(), copy_on_device();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        check(self, inputs)
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let whole = node.inputs[0];
        if !gradients.wants(whole) {
            return Ok(());
        }
        let sum = gradients.builder().all_reduce(g)?;
        gradients.pass(whole, sum)
    }
}
