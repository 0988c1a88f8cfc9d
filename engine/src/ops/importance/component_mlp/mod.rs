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
//! computes it again, `gelu` and its slope together. The CPU computes it at a few activations and
//! interpolates, where that is exact but for rounding: see `chebyshev.rs`. So no GELUs are counted
//! for a roofline, and the flops are those of the formulas.

mod chebyshev;
mod cpu;
mod cuda;
mod tiling;
mod units;

use self::tiling::{LANES, Tiling};
use crate::cpu::pool::chunks;
use crate::op::{Builder, Gradients, NodeView, Op, Result, op, refuse};
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
        flops(self, inputs) 4 * (inputs[0].len() * inputs[1].columns()) as u64;
    }

    fn scratch_bytes(&self, inputs: &[&Type]) -> usize {
        let tiling = Tiling::new(inputs[0].columns(), inputs[1].columns());
        let (rows, ranges) = (inputs[0].rows(), 2 * tiling.groups() * LANES);
        let chunks = chunks(rows, tiling.chunk_rows(rows));
        4 * (tiling.len() + tiling.series_len() + chunks * ranges)
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
        gradients.emit(ComponentMlpGrad, &inputs, node.inputs)
    }
}

impl Op for ComponentMlpGrad {
    op! {
        name "component_mlp_grad"; formats [Either, Either, Full] => [Either, Full]; accumulates;
        kernels(self) cpu::backward(), cuda::gradient();
        flops(self, inputs) 11 * (inputs[1].len() * inputs[2].columns()) as u64;
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
        let chunks = chunks(rows, tiling.chunk_rows(rows));
        4 * ((2 + chunks) * tiling.len() + tiling.series_len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cpu::{Alone, Pool};
    use crate::ops::oracle::{Oracle, Sample, close, random};
    use crate::store::Store;

    fn point(rows: usize, c: usize, h: usize) -> [Sample; 5] {
        [
            random(&[rows, c], 1),
            random(&[c, 1, h], 2),
            random(&[c, h], 3),
            random(&[c, h, 1], 4),
            random(&[c, 1], 5),
        ]
    }

    fn networks(b: &mut Builder, v: &[Value]) -> Result<Value> {
        let [w1, b1, w2, b2] = [v[1], v[2], v[3], v[4]];
        b.component_mlp(v[0], &ComponentMlpWeights { w1, b1, w2, b2 })
    }

    #[test]
    fn networks_agree_with_candle() {
        for (rows, c, h) in [
            (3, 2, 5),
            (300, 3, 4),
            (1100, 1, 1),
            (70, 20, 2),
            (65, 48, 3),
            (2100, 16, 1),
            (2100, 20, 16),
        ] {
            Oracle::new(&point(rows, c, h))
                .ours(networks)
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

    /// `z`, the gradient of `a`, and those of the weights one after the other, for batches of so
    /// many rows; the sum over batches of the last.
    fn in_batches(point: &[Sample; 5], upstream: &Sample, rows: usize) -> [Vec<f32>; 3] {
        let c = point[0].dims[1];
        let mut found = [(); 3].map(|()| Vec::new());
        let batches = point[0].values.chunks(rows * c);
        for (a, upstream) in batches.zip(upstream.values.chunks(rows * c)) {
            let (mut b, mut store) = (Builder::new(), Store::new());
            let dims = [a.len() / c, c];
            let mut add = |dims: &[usize], values: &[f32]| {
                let slot = store.add(format!("{dims:?} {}", values[0]), dims, values.to_vec());
                b.persistent(&store, slot)
            };
            let mut values = vec![add(&dims, a)];
            values.extend(
                point[1..]
                    .iter()
                    .map(|weight| add(&weight.dims, &weight.values)),
            );
            let upstream = add(&dims, upstream);
            let z = networks(&mut b, &values).unwrap();
            let gradients = b.gradients_from(z, upstream, &values).unwrap();
            b.output("z", z);
            for (index, gradient) in gradients.into_iter().enumerate() {
                b.output(format!("{index}"), gradient.unwrap());
            }
            let mut executor = Alone::new(&b, Arc::new(Pool::single()));
            executor.run(&mut store);
            found[0].extend_from_slice(executor.output("z", &store));
            found[1].extend_from_slice(executor.output("0", &store));
            let names = ["1", "2", "3", "4"].into_iter();
            let weights: Vec<f32> = names
                .flat_map(|name| executor.output(name, &store).to_vec())
                .collect();
            found[2].resize(weights.len(), 0.0);
            found[2]
                .iter_mut()
                .zip(weights)
                .for_each(|(sum, x)| *sum += x);
        }
        found
    }

    // Batches of a few rows have no series, and their units are those that candle confirms above.
    #[test]
    fn series_and_units_agree() {
        for (what, change) in [
            ("normal numbers", None),
            ("an activation far away", Some((5, 1e4))),
            ("infinity", Some((7, f32::INFINITY))),
            ("NaN", Some((900, f32::NAN))),
        ] {
            for (c, spread, shift) in [
                (3, 0.3_f32, 0.0),
                (20, 0.5, 1.0),
                (16, 0.0, 2.0),
                (1, 1e-6, 1.0),
            ] {
                let mut point = point(1101, c, 16);
                for a in &mut point[0].values {
                    *a = spread.mul_add(*a, shift);
                }
                if let Some((row, number)) = change {
                    point[0].values[row * c] = number;
                }
                let upstream = random(&[1101, c], 6);
                let [all, few] = [1101, 20].map(|rows| in_batches(&point, &upstream, rows));
                let what = format!("{what}, {c} components");
                if change.is_none() {
                    assert!(all[0] != few[0], "{what}: no series");
                }
                for (all, few) in all.iter().zip(&few) {
                    let numbers = all.iter().zip(few).filter(|(all, few)| {
                        assert_eq!(all.is_finite(), few.is_finite(), "{what}");
                        few.is_finite()
                    });
                    let (all, few): (Vec<f32>, Vec<f32>) = numbers.unzip();
                    // Sums of 1101 terms, in another order.
                    close(&what, &all, &few, 1e-5);
                }
            }
        }
    }
}
