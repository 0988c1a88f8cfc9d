//! Component activations times their masks: `h = a * M` with `M = m - delta`.
//!
//! The mask `m` is computed on the fly, from the importance `g` and a source, and never stored:
//!
//! ```text
//! source     m                    dh/da   dh/dg       dh/dr
//! importance g                    M       a           -
//! between    g + (1 - g) r        M       a (1 - r)   a (1 - g)     r uniform, a coin, or given
//! drawn      r                    M       -           a
//! rounded    1 where g > t        M       -           -
//! ones       1                    M       -           -
//! ```
//!
//! and `dh/d delta = -a` for all of them, summed over the columns. The gradient draws `r` again
//! from its counter; an `r` given by an adversary has a gradient too. A given row of `r`, or a
//! single `delta`, holds for all positions, and its gradient is the sum over them: chunk by chunk,
//! in an order that depends only on shapes.
//!
//! For routed positions, `a`, `h` and their gradients are compacted: they hold only the routed
//! rows, as [`RoutedMatMul`](super::RoutedMatMul) makes them. Importances, draws and deltas have
//! all positions, and get no gradient from rows that are not routed.
//!
//! Subtracting `delta` is half of the masked site; the other half, with its derivation, is
//! [`SiteOutput`](super::SiteOutput).

mod cpu;
pub(crate) mod cuda;

use spd_draws::Stream;

use crate::op::{
    BuildError, Builder, ExpensiveOps, Gradients, NodeView, Op, Result, listed, op, refuse,
};
use crate::ops::site::draws::drawn;
use crate::ops::{indices, row_chunks};
use crate::precision::Format::{self, Either, Full};
use crate::value::{DType, Type, Value};

/// Source of the numbers between 0 and 1.
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
    /// The draw itself, independent of the importance.
    Drawn(Draw),
    /// 1 where the importance exceeds a threshold, else 0.
    Rounded(f32),
    /// All ones.
    Ones,
}

/// Operands of a masked pass at a site, beside activations and weights.
#[derive(Debug, Clone, Copy)]
pub struct MaskValues {
    /// How the mask is made.
    pub mask: Mask,
    /// Importances, f32 `[.., c]`; needed unless the mask does not read them.
    pub importance: Option<Value>,
    /// Given draws, f32 `[.., c]`, or `[c]`: one row for all positions.
    pub given: Option<Value>,
    /// Delta masks, f32 `[rows]`, or `[1]`: one for all positions; `None` is 0.
    pub delta: Option<Value>,
    /// Routes, f32 `[rows]` of zeros and ones; `None` is 1.
    pub route: Option<Value>,
}

/// `h = a * (m - delta)`, compacted where there are routes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Masked {
    mask: Mask,
    delta: bool,
    route: bool,
}

/// Gradients of [`Masked`] with respect to those of its operands that need one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MaskedGrad {
    pub(crate) of: Masked,
    /// Whether `a`, the importances, given draws and deltas need one: the order of the results.
    wants: [bool; 4],
}

