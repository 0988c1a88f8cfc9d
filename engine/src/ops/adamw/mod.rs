//! AdamW on one tensor, with the clipping of its group and the guard against bad gradients built in.
//!
//! ```text
//! f = min(1, clip / (|G| + 1e-6))          |G|: norm over the group; 1 without clipping
//! w <- w (1 - lr decay)
//! m <- b1 m + (1 - b1) f G                 v <- b2 v + (1 - b2) (f G)^2
//! w <- w - lr m' / (sqrt(v') + eps)        m' = m / (1 - b1^t)   v' = v / (1 - b2^t)
//! ```
//!
//! Loshchilov and Hutter, "Decoupled weight decay regularization"; operation order and `eps` outside of the root are
//! PyTorch's, `1e-6` is that of its `clip_grad_norm_`. Step scalars: `lr` and the two corrections `1 - b^t`, because a
//! captured program cannot know `t`.
//!
//! **The guard.** When any guard (the totals of all groups' [`GradientNorm`](super::GradientNorm)) is not finite, nothing
//! is written: a bad step leaves parameters and moments as they were, whoever notices it, and whenever.

mod cpu;
mod cuda;

use std::ops::Range;

use crate::builder::{Builder, StepScalar};
use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::gradients::Gradients;
use crate::op::{BuildError, NodeView, Op, Result};
use crate::value::{Type, Value};

/// Settings of an update.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// Learning rate.
    pub lr: StepScalar,
    /// `1 - beta1^t`.
    pub correction1: StepScalar,
    /// `1 - beta2^t`.
    pub correction2: StepScalar,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub decay: f32,
    /// Largest norm of the group's gradient.
    pub clip: Option<f32>,
}

/// What an update works on. `parameter`, `first`, `second` are persistent and of one type with `gradient`.
#[derive(Debug, Clone, Copy)]
pub struct AdamWOperands {
    /// The parameter.
    pub parameter: Value,
    /// Its first moment.
    pub first: Value,
    /// Its second moment.
    pub second: Value,
    /// Its gradient.
    pub gradient: Value,
    /// Norms of the group that is clipped together.
    pub group: Value,
}

impl Builder {
    /// Updates a parameter at the end of a replay, unless one of `guards` ends in a number that is not finite.
    ///
    /// # Errors
    ///
    /// When the types differ.
    pub fn adamw(&mut self, op: AdamW, on: &AdamWOperands, guards: &[Value]) -> Result<()> {
        let mut inputs = vec![on.parameter, on.first, on.second, on.gradient, on.group];
        inputs.extend_from_slice(guards);
        self.op(op, &inputs).map(|_| ())
    }
}

impl Op for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs[1..4].iter().any(|ty| *ty != inputs[0]) {
            let found: Vec<String> = inputs[..4].iter().map(ToString::to_string).collect();
            return Err(BuildError::new(
                self.name(),
                format!("{} differ", found.join(", ")),
            ));
        }
        Ok(Vec::new())
    }

    fn writes(&self, _inputs: usize) -> Range<usize> {
        0..3
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Err(BuildError::new(self.name(), "has no gradient"))
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        12 * inputs[0].len() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cpu::{Executor, Pool};
    use crate::ops::oracle::{close, random};
    use crate::{Store, Type};

    struct Bench {
        store: Store,
        executor: Executor,
    }

    fn bench(clip: Option<f32>, decay: f32) -> Bench {
        let mut store = Store::new();
        let start = random(&[5, 7], 1);
        let w = store.add("w", &start.dims, start.values);
        let m = store.zeros("m", &[5, 7]);
        let v = store.zeros("v", &[5, 7]);
        let mut b = Builder::new();
        let gradient = b.input("gradient", &Type::f32(&[5, 7])).unwrap();
        let group = b.gradient_norm(&[gradient]).unwrap();
        let op = AdamW {
            lr: b.step_scalar("lr"),
            correction1: b.step_scalar("correction1"),
            correction2: b.step_scalar("correction2"),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            decay,
            clip,
        };
        let [parameter, first, second] = [w, m, v].map(|slot| b.persistent(&store, slot));
        b.adamw(
            op,
            &AdamWOperands {
                parameter,
                first,
                second,
                gradient,
                group,
            },
            &[group],
        )
        .unwrap();
        let executor = Executor::new(&b, Arc::new(Pool::new(2)));
        Bench { store, executor }
    }

    fn step(bench: &mut Bench, t: i32, gradient: &[f32]) {
        bench.executor.set_scalar("lr", 0.1);
        bench
            .executor
            .set_scalar("correction1", 1.0 - 0.9f32.powi(t));
        bench
            .executor
            .set_scalar("correction2", 1.0 - 0.999f32.powi(t));
        bench.executor.input("gradient").copy_from_slice(gradient);
        bench.executor.run(&mut bench.store);
    }

    // The formula above, in f64.
    #[test]
    #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
    fn three_updates_follow_the_formula() {
        for (clip, decay) in [(None, 0.0), (Some(0.5), 0.1), (Some(100.0), 0.0)] {
            let mut bench = bench(clip, decay);
            let mut w: Vec<f64> = random(&[5, 7], 1)
                .values
                .iter()
                .map(|&w| f64::from(w))
                .collect();
            let (mut m, mut v) = (vec![0.0; 35], vec![0.0; 35]);
            for t in 1..=3i32 {
                let gradient = random(&[5, 7], 10 + u64::from(t.unsigned_abs())).values;
                step(&mut bench, t, &gradient);
                let norm = gradient
                    .iter()
                    .map(|&g| f64::from(g).powi(2))
                    .sum::<f64>()
                    .sqrt();
                let factor = clip.map_or(1.0, |clip| (f64::from(clip) / (norm + 1e-6)).min(1.0));
                for i in 0..35 {
                    let g = factor * f64::from(gradient[i]);
                    w[i] *= 1.0 - 0.1 * f64::from(decay);
                    m[i] = 0.9 * m[i] + 0.1 * g;
                    v[i] = 0.999 * v[i] + 0.001 * g * g;
                    let (m, v) = (
                        m[i] / (1.0 - 0.9f64.powi(t)),
                        v[i] / (1.0 - 0.999f64.powi(t)),
                    );
                    w[i] -= 0.1 * m / (v.sqrt() + 1e-8);
                }
            }
            let expected: Vec<f32> = w.iter().map(|&w| w as f32).collect();
            let found = bench.store.get(bench.store.slot("w").unwrap());
            // f32 moments and corrections: 1 - 0.999 in f32 is good to 3e-5 of itself.
            close("weights", found, &expected, 2e-5);
        }
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut bench = bench(None, 0.1);
            step(&mut bench, 1, &random(&[5, 7], 3).values);
            let before: Vec<Vec<f32>> = bench
                .store
                .slots()
                .map(|slot| bench.store.get(slot).to_vec())
                .collect();
            let mut gradient = random(&[5, 7], 4).values;
            gradient[17] = bad;
            step(&mut bench, 2, &gradient);
            for (slot, before) in bench.store.slots().zip(&before) {
                assert_eq!(bench.store.get(slot), before);
            }
        }
    }
}
