//! Divergence from a target through the layer that makes the logits: [`KlDivergence`] of
//! `X = H W + b`, where `X`, f32 `[rows, v]`, is never stored as a whole.
//!
//! Rows are processed in chunks. The logits of a chunk are computed in scratch; from them follow
//! the log-sum-exp and the divergence of each row, `sum_v P_v (t_v - x_v) - lse(t) + lse(x)`, and
//! in place `Q - P`, the gradient of the divergence. If it is needed, it is multiplied at once:
//!
//! ```text
//! dH = g / rows (Q - P) W^T        g: the gradient of the mean
//! ```
//!
//! All of `dH` is linear in `g`, so the walk stores `dH` at `g = 1`, as narrow as `H`, and the op
//! of the gradient only scales it: one walk gives value and gradient, with two products in all. A
//! walk without a gradient makes one product. With labels the same logits give the cross-entropy,
//! `lse(x) - x_label`.
//!
//! Programs call [`Builder::kl_divergence`] on logits: if these are a product of a narrower value,
//! this op is written instead. Other readers of the logits have them made as usual. For the
//! gradients of `W`, `b` and the cross-entropy, which a frozen head does not have, the logits are
//! made again and the plain ops are used.

mod cpu;
mod cuda;

use std::sync::Arc;

use super::{CrossEntropy, KlDivergence};
use crate::cpu::Frame;
use crate::cuda::Lowering;
use crate::derivation::{Derivation, Right};
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result};
use crate::precision::Format::{self, Either, Factor, Full};
use crate::value::{DType, Type, Value};

/// Mean divergence of rows of logits from a target's. Inputs: target logits, their log-sum-exps,
/// `H`, `W`, and labels and `b` if there are any. Results: the mean, the mean cross-entropy of the
/// labels, and the gradient of the mean divergence with respect to `H`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadDivergence {
    /// Whether `W` is stored `[v, d]`.
    transposed: bool,
    labels: bool,
    bias: bool,
    gradient: bool,
}

/// Gradient of [`HeadDivergence`]'s `H`: the gradient of the mean times the stored gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
struct HeadDivergenceGrad;

/// Number of rows, columns of `H`, and size of the vocabulary.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    d: usize,
    vocabulary: usize,
}

/// The inputs by name.
struct Operands {
    target: Value,
    target_lse: Value,
    h: Value,
    right: Right,
    labels: Option<Value>,
    bias: Option<Value>,
}

impl Builder {
    /// The divergence of [`Builder::kl_divergence`] and the cross-entropy of
    /// [`Builder::cross_entropy`], of the same logits: f32 `[.., v]`, `[..]`, `[.., v]` and u32
    /// `[..]` to two scalars.
    ///
    /// # Errors
    ///
    /// When the shapes do not fit.
    pub fn kl_divergence_and_cross_entropy(
        &mut self,
        [target, target_lse, logits]: [Value; 3],
        labels: Value,
    ) -> Result<[Value; 2]> {
        match self.through_head([target, target_lse, logits], Some(labels))? {
            Some(values) => Ok([values[0], values[1]]),
            None => Ok([
                self.op1(KlDivergence, &[target, target_lse, logits])?,
                self.cross_entropy(logits, labels)?,
            ]),
        }
    }

    /// The divergence without the logits, and with labels the cross-entropy; `None` if the logits
    /// are no product of a narrower value.
    pub(super) fn through_head(
        &mut self,
        [target, target_lse, logits]: [Value; 3],
        labels: Option<Value>,
    ) -> Result<Option<Vec<Value>>> {
        let Some(Derivation::Product { a: h, right, bias }) = self.derivation(logits) else {
            return Ok(None);
        };
        let ty = self.ty(logits);
        let rows = &ty.dims[..ty.dims.len() - 1];
        let fit = self.ty(target) == ty
            && self.ty(target_lse).dims == rows
            && labels.is_none_or(|labels| *self.ty(labels) == Type::u32(rows));
        if !fit || ty.columns() <= self.ty(h).columns() {
            return Ok(None);
        }
        let op = HeadDivergence {
            transposed: right.transposed,
            labels: labels.is_some(),
            bias: bias.is_some(),
            gradient: false,
        };
        let inputs = [target, target_lse, h, right.w].into_iter();
        let inputs: Vec<Value> = inputs.chain(labels).chain(bias).collect();
        self.op(op, &inputs).map(Some)
    }
}

impl HeadDivergence {
    fn sizes(types: &[&Type]) -> Sizes {
        Sizes {
            rows: types[2].rows(),
            d: types[2].columns(),
            vocabulary: types[0].columns(),
        }
    }

    fn operands(self, inputs: &[Value]) -> Operands {
        let mut rest = inputs[4..].iter().copied();
        Operands {
            target: inputs[0],
            target_lse: inputs[1],
            h: inputs[2],
            right: Right {
                w: inputs[3],
                transposed: self.transposed,
            },
            labels: rest.by_ref().take(usize::from(self.labels)).next(),
            bias: rest.next(),
        }
    }

