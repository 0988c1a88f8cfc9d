//! AdamW on the tensors of a group, with gradient clipping and a guard against bad gradients.
//!
//! ```text
//! f = min(1, clip / (|G| + 1e-6))          |G|: norm over the group; 1 without clipping
//! w <- w (1 - lr decay)
//! m <- b1 m + (1 - b1) f G                 v <- b2 v + (1 - b2) (f G)^2
//! w <- w - lr m' / (sqrt(v') + eps)        m' = m / (1 - b1^t)   v' = v / (1 - b2^t)
//! ```
//!
//! Loshchilov and Hutter, "Decoupled weight decay regularization"; operation order and `eps`
//! outside of the root are PyTorch's, `1e-6` is that of its `clip_grad_norm_`. Step scalars: `lr`
//! and the two corrections `1 - b^t`, because a captured program cannot know `t`.
//!
//! **The guard.** When any guard (the totals of all groups' [`GradientNorm`](super::GradientNorm))
//! is not finite, nothing is written: a bad step leaves parameters and moments as they were.

mod cpu;
mod cuda;

use crate::op::{Builder, Op, Result, op, refuse};
use crate::value::{StepScalar, Type, Value};

/// Settings of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
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

impl AdamW {
    /// PyTorch's settings, without decay or clipping; step scalars `lr`, `correction1`,
    /// `correction2`.
    pub fn new(b: &mut Builder) -> Self {
        Self {
            lr: b.step_scalar("lr"),
            correction1: b.step_scalar("correction1"),
            correction2: b.step_scalar("correction2"),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            decay: 0.0,
            clip: None,
        }
    }
}

/// A tensor to update. `parameter`, `first`, `second` are in the store and of the type of
/// `gradient`.
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
}

/// The update of several tensors: inputs are all parameters, all first moments, all second moments,
/// all gradients, the norms of the group that is clipped together, and guards.
#[derive(Debug, PartialEq)]
struct Update {
    settings: AdamW,
    tensors: usize,
}

impl Builder {
    /// Updates tensors of a group at the end of a replay. `norms` are the
    /// [gradient norms](Builder::gradient_norm) of the group. Nothing is written if their total or
    /// that of one of `guards` is not finite.
    ///
    /// # Errors
    ///
    /// When there are no tensors, or the types of one differ.
    pub fn adamw(
        &mut self,
        settings: AdamW,
        on: &[AdamWOperands],
        norms: Value,
        guards: &[Value],
    ) -> Result<()> {
        let of = [
            |on: &AdamWOperands| on.parameter,
            |on: &AdamWOperands| on.first,
            |on: &AdamWOperands| on.second,
            |on: &AdamWOperands| on.gradient,
        ];
        let mut inputs: Vec<Value> = of.iter().flat_map(|of| on.iter().map(of)).collect();
        inputs.push(norms);
        inputs.extend_from_slice(guards);
        let tensors = on.len();
        self.op(Update { settings, tensors }, &inputs).map(|_| ())
    }
}

impl Op for Update {
    op! {
        name "adamw"; writes(self) 0..3 * self.tensors;
        kernels(self) cpu::run(self), cuda::value(self);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if self.tensors == 0 {
            return refuse!(self, "there are no tensors");
        }
        for tensor in 0..self.tensors {
            let types: [&Type; 4] =
                std::array::from_fn(|kind| inputs[kind * self.tensors + tensor]);
            if types.iter().any(|ty| *ty != types[0]) {
                let found = types.map(ToString::to_string).join(", ");
                return refuse!(self, "{found} differ");
            }
        }
        Ok(Vec::new())
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let parameters = inputs[..self.tensors].iter();
        parameters.map(|ty| 12 * ty.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests;
