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
//! The target's logits are an operand, made once for all passes. A program that
//! [streams](Builder::stream_target_logits) them has the hidden values `T` that they are a product
//! of in their place, by the same head: `t = T W + b` is made in scratch too, a chunk at a time, at
//! the price of one more product a pass. No logits of all rows are stored then.
//!
//! Programs call [`Builder::kl_divergence`] on logits: if these are a product of a narrower value,
//! this op is written instead. Other readers of the logits have them made as usual. For the
//! gradients of `W`, `b` and the cross-entropy, which a frozen head does not have, the logits are
//! made again and the plain ops are used.

mod cpu;
mod cuda;

use std::sync::Arc;

use self::cpu::Cut;
use super::{CrossEntropy, KlDivergence};
use crate::alike::{Alike, Of, Side};
use crate::cpu::shape::Shape;
use crate::derivation::{Derivation, Right};
use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
use crate::ops::Elementwise;
use crate::precision::Format::{self, Either, Factor, Full};
use crate::value::{Type, Value};

/// Mean divergence of rows of logits from a target's. Inputs: target logits and their log-sum-exps,
/// or `T`; `H`, `W`, and labels and `b` if there are any. Results: the mean, the mean cross-entropy
/// of the labels, and the gradient of the mean divergence with respect to `H`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadDivergence {
    /// Whether the target is given by its hidden values.
    streamed: bool,
    /// Whether `W` is stored `[v, d]`.
    transposed: bool,
    labels: bool,
    bias: bool,
    gradient: bool,
}

/// Number of rows, columns of `H`, and size of the vocabulary.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    rows: usize,
    d: usize,
    vocabulary: usize,
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

    /// Has divergences that follow make the target's logits a chunk of rows at a time, each time
    /// that they need them, where these are a product by the head that the other logits are a
    /// product by: nothing of `[rows, v]` is stored, and each divergence has one more product.
    pub fn stream_target_logits(&mut self) {
        self.streams_target_logits = true;
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
        let mut inputs = match self
            .derivation(target)
            .filter(|_| self.streams_target_logits)
        {
            Some(Derivation::Product {
                a,
                right: head,
                bias: of_head,
            }) if (head.w, head.transposed, of_head) == (right.w, right.transposed, bias) => {
                vec![a]
            }
            _ => vec![target, target_lse],
        };
        let op = HeadDivergence {
            streamed: inputs.len() == 1,
            transposed: right.transposed,
            labels: labels.is_some(),
            bias: bias.is_some(),
            gradient: false,
        };
        inputs.extend([h, right.w].into_iter().chain(labels).chain(bias));
        self.op(op, &inputs).map(Some)
    }
}

impl HeadDivergence {
    /// Index of `H` among the inputs; `W` comes next.
    fn h(self) -> usize {
        if self.streamed { 1 } else { 2 }
    }

    /// Index of the labels among the inputs.
    fn labels(self) -> Option<usize> {
        self.labels.then_some(self.h() + 2)
    }

    /// Index of the bias among the inputs.
    fn bias(self) -> Option<usize> {
        self.bias.then_some(self.h() + 2 + usize::from(self.labels))
    }

