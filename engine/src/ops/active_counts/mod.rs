//! L0: how many components are active at a row, on average. `mean over rows of #{c: g_c > threshold}`; no gradient.

mod cpu;

use crate::builder::Builder;
use crate::cpu::Frame;
use crate::cpu::pool::chunks;
use crate::gradients::Gradients;
use crate::op::{NodeView, Op, Result};
use crate::ops::grain_rows;
use crate::value::{Type, Value};

/// Mean number of elements of a row that exceed a threshold.
#[derive(Debug, Clone, Copy)]
pub struct ActiveCounts {
    /// What an active component exceeds.
    pub threshold: f32,
}

impl Builder {
    /// Mean over rows of the number of importances f32 `[.., c]` above `threshold`, a scalar.
    ///
    /// # Errors
    ///
    /// Never: any f32 value will do.
    pub fn active_counts(&mut self, importance: Value, threshold: f32) -> Result<Value> {
        self.op1(ActiveCounts { threshold }, &[importance])
    }
}

impl Op for ActiveCounts {
    fn name(&self) -> &'static str {
        "active_counts"
    }

    fn outputs(&self, _inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![Type::scalar()])
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        4 * chunks(inputs[0].rows(), grain_rows(inputs[0].columns()))
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        inputs[0].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::{Builder, Executor, Pool, Store};

    // By hand: 2, 0 and 1 of the importances exceed 0.1.
    #[test]
    fn only_importances_above_the_threshold_count() {
        let mut store = Store::new();
        let g = store.add("g", &[3, 2], vec![0.2, 1.0, 0.1, 0.0, 0.0, 0.11]);
        let mut b = Builder::new();
        let g = b.persistent(&store, g);
        let l0 = b.active_counts(g, 0.1).unwrap();
        b.output("l0", l0);
        let mut executor = Executor::new(&b, Arc::new(Pool::new(1)));
        executor.run(&mut store);
        assert_eq!(
            executor.scalar_output("l0", &store).to_bits(),
            1f32.to_bits()
        );
    }
}
