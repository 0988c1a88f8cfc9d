//! The output of a masked site, from masked activations and the clean output.
//!
//! The reference computes `r [(a * m) U + d x D^T] + (1 - r) x W^T + b` at each position, with
//! `a = x V`, component mask `m`, delta mask `d`, routing `r`, and the weight delta
//! `D = W - (V U)^T`. As `x D^T = x W^T - a U`,
//!
//! ```text
//! y = (a * M) U + s x W^T + b        M = r (m - d)        s = r d + (1 - r)
//! ```
//!
//! and `D` is never formed. Positions with `r = 0` take no part in the components, so `a` and `h`
//! are compacted to the routed positions, with `M = m - d`, and `h U` is added at those. The clean
//! output `c = x W^T + b` often exists already (in a layerwise loss, or at the first sites of any
//! pass), so with `h = a * M` from [`Masked`](super::Masked) this op computes
//!
//! ```text
//! y = h U + s c + (1 - s) b      without delta and routes: y = h U + b, without a clean output
//!
//! gradients:  h: G U^T    U: h^T G    c: s G    b: sum over rows of (1 - s) G    d: r (c - b) . G
//! ```
//!
//! Only an adversary needs the gradient of `d`. This is one half of it; the other,
//! `-r a . (G U^T)`, is that of [`Masked`](super::Masked). Their sum is `r (x D^T) . G`, the
//! difference of two numbers that are nearly equal when the components add up to the weights: its
//! error is relative to one product of `W` and `x`, not to itself.

mod cpu;
mod cuda;

use crate::alike::{Alike, Of, Side};
use crate::cpu::shape::Shape;
use crate::derivation::{Derivation, SiteInputs};
use crate::op::{BuildError, Builder, Gradients, NodeView, Op, Result, listed, op, refuse};
use crate::ops::indices;
use crate::ops::{MatMul, RoutedMatMul, SumRows, row_chunks};
use crate::value::{DType, Type, Value};

/// `y = h U + s c + (1 - s) b`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SiteOutput {
    bias: bool,
    delta: bool,
    route: bool,
}

/// `s x`: the remaining share of the clean path, and the gradient of the clean output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Share(SiteOutput);

impl Share {
    /// `x` as the clean output, delta and route.
    pub(crate) fn inputs(&self, inputs: &[Value]) -> SiteInputs {
        self.0.path(inputs)
    }
}

/// `r (c - b) . G`: the gradient of the delta mask through the clean path.
#[derive(Debug, Clone, Copy, PartialEq)]
struct DeltaGrad(SiteOutput);

impl Builder {
    /// Output of a masked site: `h` f32 `[.., c]`, compacted if there are routes, and `u` f32
    /// `[c, o]` to f32 `[.., o]`. The gradient flows to `h`, `u`, the clean output, the bias and
    /// the delta.
    ///
    /// # Errors
    ///
    /// When there is a delta or a route and no clean output, or shapes do not fit.
    pub fn site_output(&mut self, h: Value, u: Value, with: &SiteInputs) -> Result<Value> {
        let mixes = with.delta.is_some() || with.route.is_some();
        if !mixes {
            return self.linear_io(h, u, with.bias);
        }
        let clean = with.clean.ok_or_else(|| {
            BuildError::new("site_output", "a delta or a route needs the clean output")
        })?;
        let op = SiteOutput {
            bias: with.bias.is_some(),
            delta: with.delta.is_some(),
            route: with.route.is_some(),
        };
        let mut inputs = vec![h, u, clean];
        inputs.extend(with.bias);
        inputs.extend(with.delta);
        inputs.extend(with.route);
        self.op1(op, &inputs)
    }

    /// `s x`, each row f32 `[.., k]` times the share that the site leaves to its clean path:
    /// `W (s x)` is `s (W x)`. The gradient flows to `x` and the delta.
    pub(crate) fn share(&mut self, x: Value, with: &SiteInputs) -> Result<Value> {
        let op = Share(SiteOutput {
            bias: false,
            delta: with.delta.is_some(),
            route: with.route.is_some(),
        });
        let inputs = [x].into_iter().chain(with.delta).chain(with.route);
        self.op1(op, &inputs.collect::<Vec<_>>())
    }
}

impl SiteOutput {
    /// The [`SiteInputs`] among the op's inputs.
    pub(crate) fn joined(&self, inputs: &[Value]) -> SiteInputs {
        self.path(&inputs[2..])
    }

    fn path(&self, inputs: &[Value]) -> SiteInputs {
        let [bias, delta, route] = self.after(1).map(|index| index.map(|at| inputs[at]));
        SiteInputs {
            clean: Some(inputs[0]),
            bias,
            delta,
            route,
        }
    }

