//! `y = mean over rows of KL(P || Q) = sum_v P_v (ln P_v - ln Q_v)`, with `P` the softmax of the
//! target's logits and `Q` that of the logits `x`.
//!
//! `d KL / d x = Q - P`, since `ln Q_v = x_v - lse(x)` and `P` sums to 1; each row gets it times
//! the gradient of `y` over the number of rows. The log-sum-exp of each row is kept for it. The
//! gradient takes the place of the logits, which it is the last to read: of a large vocabulary at
//! most two matrices are held, the target's and one more. The target gets no gradient.

mod cpu;
pub(super) mod cuda;

use std::sync::Arc;

use crate::alike::{Alike, Of};
use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Mean divergence of rows of logits from a target's: target logits, their log-sum-exps, and logits
/// to a scalar and the log-sum-exps of the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlDivergence;

/// Gradient of [`KlDivergence`]'s logits, from the target's logits, both log-sum-exps and the
/// gradient of the scalar. The logits are in the result before the op.
#[derive(Debug, Clone, Copy, PartialEq)]
struct KlDivergenceGrad;

impl Builder {
    /// Mean over rows of `KL(softmax(target) || softmax(logits))`: f32 `[.., v]`, `[..]` from
    /// [`Builder::log_sum_exp`], and `[.., v]` to a scalar. The gradient flows to `logits` only.
    /// Logits that are a product of a narrower value are not made for it: see
    /// [`HeadDivergence`](crate::ops::HeadDivergence).
    ///
    /// # Errors
    ///
    /// When the shapes do not fit.
    pub fn kl_divergence(
        &mut self,
        target_logits: Value,
        target_lse: Value,
        logits: Value,
    ) -> Result<Value> {
        let operands = [target_logits, target_lse, logits];
        match self.through_head(operands, None)? {
            Some(values) => Ok(values[0]),
            None => self.op1(KlDivergence, &operands),
        }
    }
}

impl Op for KlDivergence {
    op! {
        name "kl_divergence"; formats [Either, Full, Either] => [Full];
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0), Of::Input(2)]);
        kernels(self) cpu::run(), cuda::value();
        scratch_bytes(self, inputs) inputs[1].bytes();
        // Two exponentials of some 20 flops.
        flops(self, inputs) 45 * inputs[2].len() as u64;
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (target, target_lse, logits) = (inputs[0], inputs[1], inputs[2]);
        match logits.dims.split_last() {
            Some((_, rows)) if target == logits && target_lse.dims == rows => {
                Ok(vec![Type::scalar(), target_lse.clone()])
            }
            _ => refuse!(
                self,
                "needs logits f32 [.., v] twice and [..], found target {target} with {target_lse}, and {logits}"
            ),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let [target, target_lse, logits] = [0, 1, 2].map(|at| node.inputs[at]);
        if gradients.wants(target) || gradients.wants(target_lse) {
            return refuse!(self, "the target has no gradient");
        }
        if !gradients.wants(logits) {
            return Ok(());
        }
        let inputs = [target, target_lse, node.outputs[1], g];
        let (op, into) = (Arc::new(KlDivergenceGrad), vec![Some(logits)]);
        let gradient = gradients.builder().node(op, &inputs, into)?[0];
        gradients.pass(logits, gradient)
    }
}

impl Op for KlDivergenceGrad {
    op! {
        name "kl_divergence_grad"; formats [Either, Full] => [Either];
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0), Of::Output(0)]);
        kernels(self) cpu::run_gradient(), cuda::gradient();
        flops(self, inputs) 45 * inputs[0].len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Tensor};

    use crate::op::Builder;
    use crate::op::Result;
    use crate::ops::oracle::{Oracle, random};
    use crate::plan::Plan;
    use crate::store::Store;
    use crate::value::{Type, Value};

    fn ours(b: &mut Builder, target: Value, logits: Value) -> Result<Value> {
        let lse = b.log_sum_exp(target)?;
        b.kl_divergence(target, lse, logits)
    }

    fn reference(target: &Tensor, logits: &Tensor) -> candle_core::Result<Tensor> {
        let log = |x: &Tensor| x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?);
        let (target, logits) = (log(target)?, log(logits)?);
        let rows = target.elem_count() / target.dim(D::Minus1)?;
        (target.exp()? * (target - logits)?)?.sum_all()? / rows as f64
    }

    #[test]
    fn value_and_gradient_agree_with_candle() {
        for dims in [&[7][..], &[2, 3, 65], &[30, 1200]] {
            Oracle::new(&[random(dims, 1), random(dims, 2)])
                .constant(0)
                .ours(|b, v| ours(b, v[0], v[1]))
                .candle(|v| reference(&v[0], &v[1]))
                // Sums of 1200 products of probabilities and differences of logarithms below 15.
                .agree(1e-5);
        }
    }

    #[test]
    fn a_second_use_adds_to_the_gradient() {
        Oracle::new(&[random(&[3, 9], 1), random(&[3, 9], 2)])
            .constant(0)
            .ours(|b, v| {
                let twice = b.add(v[0], v[0])?;
                let (first, second) = (ours(b, v[0], v[1])?, ours(b, twice, v[1])?);
                b.add(first, second)
            })
            .candle(|v| reference(&v[0], &v[1])? + reference(&(&v[0] * 2.0)?, &v[1])?)
            // As above, of 9.
            .agree(2e-6);
    }

    #[test]
    fn equal_logits_have_divergence_zero() {
        let logits = random(&[5, 133], 1);
        Oracle::new(&[logits.clone(), logits])
            .constant(0)
            .ours(|b, v| ours(b, v[0], v[1]))
            .candle(|v| (&v[1] - &v[1])?.sum_all())
            // Both sides compute the same bits.
            .agree(0.0);
    }

    /// Most live values at a time, in matrices of logits, of a step that learns the factors of the
    /// logits, which are as wide as they are.
    fn matrices() -> f64 {
        let (rows, d, vocabulary) = (64, 500, 500);
        let (mut b, mut store) = (Builder::new(), Store::new());
        let [target, x, w] = [[rows, d], [rows, d], [d, vocabulary]].map(|dims| {
            let slot = store.zeros(store.slots().count().to_string(), &dims);
            b.persistent(&store, slot)
        });
        let target = b.matmul(target, w).unwrap();
        let logits = b.matmul(x, w).unwrap();
        let loss = ours(&mut b, target, logits).unwrap();
        let gradient = b.gradients(loss, &[x]).unwrap()[0].unwrap();
        b.output("gradient", gradient);
        let bytes = Plan::new(&b).live_bytes();
        bytes as f64 / (4 * rows * vocabulary) as f64
    }

    // The rest is some rows of 4.
    #[test]
    fn at_most_two_matrices_of_logits_are_held() {
        let matrices = matrices();
        assert!((2.0..2.05).contains(&matrices), "{matrices}");
    }

    #[test]
    fn the_target_has_no_gradient() {
        let mut b = Builder::new();
        let target = b.input("target", &Type::f32(&[2, 3])).unwrap();
        let logits = b.input("logits", &Type::f32(&[2, 3])).unwrap();
        let loss = ours(&mut b, target, logits).unwrap();
        assert_eq!(
            b.gradients(loss, &[target]).unwrap_err().to_string(),
            "kl_divergence: the target has no gradient"
        );
    }
}