    /// - `ty`: the type of an input
    fn sizes<'t>(self, ty: impl Fn(usize) -> &'t Type) -> Sizes {
        let (h, w) = (ty(self.h()), ty(self.h() + 1));
        Sizes {
            rows: h.rows(),
            d: h.columns(),
            vocabulary: match (self.streamed, self.transposed) {
                (true, true) => w.rows(),
                (true, false) => w.columns(),
                (false, _) => ty(0).columns(),
            },
        }
    }

    /// Gradients through logits that are made.
    fn plain_gradient(self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let (inputs, h) = (node.inputs, node.inputs[self.h()]);
        let right = Right::of(inputs[self.h() + 1], self.transposed);
        let bias = self.bias().map(|index| inputs[index]);
        // A frozen bias may be that of the target's logits, which have no gradient.
        let mut wanted: Vec<Value> = [h, right.w].into_iter().chain(bias).collect();
        wanted.retain(|&input| gradients.wants(input));
        let logits = gradients.builder().multiply(h, right, bias, None)?;
        let mut terms: Vec<(Value, Value)> = Vec::new();
        if let Some(g) = gradients.of(node.outputs[0]) {
            let b = gradients.builder();
            let [target, target_lse] = if self.streamed {
                let target = b.multiply(inputs[0], right, bias, None)?;
                [target, b.log_sum_exp(target)?]
            } else {
                [inputs[0], inputs[1]]
            };
            terms.push((b.op1(KlDivergence, &[target, target_lse, logits])?, g));
        }
        if let Some(labels) = self.labels()
            && let Some(g) = gradients.of(node.outputs[1])
        {
            let b = gradients.builder();
            let of = [logits, inputs[labels], b.log_sum_exp(logits)?];
            terms.push((b.op1(CrossEntropy, &of)?, g));
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
    op! {
        name "head_divergence";
        kernels(self) cpu::run(*self), cuda::value(*self);
        scratch_bytes(self, inputs) 4 * Cut::of(self.sizes(|index| inputs[index])).scratch(*self);
        packed_bytes(self, inputs) 4 * cpu::packed(self.sizes(|index| inputs[index]));
    }

    fn formats(&self) -> [&'static [Format]; 2] {
        match self.streamed {
            true => [&[Factor], &[Full, Either]],
            false => [&[Either, Full, Factor], &[Full, Either]],
        }
    }

    /// The vocabulary.
    fn alike(&self, inputs: &[&Type], _outputs: &[&Type]) -> Vec<Alike> {
        let sizes = self.sizes(|index| inputs[index]);
        let shape = Shape::of([sizes.rows, sizes.vocabulary, sizes.d]);
        let w = match self.transposed {
            true => (self.h() + 1, Side::Rows),
            false => (self.h() + 1, Side::Columns),
        };
        let target = (!self.streamed).then_some((0, Side::Columns));
        let bias = self.bias().map(|index| (index, Side::Columns));
        let all = [w].into_iter().chain(target).chain(bias);
        let all = all.map(|(index, side)| (Of::Input(index), side));
        vec![Alike::of_product(shape, all)]
    }

    /// Of operands that fit together: no other op than those of `through_head` is made.
    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let mut outputs = vec![Type::scalar(); 1 + usize::from(self.labels)];
        outputs.extend(self.gradient.then(|| inputs[self.h()].clone()));
        Ok(outputs)
    }

    fn right_factors(&self, _inputs: &[&Type]) -> Vec<(usize, bool)> {
        let w = self.h() + 1;
        let backward = self.gradient.then_some((w, !self.transposed));
        [(w, self.transposed)].into_iter().chain(backward).collect()
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let wants = |index: usize| gradients.wants(node.inputs[index]);
        if (0..self.h()).any(wants) {
            return refuse!(self, "the target has no gradient");
        }
        let of_entropy = self.labels && gradients.of(node.outputs[1]).is_some();
        let of_weights = wants(self.h() + 1) || self.bias().is_some_and(wants);
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
        let scaled = Elementwise::scaled("head_divergence_grad");
        gradients.emit(scaled, &[kept, g], &[node.inputs[self.h()]])
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let sizes = self.sizes(|index| inputs[index]);
        // A product forward; two exponentials of some 20 flops. A product backward, and one more
        // exponential. A product of the target, and its log-sum-exp.
        let gradient = usize::from(self.gradient) * (2 * sizes.d + 20);
        let target = usize::from(self.streamed) * (2 * sizes.d + 22);
        (sizes.rows * sizes.vocabulary * (2 * sizes.d + 45 + gradient + target)) as u64
    }
}

#[cfg(test)]
mod tests;
