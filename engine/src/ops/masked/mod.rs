//! Component activations times their masks: `h = a * M` with `M = route (m - delta)`.
//!
//! The mask `m` is made where it is used, from the importance `g` and a source, and never stored:
//!
//! ```text
//! source     m                    dh/da   dh/dg
//! importance g                    M       a route
//! between    g + (1 - g) r        M       a route (1 - r)      r uniform, a coin, or given
//! drawn      r                    M       -
//! rounded    1 where g > t        M       -
//! ones       1                    M       -
//! ```
//!
//! The gradient draws `r` again from its counter. Subtracting `delta` and weighing with `route` is half of the masked
//! site; the other half, with its derivation, is [`SiteOutput`](super::SiteOutput).

mod cpu;

use spd_draws::Stream;

use crate::builder::Builder;
use crate::cpu::Frame;
use crate::gradients::Gradients;
use crate::op::{BuildError, NodeView, Op, Result};
use crate::value::{Type, Value};

/// Where the numbers between 0 and 1 come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Draw {
    /// Uniform in `[0, 1)`.
    Uniform(Stream),
    /// 0 or 1 with equal chance.
    Coin(Stream),
    /// An input of the op: recorded numbers, or an adversary's.
    Given,
}

/// How a mask is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mask {
    /// The importance itself.
    Importance,
    /// Between the importance and 1.
    Between(Draw),
    /// The draw itself, whatever the importance.
    Drawn(Draw),
    /// 1 where the importance exceeds a threshold, else 0.
    Rounded(f32),
    /// All ones.
    Ones,
}

/// What a masked pass does at a site, beside its activations and weights.
#[derive(Debug, Clone, Copy)]
pub struct MaskValues {
    /// How the mask is made.
    pub mask: Mask,
    /// Importances, f32 `[.., c]`; needed unless the mask does not look at them.
    pub importance: Option<Value>,
    /// Given draws, f32 `[.., c]`.
    pub given: Option<Value>,
    /// Delta masks, f32 `[rows]`; `None` is 0.
    pub delta: Option<Value>,
    /// Routes, f32 `[rows]` of zeros and ones; `None` is 1.
    pub route: Option<Value>,
}

/// `h = a * route (m - delta)`.
#[derive(Debug, Clone, Copy)]
pub struct Masked {
    mask: Mask,
    delta: bool,
    route: bool,
}

/// Gradients of [`Masked`] with respect to `a` and, where the mask depends on it, the importance.
#[derive(Debug, Clone, Copy)]
struct MaskedGrad(Masked);

impl Mask {
    /// Whether the mask looks at the importances.
    pub fn reads_importance(self) -> bool {
        matches!(self, Self::Importance | Self::Between(_) | Self::Rounded(_))
    }

    fn has_gradient(self) -> bool {
        matches!(self, Self::Importance | Self::Between(_))
    }

    fn given(self) -> bool {
        matches!(self, Self::Between(Draw::Given) | Self::Drawn(Draw::Given))
    }
}

impl Builder {
    /// `a * route (m - delta)`, f32 `[.., c]`; the gradient flows to `a` and to the importance.
    ///
    /// # Errors
    ///
    /// When a value that the mask needs is missing, or shapes differ.
    pub fn masked(&mut self, a: Value, with: &MaskValues) -> Result<Value> {
        if with.mask == Mask::Ones && with.delta.is_none() && with.route.is_none() {
            return Ok(a);
        }
        let mut inputs = vec![a];
        let missing = |what| BuildError::new("masked", format!("{:?} needs {what}", with.mask));
        if with.mask.reads_importance() {
            inputs.push(with.importance.ok_or_else(|| missing("importances"))?);
        }
        if with.mask.given() {
            inputs.push(with.given.ok_or_else(|| missing("given draws"))?);
        }
        inputs.extend(with.delta);
        inputs.extend(with.route);
        let op = Masked {
            mask: with.mask,
            delta: with.delta.is_some(),
            route: with.route.is_some(),
        };
        self.op1(op, &inputs)
    }
}

/// Where each operand stands among the inputs, after `a` at `first`.
#[derive(Debug, Clone, Copy)]
struct Operands {
    a: usize,
    importance: Option<usize>,
    given: Option<usize>,
    delta: Option<usize>,
    route: Option<usize>,
}

impl Masked {
    fn operands(&self, first: usize) -> Operands {
        let mut next = first;
        let mut take = |present: bool| {
            present.then(|| {
                next += 1;
                next
            })
        };
        Operands {
            a: first,
            importance: take(self.mask.reads_importance()),
            given: take(self.mask.given()),
            delta: take(self.delta),
            route: take(self.route),
        }
    }

    fn check(&self, inputs: &[&Type], first: usize) -> Result<()> {
        let operands = self.operands(first);
        let a = inputs[operands.a];
        let same = |index: Option<usize>| index.is_none_or(|index| inputs[index] == a);
        let rows = |index: Option<usize>| index.is_none_or(|index| inputs[index].len() == a.rows());
        if same(operands.importance)
            && same(operands.given)
            && rows(operands.delta)
            && rows(operands.route)
        {
            return Ok(());
        }
        let found: Vec<String> = inputs.iter().map(ToString::to_string).collect();
        Err(BuildError::new(
            "masked",
            format!("{} do not fit {self:?}", found.join(", ")),
        ))
    }
}