impl Mask {
    /// Whether the mask reads the importances.
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
    /// `a * (m - delta)`, f32 `[.., c]`; the gradient flows to `a`, the importance, given draws and
    /// the delta. With routes `a` is compacted, as [`Builder::routed_matmul`] makes it, and so is
    /// the result.
    ///
    /// # Errors
    ///
    /// When a value that the mask needs is missing, or shapes differ.
    pub fn masked(&mut self, a: Value, with: &MaskValues) -> Result<Value> {
        if with.mask == Mask::Ones && with.delta.is_none() {
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

impl Masked {
    /// Index of the importances, if it reads any and `a` is at `first`.
    pub(crate) fn importance(&self, first: usize) -> Option<usize> {
        self.operands(first)[0]
    }

    /// Index of the route, if there is one and `a` is at `first`.
    pub(crate) fn route(&self, first: usize) -> Option<usize> {
        self.operands(first)[3]
    }

    /// Indices of importances, given draws, deltas and the route, after `a` at `first`.
    fn operands(&self, first: usize) -> [Option<usize>; 4] {
        let [importance, given] = [self.mask.reads_importance(), self.mask.given()];
        indices(first + 1, [importance, given, self.delta, self.route])
    }

    /// Draws of the masks.
    fn drawn(&self, inputs: &[&Type], first: usize) -> ExpensiveOps {
        let len = match self.route(first).map(|route| inputs[route].dtype) {
            // For half of the rows, as in `RoutedMatMul`. On a device `a` has fewer rows.
            Some(DType::F32) => inputs[first].len() / 2,
            _ => inputs[first].len(),
        };
        match self.mask {
            Mask::Between(Draw::Given) | Mask::Drawn(Draw::Given) => ExpensiveOps::default(),
            Mask::Between(_) | Mask::Drawn(_) => drawn(len),
            Mask::Importance | Mask::Rounded(_) | Mask::Ones => ExpensiveOps::default(),
        }
    }

    /// Bytes of importances and draws that are not read: those of rows that are not on the list
    /// which a device has in the place of the route.
    pub(crate) fn unlisted_bytes(&self, inputs: &[&Type]) -> usize {
        let [importance, given, _, route] = self.operands(0);
        let list = route.map(|index| inputs[index]);
        let all = [importance, given].into_iter().flatten();
        let all = all
            .map(|index| inputs[index])
            .filter(|ty| ty.dims.len() > 1);
        let list = list.filter(|list| list.dtype == DType::U32);
        list.map_or(0, |list| all.map(|ty| unlisted_bytes(ty, list)).sum())
    }

    /// Bytes of the list of routed rows.
    fn list_bytes(&self, rows: usize) -> usize {
        if self.route { 4 * rows } else { 0 }
    }

    /// Formats of the inputs, of which `a` is at `first`: activations, their gradient before them,
    /// and importances after them, except those that are compared with a threshold.
    fn formats(&self, first: usize) -> &'static [Format] {
        let either = first + 1 + usize::from(self.mask.has_gradient());
        &[Either, Either, Either, Full][3 - either..]
    }

    fn check(&self, inputs: &[&Type], first: usize) -> Result<()> {
        let [importance, given, delta, route] = self.operands(first);
        let a = inputs[first];
        let fits = |index: Option<usize>, fits: &dyn Fn(&Type) -> bool| {
            index.is_none_or(|index| fits(inputs[index]))
        };
        if fits(importance, &|g| g == a)
            && fits(given, &|r| r == a || r.dims == [a.columns()])
            && fits(delta, &|d| d.len() == a.rows() || d.dims == [1])
            && fits(route, &|route| route.len() == a.rows())
        {
            return Ok(());
        }
        refuse!("masked", "{} do not fit {self:?}", listed(inputs))
    }
}

/// Bytes of the rows of a matrix that a device's list of routed rows has no room for.
pub(crate) fn unlisted_bytes(all: &Type, list: &Type) -> usize {
    let rows = all.rows();
    all.bytes() / rows.max(1) * (2 * rows).saturating_sub(list.len())
}

/// Gradients that are sums over positions.
#[derive(Debug, Clone, Copy)]
struct Sums {
    given: bool,
    delta: bool,
}

impl MaskedGrad {
    /// Indices of the operands whose gradients are needed.
    fn wanted(&self) -> impl Iterator<Item = usize> + use<> {
        let [importance, given, delta, _] = self.of.operands(1);
        let operands = [Some(1), importance, given, delta];
        let each = operands.into_iter().zip(self.wants);
        each.filter_map(|(operand, wanted)| operand.filter(|_| wanted))
    }

    /// Index of each operand's gradient among the results.
    fn results(&self) -> [Option<usize>; 4] {
        indices(0, self.wants)
    }

    /// Whether activations have a gradient here, which then is the first result.
    pub(crate) fn is_of_activations(&self) -> bool {
        self.wants[0]
    }

    /// Whether importances have a gradient here, and draws and deltas have none: if so, whether
    /// activations have one, which then is the first result.
    pub(crate) fn of_importance_alone(&self) -> Option<bool> {
        let [a, importance, given, delta] = self.wants;
        (importance && !given && !delta).then_some(a)
    }

    fn sums<'t>(&self, ty: impl Fn(usize) -> &'t Type, rows: usize) -> Sums {
        let [_, given, delta, _] = self.of.operands(1);
        let row = |index: Option<usize>| index.is_some_and(|index| ty(index).dims.len() == 1);
        let one = |index: Option<usize>| index.is_some_and(|index| ty(index).len() < rows);
        Sums {
            given: self.wants[2] && rows > 1 && row(given),
            delta: self.wants[3] && one(delta),
        }
    }

    /// f32s of partial sums: of given draws, and of the delta.
    fn partials<'t>(&self, ty: impl Fn(usize) -> &'t Type) -> [usize; 2] {
        let a = ty(0);
        let Sums { given, delta } = self.sums(ty, a.rows());
        let of_a_chunk = [usize::from(given) * a.columns(), usize::from(delta)];
        of_a_chunk.map(|len| row_chunks(a) * len)
    }
}