    /// Indices of the inputs after `h, u, clean`: bias, delta, route.
    fn after(&self, first: usize) -> [Option<usize>; 3] {
        indices(first, [self.bias, self.delta, self.route])
    }
}

impl Op for SiteOutput {
    op! {
        name "site_output"; formats [Factor, Factor, Either, Full] => [Either];
        kernels(self) cpu::forward(self), cuda::value(self);
        packed_bytes(self, inputs) 4 * shape(inputs).packed([false; 2]);
    }

    fn alike(&self, inputs: &[&Type], outputs: &[&Type]) -> Vec<Alike> {
        let types = [inputs[0], inputs[1]];
        let mut alike = Alike::of_rows(shape(inputs), types, outputs[0], false);
        if let Some(columns) = alike.last_mut() {
            let clean_and_bias = 2..3 + usize::from(self.bias);
            let others = clean_and_bias.map(|index| (Of::Input(index), Side::Columns));
            columns.dimensions.extend(others);
            // In f32 it is not trimmed.
            if outputs[0].dtype != DType::Bf16 {
                alike.pop();
            }
        }
        alike
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let (h, u, clean) = (inputs[0], inputs[1], inputs[2]);
        let [bias, delta, route] = self.after(3);
        let rows = |index: Option<usize>| index.is_none_or(|index| inputs[index].len() == h.rows());
        let one = |index: Option<usize>| index.is_some_and(|index| inputs[index].dims == [1]);
        let fits = u.dims == [h.columns(), clean.columns()]
            && clean.rows() == h.rows()
            && bias.is_none_or(|bias| inputs[bias].dims == [clean.columns()]);
        if fits && (rows(delta) || one(delta)) && rows(route) {
            return Ok(vec![clean.clone()]);
        }
        refuse!(self, "{} do not fit {self:?}", listed(inputs))
    }

    fn derivation(&self, inputs: &[Value]) -> Option<Derivation> {
        Some(Derivation::Site {
            h: inputs[0],
            u: inputs[1],
            with: self.joined(inputs),
        })
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let (shape, stored) = (shape(inputs), [false; 2]);
        if self.route {
            4 * (shape.m + shape.m * shape.n + shape.most_scratch(stored))
        } else {
            4 * shape.scratch(stored)
        }
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (h, u, clean) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        let SiteInputs {
            bias, delta, route, ..
        } = self.joined(node.inputs);
        if let Some(route) = route {
            gradients.emit(RoutedMatMul::COMPACT_TRANSPOSED, &[g, u, route], &[h])?;
            gradients.emit(RoutedMatMul::SUMS_OF_COMPACTED, &[h, g, route], &[u])?;
        } else {
            gradients.emit(MatMul::stored(false, true), &[g, u], &[h])?;
            gradients.emit(MatMul::stored(true, false), &[h, g], &[u])?;
        }
        let operands = [g, clean].into_iter().chain(bias).chain(delta).chain(route);
        let operands: Vec<Value> = operands.collect();
        gradients.emit(DeltaGrad(*self), &operands, delta.as_slice())?;
        let inputs: Vec<Value> = [g].into_iter().chain(delta).chain(route).collect();
        let shares = Self {
            bias: false,
            ..*self
        };
        if let Some(bias) = bias.filter(|&bias| gradients.wants(bias)) {
            let b = gradients.builder();
            let dims = b.ty(bias).dims.clone();
            // Runs do not train such a bias: it is worth no kernel of its own.
            let s_g = b.op1(Share(shares), &inputs)?;
            let names = ["site_output_bias_grad"; 2];
            let own = b.elementwise(names, [g, s_g], |[g, s_g]| g - s_g)?;
            gradients.emit(SumRows { dims }, &[own], &[bias])?;
        }
        gradients.emit(Share(shares), &inputs, &[clean])
    }

    fn flops(&self, inputs: &[&Type]) -> u64 {
        let Shape { m, n, k } = shape(inputs);
        // For half of the rows, as in `RoutedMatMul`.
        (if self.route { 1 } else { 2 }) * (m * n * k) as u64
    }
}

fn shape(inputs: &[&Type]) -> Shape {
    Shape::of([inputs[0].rows(), inputs[1].columns(), inputs[1].rows()])
}

impl Op for Share {
    op! {
        name "site_share"; formats [Either, Full] => [Either]; accumulates;
        alike(self, _inputs, _outputs) Alike::columns([Of::Input(0), Of::Output(0)]);
        kernels(self) cpu::share_of_rows(&self.0), cuda::share_of_rows(&self.0);
        flops(self, inputs) inputs[0].len() as u64;
    }

