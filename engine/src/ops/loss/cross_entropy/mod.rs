//! `y = mean over rows of -ln Q_label = lse(x) - x_label`, with `Q` the softmax of the row `x`.
//! Rows whose label is [`IGNORED`] do not count; the mean of no rows is 0.
//!
//! `x` gets `Q - onehot(label)` times the gradient of `y` over the number of rows that count. The
//! log-sum-exp of each row is an operand of both, from [`LogSumExp`](crate::ops::LogSumExp).

pub(super) mod cpu;
pub(super) mod cuda;

use crate::alike::{Alike, Of};
use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// Label of a row that does not count.
pub(super) const IGNORED: u32 = u32::MAX;

/// Mean cross-entropy of rows of logits, labels and log-sum-exps, to a scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy;

/// Gradient of [`CrossEntropy`]'s logits, from logits, labels, log-sum-exps and the gradient of the
/// scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CrossEntropyGrad;

impl Builder {
    /// Mean over rows of `-ln softmax(logits)[label]`: f32 `[.., v]` and u32 `[..]` to a scalar.
    /// Rows with the label `u32::MAX` do not count.
    ///
    /// # Errors
    ///
    /// When the shapes do not fit. Any other label beyond `v` panics in the replay.
    pub fn cross_entropy(&mut self, logits: Value, labels: Value) -> Result<Value> {
        let lse = self.log_sum_exp(logits)?;
        // The walk of a divergence from themselves gives it without the logits.
        if self.streams_target_logits
            && let Some(both) = self.through_head([logits, lse, logits], Some(labels))?
        {
            return Ok(both[1]);
        }
        self.op1(CrossEntropy, &[logits, labels, lse])
    }
}

impl Op for CrossEntropy {
    op! {
        name "cross_entropy"; formats [Either, Full] => [Full];
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0)]);
        kernels(self) cpu::run(), cuda::value();
        scratch_bytes(self, inputs) 4 * inputs[1].len();
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (logits, labels, lse) = (inputs[0], inputs[1], inputs[2]);
        match logits.dims.split_last() {
            Some((_, rows)) if *labels == Type::u32(rows) && *lse == Type::f32(rows) => {
                Ok(vec![Type::scalar()])
            }
            _ => refuse!(
                self,
                "needs logits f32 [.., v] and labels u32 [..], found {logits} and {labels}"
            ),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let inputs = [node.inputs, &[g]].concat();
        gradients.emit(CrossEntropyGrad, &inputs, &[inputs[0]])
    }
}

impl Op for CrossEntropyGrad {
    op! {
        name "cross_entropy_grad"; formats [Either, Full] => [Either]; accumulates;
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0), Of::Output(0)]);
        kernels(self) cpu::run_gradient(), cuda::gradient();
        flops(self, inputs) 22 * inputs[0].len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device, Tensor};

    use super::IGNORED;
    use crate::op::Builder;
    use crate::ops::oracle::{Oracle, random};
    use crate::value::Type;

    /// The reference: a sum of logits times a one-hot tensor, without the ignored rows.
    fn reference(logits: &Tensor, labels: &[u32]) -> candle_core::Result<Tensor> {
        let columns = logits.dim(D::Minus1)?;
        let logits = logits.reshape((labels.len(), columns))?;
        let counts: Vec<f32> = labels
            .iter()
            .map(|&label| if label == IGNORED { 0.0 } else { 1.0 })
            .collect();
        let onehot: Vec<f32> = (0..labels.len() * columns)
            .map(|i| {
                if labels[i / columns] as usize == i % columns {
                    1.0
                } else {
                    0.0
                }
            })
            .collect();
        let total: f32 = counts.iter().sum();
        let counts = Tensor::from_vec(counts, labels.len(), &Device::Cpu)?;
        let onehot = Tensor::from_vec(onehot, (labels.len(), columns), &Device::Cpu)?;
        let lse = logits.exp()?.sum(1)?.log()?;
        let losses = ((lse - (logits * onehot)?.sum(1)?)? * counts)?;
        losses.sum_all()? / f64::from(total.max(1.0))
    }

    fn check(dims: &[usize], labels: &[u32]) {
        let rows = &dims[..dims.len() - 1];
        Oracle::new(&[random(dims, 1)])
            .tokens("labels", rows, labels)
            .ours(|b, v| {
                let labels = b.input("labels", &Type::u32(rows))?;
                b.cross_entropy(v[0], labels)
            })
            .candle(|v| reference(&v[0], labels))
            // Sums of 900 powers.
            .agree(2e-6);
    }

    #[test]
    fn value_and_gradient_agree_with_candle() {
        check(&[2, 3, 65], &[0, 64, 7, 7, 33, 1]);
        let labels: Vec<u32> = (0..40).map(|row| row * 22).collect();
        check(&[40, 900], &labels);
    }

    #[test]
    fn ignored_rows_do_not_count() {
        check(&[2, 3, 5], &[0, IGNORED, 4, 2, IGNORED, IGNORED]);
        check(&[3, 5], &[IGNORED; 3]);
    }

    #[test]
    fn a_second_use_adds_to_the_gradient() {
        Oracle::new(&[random(&[3, 5], 1)])
            .tokens("first", &[3], &[0, IGNORED, 4])
            .tokens("second", &[3], &[IGNORED, 3, 1])
            .ours(|b, v| {
                let first = b.input("first", &Type::u32(&[3]))?;
                let second = b.input("second", &Type::u32(&[3]))?;
                let (x, y) = (
                    b.cross_entropy(v[0], first)?,
                    b.cross_entropy(v[0], second)?,
                );
                b.add(x, y)
            })
            .candle(|v| reference(&v[0], &[0, IGNORED, 4])? + reference(&v[0], &[IGNORED, 3, 1])?)
            // Sums of 5 powers.
            .agree(1e-6);
    }

    #[test]
    fn labels_of_another_shape_are_refused() {
        let mut b = Builder::new();
        let logits = b.input("logits", &Type::f32(&[2, 3, 5])).unwrap();
        let labels = b.input("labels", &Type::u32(&[2])).unwrap();
        assert_eq!(
            b.cross_entropy(logits, labels).unwrap_err().to_string(),
            "cross_entropy: needs logits f32 [.., v] and labels u32 [..], found f32 [2, 3, 5] and u32 [2]"
        );
    }
}