impl Op for Masked {
    fn name(&self) -> &'static str {
        "masked"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.check(inputs, 0)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let Some(gradient) = gradients.of(node.outputs[0]) else {
            return Ok(());
        };
        let operands = self.operands(0);
        if let Some(given) = operands.given
            && gradients.wants(node.inputs[given])
        {
            return Err(BuildError::new(self.name(), "given draws have no gradient"));
        }
        let importance = operands.importance.filter(|_| self.mask.has_gradient());
        let targets = [
            Some(node.inputs[0]),
            importance.map(|index| node.inputs[index]),
        ];
        let inputs: Vec<Value> = std::iter::once(gradient)
            .chain(node.inputs.iter().copied())
            .collect();
        gradients.emit(
            MaskedGrad(*self),
            &inputs,
            &targets[..if importance.is_some() { 2 } else { 1 }],
        )
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::forward(self, frame);
    }
}

impl Op for MaskedGrad {
    fn name(&self) -> &'static str {
        "masked_grad"
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.0.check(inputs, 1)?;
        let results = if self.0.mask.has_gradient() { 2 } else { 1 };
        Ok(vec![inputs[0].clone(); results])
    }

    fn accumulates(&self) -> bool {
        true
    }

    fn gradient(&self, _node: &NodeView<'_>, _gradients: &mut Gradients<'_>) -> Result<()> {
        Err(BuildError::new(self.name(), "has no gradient"))
    }

    fn run(&self, frame: &mut Frame<'_>) {
        cpu::backward(&self.0, frame);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use spd_draws::{Purpose, Stream};

    use super::*;
    use crate::ops::oracle::{Oracle, Sample, random};

    const ROWS: usize = 5;
    const C: usize = 37;
    const STREAM: Stream = Stream::new(Purpose::Source, 1, 2);

    fn drawn(coin: bool) -> Tensor {
        let mut values = vec![0.0; ROWS * C];
        for (row, out) in (0u32..).zip(values.chunks_mut(C)) {
            STREAM.fill_uniform(0, 0, row, out);
        }
        if coin {
            values
                .iter_mut()
                .for_each(|r| *r = if *r < 0.5 { 0.0 } else { 1.0 });
        }
        Tensor::from_vec(values, (ROWS, C), &Device::Cpu).unwrap()
    }

    fn samples() -> Vec<Sample> {
        let route = Sample {
            dims: vec![ROWS],
            values: vec![1.0, 0.0, 1.0, 1.0, 0.0],
        };
        vec![
            random(&[ROWS, C], 1),
            random(&[ROWS, C], 2),
            random(&[ROWS], 3),
            route,
        ]
    }

    // Products of a few numbers below 10.
    const TOLERANCE: f32 = 2e-6;

    #[test]
    fn every_mask_agrees_with_candle() {
        for mask in [
            Mask::Importance,
            Mask::Between(Draw::Uniform(STREAM)),
            Mask::Between(Draw::Coin(STREAM)),
        ] {
            Oracle::new(&samples())
                .constant(2)
                .constant(3)
                .ours(|b, v| {
                    let with = MaskValues {
                        mask,
                        importance: Some(v[1]),
                        given: None,
                        delta: Some(v[2]),
                        route: Some(v[3]),
                    };
                    b.masked(v[0], &with)
                })
                .candle(|v| {
                    let m = match mask {
                        Mask::Importance => v[1].clone(),
                        Mask::Between(draw) => {
                            let r = drawn(matches!(draw, Draw::Coin(_)));
                            (&v[1] + ((1.0 - &v[1])? * r)?)?
                        }
                        _ => unreachable!("not in the list"),
                    };
                    let m = m.broadcast_sub(&v[2].unsqueeze(1)?)?;
                    let m = m.broadcast_mul(&v[3].unsqueeze(1)?)?;
                    &v[0] * m
                })
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn given_draws_agree_with_candle() {
        let mut point = samples();
        point.truncate(3);
        point[2] = random(&[ROWS, C], 9);
        Oracle::new(&point)
            .constant(2)
            .ours(|b, v| {
                let mask = Mask::Between(Draw::Given);
                let with = MaskValues {
                    mask,
                    importance: Some(v[1]),
                    given: Some(v[2]),
                    delta: None,
                    route: None,
                };
                b.masked(v[0], &with)
            })
            .candle(|v| &v[0] * (&v[1] + ((1.0 - &v[1])? * &v[2])?)?)
            .agree(TOLERANCE);
    }

    #[test]
    fn masks_without_importance_have_only_a_gradient_of_the_activation() {
        for mask in [
            Mask::Drawn(Draw::Uniform(STREAM)),
            Mask::Ones,
            Mask::Rounded(0.1),
        ] {
            let mut point = samples();
            point.truncate(3);
            Oracle::new(&point)
                .constant(1)
                .constant(2)
                .ours(|b, v| {
                    let importance = mask.reads_importance().then_some(v[1]);
                    let with = MaskValues {
                        mask,
                        importance,
                        given: None,
                        delta: Some(v[2]),
                        route: None,
                    };
                    b.masked(v[0], &with)
                })
                .candle(|v| {
                    let m = match mask {
                        Mask::Ones => v[0].ones_like()?,
                        Mask::Rounded(threshold) => {
                            v[1].gt(f64::from(threshold))?.to_dtype(v[0].dtype())?
                        }
                        _ => drawn(false),
                    };
                    &v[0] * m.broadcast_sub(&v[2].unsqueeze(1)?)?
                })
                .agree(TOLERANCE);
        }
    }
}