    /// Index of the bias among the inputs.
    fn bias(self) -> Option<usize> {
        self.bias.then_some(4 + usize::from(self.labels))
    }

    /// Gradients through logits that are made.
    fn plain_gradient(self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let on = self.operands(node.inputs);
        // A frozen bias may be that of the target's logits, which have no gradient.
        let inputs = [Some(on.h), Some(on.right.w), on.bias];
        let mut wanted: Vec<Value> = inputs.into_iter().flatten().collect();
        wanted.retain(|&input| gradients.wants(input));
        let logits = gradients
            .builder()
            .multiply(on.h, on.right, on.bias, None)?;
        let mut terms: Vec<(Value, Value)> = Vec::new();
        if let Some(g) = gradients.of(node.outputs[0]) {
            let inputs = [on.target, on.target_lse, logits];
            terms.push((gradients.builder().op1(KlDivergence, &inputs)?, g));
        }
        if let Some(labels) = on.labels
            && let Some(g) = gradients.of(node.outputs[1])
        {
            terms.push((gradients.builder().op1(CrossEntropy, &[logits, labels])?, g));
        }
        for (term, g) in terms {
            let found = gradients.builder().gradients_from(term, g, &wanted)?;
            for (&input, gradient) in wanted.iter().zip(found) {
                if let Some(gradient) = gradient {
                    gradients.pass(input, gradient)?;
                }
            }
        }
        Ok(())
    }
}

impl Op for HeadDivergence {
    fn name(&self) -> &'static str {
        "head_divergence"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Either, Full, Factor], &[Full, Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let [target, target_lse, h, w] = inputs[..4] else {
            unreachable!("a divergence through a head has four inputs and more");
        };
        let Sizes {
            rows,
            d,
            vocabulary,
        } = Self::sizes(inputs);
        let sides = if self.transposed {
            [vocabulary, d]
        } else {
            [d, vocabulary]
        };
        let of_rows = |ty: &Type| ty.len() == rows && ty.dtype != DType::Bf16;
        let fit = target.rows() == rows && of_rows(target_lse) && w.dims == sides;
        let bias = self.bias().map(|index| inputs[index].len());
        if !fit || bias.is_some_and(|len| len != vocabulary) {
            let found = format!("found {target} with {target_lse}, {h} and {w}");
            return Err(BuildError::new(
                self.name(),
                format!("needs f32 [.., v], [..], [.., d] and a head of {sides:?}, {found}"),
            ));
        }
        let mut outputs = vec![Type::scalar(); 1 + usize::from(self.labels)];
        outputs.extend(self.gradient.then(|| h.clone()));
        Ok(outputs)
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        4 * cpu::Cut::of(Self::sizes(inputs)).scratch(*self)
    }

    fn packed_bytes(&self, inputs: &[&Type]) -> usize {
        4 * cpu::packed(Self::sizes(inputs))
    }

    fn right_factors(&self, _inputs: &[&Type]) -> Vec<(usize, bool)> {
        let backward = self.gradient.then_some((3, !self.transposed));
        [(3, self.transposed)].into_iter().chain(backward).collect()
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let on = self.operands(node.inputs);
        if gradients.wants(on.target) || gradients.wants(on.target_lse) {
            return Err(BuildError::new(self.name(), "the target has no gradient"));
        }
        let of_entropy = self.labels && gradients.of(node.outputs[1]).is_some();
        let of_weights =
            gradients.wants(on.right.w) || on.bias.is_some_and(|bias| gradients.wants(bias));
        if of_entropy || of_weights {
            return self.plain_gradient(node, gradients);
        }
        let Some(g) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let kept = if self.gradient {
            *node.outputs.last().expect("it makes the gradient")
        } else {
            let op = Self {
                gradient: true,
                ..*self
            };
            gradients.builder().widen(node.outputs[0], Arc::new(op))?
        };
        gradients.emit(HeadDivergenceGrad, &[g, kept], &[Some(on.h)])
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run(*self, frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::value(*self, to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let Sizes {
            rows,
            d,
            vocabulary,
        } = Self::sizes(inputs);
        // A product forward and one backward; two exponentials of some 20 flops, and one more for
        // the gradient.
        let each = if self.gradient {
            4 * d + 65
        } else {
            2 * d + 45
        };
        (rows * vocabulary * each) as u64
    }
}

impl Op for HeadDivergenceGrad {
    fn name(&self) -> &'static str {
        "head_divergence_grad"
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        [&[Full, Either], &[Either]]
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        Ok(vec![inputs[1].clone()])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::run_gradient(frame);
    }

    fn cuda(&self, to: &mut Lowering<'_>) {
        cuda::gradient(to);
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        inputs[1].len() as u64
    }
}

#[cfg(test)]
mod tests;
