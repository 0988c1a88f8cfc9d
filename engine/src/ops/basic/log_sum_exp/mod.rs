//! `y = ln sum_v e^(x_v)` of each row: made once for all losses that read the logits. It has no
//! gradient: a target is a constant, and the gradient of a cross-entropy includes it.

mod cpu;
mod cuda;

pub(in crate::ops) use cuda::{rows as log_sum_exp_rows, threads as log_sum_exp_threads};

use crate::alike::{Alike, Of};
use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Log-sum-exp over the last dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogSumExp;

impl Builder {
    /// Log-sum-exp over the last dimension, f32 `[.., v]` to `[..]`, without a gradient.
    ///
    /// # Errors
    ///
    /// When `logits` is a scalar.
    pub fn log_sum_exp(&mut self, logits: Value) -> Result<Value> {
        self.op1(LogSumExp, &[logits])
    }
}

impl Op for LogSumExp {
    op! {
        name "log_sum_exp"; formats [Either] => [Full];
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0)]);
        kernels(self) cpu::run(), cuda::value();
        // Some 20 flops for an exponential.
        flops(self, inputs) 20 * inputs[0].len() as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        match inputs[0].dims.split_last() {
            Some((_, rows)) => Ok(vec![Type::f32(rows)]),
            None => refuse!(self, "needs f32 [.., v], found a scalar"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn value_agrees_with_candle() {
        // On a GPU also rows that start between vectors, and several vectors for each thread.
        for dims in [
            &[1][..],
            &[7],
            &[2, 3, 65],
            &[30, 1200],
            &[9, 19],
            &[3, 20_003],
        ] {
            Oracle::new(&[random(dims, 1)])
                .constant(0)
                .ours(|b, v| b.log_sum_exp(v[0]))
                .candle(|v| v[0].exp()?.sum(v[0].rank() - 1)?.log())
                // Sums of up to 20003 powers, whose rounding cancels for the most part.
                .agree(2e-6);
        }
    }
}