impl Op for Masked {
    op! {
        name "masked"; formats(self) [self.formats(0), &[Either]];
        kernels(self) cpu::forward(self), cuda::value(self, None);
        scratch_bytes(self, inputs) self.list_bytes(inputs[0].rows());
        expensive_ops(self, inputs) self.drawn(inputs, 0);
        untouched_bytes(self, inputs, _outputs, _adds) self.unlisted_bytes(inputs);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.check(inputs, 0)?;
        Ok(vec![inputs[0].clone()])
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let [importance, given, delta, _] = self.operands(0);
        let importance = importance.filter(|_| self.mask.has_gradient());
        let wanted = |operand: Option<usize>| {
            let value = operand.map(|index| node.inputs[index]);
            value.filter(|&value| gradients.wants(value))
        };
        let targets = [Some(0), importance, given, delta].map(wanted);
        let wants = targets.map(|target| target.is_some());
        let inputs = [&[g], node.inputs].concat();
        let targets: Vec<Value> = targets.into_iter().flatten().collect();
        gradients.emit(MaskedGrad { of: *self, wants }, &inputs, &targets)
    }
}

impl Op for MaskedGrad {
    op! {
        name "masked_grad"; formats(self) [self.of.formats(1), &[Either]]; accumulates;
        kernels(self) cpu::backward(self), cuda::gradient(self, None);
        scratch_bytes(self, inputs) 4 * self.partials(|index| inputs[index]).iter().sum::<usize>()
            + self.of.list_bytes(inputs[0].rows());
        expensive_ops(self, inputs) self.of.drawn(inputs, 1);
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        self.of.check(inputs, 1)?;
        Ok(self.wanted().map(|index| inputs[index].clone()).collect())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use spd_draws::{Purpose, Stream};

    use super::*;
    use crate::ops::oracle::{Oracle, Sample, random};

    /// More than a tile of elements, and not a whole number of tiles.
    const ROWS: usize = 61;
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
        vec![
            random(&[ROWS, C], 1),
            random(&[ROWS, C], 2),
            random(&[ROWS], 3),
        ]
    }

    // Products of a few numbers below 10.
    const TOLERANCE: f32 = 2e-6;

