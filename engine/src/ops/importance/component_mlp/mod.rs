//! A network for each component, from one number to one number, with one hidden layer:
//!
//! ```text
//! p_ch = W1_ch a_c + b1_ch        z_c = sum_h W2_ch gelu(p_ch) + b2_c        (exact GELU)
//! ```
//!
//! With `G` the gradient of `z` and `t_ch = G_c W2_ch gelu'(p_ch)`, summed over rows where the
//! result has no rows:
//!
//! ```text
//! a: sum_h t_ch W1_ch     W1: t_ch a_c     b1: t_ch     W2: G_c gelu(p_ch)     b2: G_c
//! ```
//!
//! The hidden layer, `h` times as large as the activations, is never stored: the backward pass
//! computes it again, `gelu` and its slope together.

mod cpu;
mod cuda;
mod tiling;

use self::tiling::Tiling;
use crate::cpu::pool::chunks;
use crate::op::{Builder, ExpensiveOps, Gradients, NodeView, Op, Result, op, refuse};
use crate::value::{Type, Value};

/// The networks of all components of a site.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ComponentMlp;

/// All gradients of [`ComponentMlp`].
#[derive(Debug, Clone, Copy, PartialEq)]
struct ComponentMlpGrad;

/// Weights of the networks: `w1`, `b1` f32 `[c, 1, h]` and `[c, h]`, `w2`, `b2` f32 `[c, h, 1]` and
/// `[c, 1]`.
#[derive(Debug, Clone, Copy)]
pub struct ComponentMlpWeights {
    /// First layer.
    pub w1: Value,
    /// Its bias.
    pub b1: Value,
    /// Second layer.
    pub w2: Value,
    /// Its bias.
    pub b2: Value,
}

impl Builder {
    /// `z` f32 `[.., c]` from activations f32 `[.., c]`; the gradient flows to the activations and
    /// all weights.
    ///
    /// # Errors
    ///
    /// When the shapes do not fit.
    pub fn component_mlp(&mut self, a: Value, with: &ComponentMlpWeights) -> Result<Value> {
        self.op1(ComponentMlp, &[a, with.w1, with.b1, with.w2, with.b2])
    }
}

impl Op for ComponentMlp {
    op! {
        name "component_mlp"; formats [Either, Full] => [Either];
        kernels(self) cpu::forward(), cuda::value();
        scratch_bytes(self, inputs) 4 * Tiling::new(inputs[0].columns(), inputs[1].columns()).len();
        flops(self, inputs) 4 * (inputs[0].len() * inputs[1].columns()) as u64;
        expensive_ops(self, inputs) ExpensiveOps {
            gelus: (inputs[0].len() * inputs[1].columns()) as u64,
            ..ExpensiveOps::default()
        };
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let c = inputs[0].columns();
        let h = inputs[1].columns();
        let expected = [vec![c, 1, h], vec![c, h], vec![c, h, 1], vec![c, 1]];
        match inputs[1..]
            .iter()
            .zip(&expected)
            .find(|(found, expected)| found.dims != **expected)
        {
            Some((found, expected)) => {
                refuse!(self, "a weight is {found}, not {expected:?}")
            }
            None => Ok(vec![inputs[0].clone()]),
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let inputs = [&[g], &node.inputs[..4]].concat();
        let targets: Vec<Option<Value>> = node.inputs.iter().copied().map(Some).collect();
        gradients.emit(ComponentMlpGrad, &inputs, &targets)
    }
}

impl Op for ComponentMlpGrad {
    op! {
        name "component_mlp_grad"; formats [Either, Either, Full] => [Either, Full]; accumulates;
        kernels(self) cpu::backward(), cuda::gradient();
        flops(self, inputs) 11 * (inputs[1].len() * inputs[2].columns()) as u64;
        expensive_ops(self, inputs) ExpensiveOps {
            gelu_slopes: (inputs[1].len() * inputs[2].columns()) as u64,
            ..ExpensiveOps::default()
        };
    }

    /// Inputs: gradient of `z`, `a`, `w1`, `b1`, `w2`. Outputs: gradients of `a`, `w1`, `b1`, `w2`,
    /// `b2`.
    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let c = inputs[1].columns();
        let mut types: Vec<Type> = inputs[1..].iter().map(|&ty| ty.clone()).collect();
        types.push(Type::f32(&[c, 1]));
        Ok(types)
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let tiling = Tiling::new(inputs[1].columns(), inputs[2].columns());
        let rows = inputs[1].rows();
        4 * (1 + chunks(rows, tiling.chunk_rows(rows))) * tiling.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::oracle::{Oracle, random};

    #[test]
    fn networks_agree_with_candle() {
        for (rows, c, h) in [
            (3, 2, 5),
            (300, 3, 4),
            (1100, 1, 1),
            (70, 20, 2),
            (65, 48, 3),
            (2100, 16, 1),
        ] {
            let point = [
                random(&[rows, c], 1),
                random(&[c, 1, h], 2),
                random(&[c, h], 3),
                random(&[c, h, 1], 4),
                random(&[c, 1], 5),
            ];
            Oracle::new(&point)
                .ours(|b, v| {
                    b.component_mlp(
                        v[0],
                        &ComponentMlpWeights {
                            w1: v[1],
                            b1: v[2],
                            w2: v[3],
                            b2: v[4],
                        },
                    )
                })
                .candle(|v| {
                    let hidden = v[0]
                        .unsqueeze(2)?
                        .broadcast_mul(&v[1].squeeze(1)?)?
                        .broadcast_add(&v[2])?
                        .gelu_erf()?;
                    hidden
                        .broadcast_mul(&v[3].squeeze(2)?)?
                        .sum(2)?
                        .broadcast_add(&v[4].squeeze(1)?)
                })
                // Sums of up to 513 terms; candle's own sums round as much.
                .agree(1e-5);
        }
    }
}