    fn backward(&self, node: &NodeView<'_>, g: Value, gradients: &mut Gradients<'_>) -> Result<()> {
        let (x, others) = (node.inputs[0], &node.inputs[1..]);
        let [_, delta, _] = self.0.after(1);
        let operands: Vec<Value> = [g].into_iter().chain(node.inputs.iter().copied()).collect();
        let delta = delta.map(|at| node.inputs[at]);
        gradients.emit(DeltaGrad(self.0), &operands, delta.as_slice())?;
        let inputs: Vec<Value> = [g].iter().chain(others).copied().collect();
        gradients.emit(*self, &inputs, &[x])
    }
}

impl Op for DeltaGrad {
    op! {
        name "site_output_delta_grad"; formats [Either, Either, Full] => [Full]; accumulates;
        kernels(self) cpu::delta_grad(&self.0), cuda::delta_gradient(&self.0);
        scratch_bytes(self, inputs) 4 * row_chunks(inputs[0]);
        flops(self, inputs) 3 * inputs[0].len() as u64;
    }

    fn alike(&self, _inputs: &[&Type], _outputs: &[&Type]) -> Vec<Alike> {
        let gradient_clean_and_bias = 0..2 + usize::from(self.0.bias);
        Alike::columns(gradient_clean_and_bias.map(Of::Input))
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        let [_, delta, _] = self.0.after(2);
        let delta = delta.ok_or_else(|| BuildError::new(self.name(), "there is no delta"))?;
        Ok(vec![inputs[delta].clone()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::oracle::{Oracle, Sample, random};
    use crate::ops::{Mask, MaskValues};

    // Sums of 6 or fewer products of numbers below 10.
    const TOLERANCE: f32 = 4e-6;

    /// The reference's formula, with the weight delta formed, against the two ops.
    #[test]
    fn a_masked_site_agrees_with_the_formula_of_the_reference() {
        let (rows, d_in, c, d_out) = (4, 3, 6, 5);
        let route = Sample {
            dims: vec![rows],
            values: vec![1.0, 0.0, 1.0, 0.0],
        };
        let deltas = [&[rows][..], &[1]];
        let point = |delta: &[usize]| {
            [
                random(&[rows, d_in], 1),
                random(&[d_in, c], 2),
                random(&[c, d_out], 3),
                random(&[d_out, d_in], 4),
                random(&[d_out], 5),
                random(&[rows, c], 6),
                random(delta, 7),
                route.clone(),
            ]
        };
        for (dims, delta, routed) in [
            (deltas[0], true, true),
            (deltas[0], true, false),
            (deltas[1], true, true),
            (deltas[1], true, false),
            (deltas[0], false, true),
        ] {
            // Roundings on the way back to x: x, V, x V, masked activations, U, W, G, U G, its
            // mask, that V, its share of the clean output, and the sum.
            let oracle = Oracle::new(&point(dims)).roundings(12.0);
            let oracle = oracle.constant(3).constant(7);
            let oracle = if delta { oracle } else { oracle.constant(6) };
            oracle
                .ours(|b, v| {
                    let (delta, route) = (delta.then_some(v[6]), routed.then_some(v[7]));
                    let clean = b.linear_oi(v[0], v[3], Some(v[4]))?;
                    let a = match route {
                        Some(route) => b.routed_matmul(v[0], v[1], route)?,
                        None => b.matmul(v[0], v[1])?,
                    };
                    let masks = MaskValues {
                        mask: Mask::Importance,
                        importance: Some(v[5]),
                        given: None,
                        delta,
                        route,
                    };
                    let h = b.masked(a, &masks)?;
                    b.site_output(
                        h,
                        v[2],
                        &SiteInputs {
                            clean: Some(clean),
                            bias: Some(v[4]),
                            delta,
                            route,
                        },
                    )
                })
                .candle(|v| {
                    let [x, v_ic, u_co, w_oi, bias, m, d, r] = v else {
                        unreachable!("eight values")
                    };
                    let weight_delta = (w_oi - v_ic.matmul(u_co)?.t()?)?;
                    let mut inside = x.matmul(v_ic)?.mul(m)?.matmul(u_co)?;
                    if delta {
                        inside = (inside
                            + x.matmul(&weight_delta.t()?)?
                                .broadcast_mul(&d.unsqueeze(1)?)?)?;
                    }
                    if routed {
                        let r = r.unsqueeze(1)?;
                        let outside = x.matmul(&w_oi.t()?)?.broadcast_mul(&(1.0 - &r)?)?;
                        inside = (inside.broadcast_mul(&r)? + outside)?;
                    }
                    inside.broadcast_add(bias)
                })
                .agree(TOLERANCE);
        }
    }
}