    #[test]
    fn every_mask_agrees_with_candle() {
        let masks = [
            Mask::Importance,
            Mask::Between(Draw::Uniform(STREAM)),
            Mask::Between(Draw::Coin(STREAM)),
        ];
        // With and without the delta's gradient: two kernels.
        for (mask, delta) in masks
            .into_iter()
            .flat_map(|mask| [(mask, true), (mask, false)])
        {
            let oracle = Oracle::new(&samples());
            let oracle = if delta { oracle } else { oracle.constant(2) };
            oracle
                .ours(|b, v| {
                    let with = MaskValues {
                        mask,
                        importance: Some(v[1]),
                        given: None,
                        delta: Some(v[2]),
                        route: None,
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
                    &v[0] * m.broadcast_sub(&v[2].unsqueeze(1)?)?
                })
                .agree(TOLERANCE);
        }
    }

    #[test]
    fn given_draws_agree_with_candle() {
        let mut point = samples();
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
    fn masks_without_importance_have_gradients_only_for_the_activation() {
        for mask in [
            Mask::Drawn(Draw::Uniform(STREAM)),
            Mask::Ones,
            Mask::Rounded(0.1),
        ] {
            Oracle::new(&samples())
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

    /// The loss of an adversary: given draws, for each of `rows` positions or in one row for all,
    /// and a delta.
    fn agree_for_an_adversary(rows: usize, dims: [&[usize]; 2], mask: Mask, tolerance: f32) {
        let point = [
            random(&[rows, C], 1),
            random(&[rows, C], 2),
            random(dims[0], 3),
            random(dims[1], 4),
        ];
        let oracle = Oracle::new(&point);
        let oracle = match mask {
            Mask::Drawn(_) => oracle.constant(1),
            _ => oracle,
        };
        let ours = |b: &mut Builder, v: &[Value]| {
            let with = MaskValues {
                mask,
                importance: Some(v[1]),
                given: Some(v[2]),
                delta: Some(v[3]),
                route: None,
            };
            b.masked(v[0], &with)
        };
        oracle
            .ours(ours)
            .candle(|v| {
                let m = match mask {
                    Mask::Drawn(_) => v[2].broadcast_as((rows, C))?,
                    _ => (&v[1] + (1.0 - &v[1])?.broadcast_mul(&v[2])?)?,
                };
                &v[0] * m.broadcast_sub(&v[3].unsqueeze(1)?)?
            })
            .agree(tolerance);
    }

    #[test]
    fn an_adversarys_gradients_agree_with_candle() {
        for mask in [Mask::Between(Draw::Given), Mask::Drawn(Draw::Given)] {
            agree_for_an_adversary(ROWS, [&[ROWS, C], &[ROWS]], mask, TOLERANCE);
            agree_for_an_adversary(ROWS, [&[C], &[1]], mask, TOLERANCE);
            agree_for_an_adversary(1, [&[C], &[1]], mask, TOLERANCE);
        }
    }

    // More than one chunk of 442 rows, each with sums of its own. 1000 products of normal numbers:
    // a row of the result is some 30 in size, and the delta's has 37 times as many terms.
    #[test]
    fn a_shared_source_gets_the_sum_over_all_positions() {
        agree_for_an_adversary(1000, [&[C], &[1]], Mask::Between(Draw::Given), 1e-5);
        agree_for_an_adversary(1000, [&[C], &[1000]], Mask::Between(Draw::Given), 1e-5);
        agree_for_an_adversary(1000, [&[1000, C], &[1]], Mask::Between(Draw::Given), 1e-5);
    }

    /// The ops that the gradient of one masked site adds, with respect to some of `a`, importance,
    /// draws and delta.
    fn gradient_ops(wrt: &[usize]) -> Vec<String> {
        let mut b = Builder::new();
        let ty = Type::f32(&[ROWS, C]);
        let v = [
            ("a", &ty),
            ("g", &ty),
            ("r", &ty),
            ("d", &Type::f32(&[ROWS])),
        ]
        .map(|(name, ty)| b.input(name, ty).unwrap());
        let with = MaskValues {
            mask: Mask::Between(Draw::Given),
            importance: Some(v[1]),
            given: Some(v[2]),
            delta: Some(v[3]),
            route: None,
        };
        let h = b.masked(v[0], &with).unwrap();
        let loss = b.sum_squares(h).unwrap();
        let before = b.nodes.len();
        let wrt: Vec<Value> = wrt.iter().map(|&index| v[index]).collect();
        let gradients = b.gradients(loss, &wrt).unwrap();
        assert!(gradients.iter().all(Option::is_some));
        let added = b.nodes[before..].iter().skip(2);
        added
            .map(|node| format!("{} {}", node.op.name(), node.outputs.len()))
            .collect()
    }

    #[test]
    fn only_needed_gradients_are_made() {
        for (wrt, outputs) in [
            (&[2][..], 1),
            (&[2, 3], 2),
            (&[3], 1),
            (&[0, 2, 3], 3),
            (&[1], 1),
            (&[0, 1], 2),
            (&[0, 1, 2, 3], 4),
        ] {
            assert_eq!(
                gradient_ops(wrt),
                [format!("masked_grad {outputs}")],
                "{wrt:?}"
            );
        }
    }
}
