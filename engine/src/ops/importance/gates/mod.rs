//! Importances `g` from importance logits `z`, with the sums of a sparsity penalty and L0 in the
//! same pass.
//!
//! Two sigmoids read the logits: the lower one gives the masks, the upper one the penalty.
//!
//! ```text
//! g   = lower(z')      z' = z, or 1.05 z - 0.05 u with u uniform (binomial sampling)
//! s_c = sum over rows of psi(upper(z))
//! l0  = mean over rows of #{c: g_c > alive}          no gradient
//! ```
//!
//! | [`Penalty`] | `psi(x)`                              | `psi'(x)`                         |
//! |-------------|---------------------------------------|-----------------------------------|
//! | `Power`     | `(x + eps)^p`, eps = 1e-12            | `p (x + eps)^(p - 1)`             |
//! | `Smooth`    | `n x^2 / (x^2 + gamma^2)`             | `2 n x gamma^2 / (x^2 + gamma^2)^2` |
//!
//! `p` or `gamma` is a step scalar. The smooth one counts what is well above `gamma`: it is 0 at 0,
//! half of `n` at `gamma`, and nears `n`, which is 1, or `1 + gamma^2` for `psi(1) = 1`. Its slope
//! is at most `0.65 n / gamma`. In `u = x / gamma` both are `n u^2 / (1 + u^2)` and
//! `2 n / gamma u / (1 + u^2)^2`, which neither overflow nor divide zero by zero.
//!
//! | [`Gates`]        | lower                                 | upper                             |
//! |------------------|---------------------------------------|-----------------------------------|
//! | `LeakyHard`      | `clamp(z, 0, 1)`, gradient below | `clamp`, `1 + alpha (z-1)` above 1 |
//! | `Hard`           | `clamp(z, 0, 1)`                      | the same                          |
//! | `UpperLeakyHard` | as the upper of `LeakyHard`           | the same                          |
//! | `Normal`         | `l(z) = 1 / (1 + e^-z)`               | the same                          |
//! | `SwishHard`      | `1 - z + z l(10 z) + (z - 1) l(10 (1 - z))` | the same                    |
//!
//! The backward rule of the lower leaky sigmoid depends on the sign of the incoming gradient `G`: a
//! dead component may only be pushed up.
//!
//! ```text
//! z <= 0: alpha G if G < 0, else 0      0 < z <= 1: G      z > 1: 0      (alpha = 0.01)
//! ```
//!
//! The clamps have slope 1 at both of their borders. The gradient of `s_c` with respect to `z` is
//! `psi'(upper(z)) upper'(z)`. Arithmetic is f32: near zero the slope of a power reaches 1e8. A NaN
//! logit gives NaN as importance, sum, and gradient.
//!
//! Source: `clamp` conventions and the sign rule are those of the reference implementation; the SPD
//! paper's lower sigmoid is `0.01 z` below zero instead.

mod cpu;
pub(crate) mod cuda;

use spd_draws::Stream;

use crate::op::{Builder, ExpensiveOps, Gradients, NodeView, Op, Result, op, refuse};
use crate::ops::row_chunks;
use crate::ops::site::draws::drawn;
use crate::precision::Format::{Either, Full};
use crate::value::{StepScalar, Type, Value};

/// The pair of sigmoids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gates {
    /// Lower-leaky for masks, upper-leaky for the penalty.
    LeakyHard,
    /// `clamp(z, 0, 1)`.
    Hard,
    /// Upper-leaky for both.
    UpperLeakyHard,
    /// Logistic.
    Normal,
    /// A smooth hard sigmoid made of swishes.
    SwishHard,
}

/// Noise on the logits of the lower sigmoid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitNoise {
    /// None.
    None,
    /// `1.05 z - 0.05 u`, `u` drawn.
    Drawn(Stream),
    /// `1.05 z - 0.05 u`, `u` an input.
    Given,
}

/// A function of the upper sigmoid that is summed over rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Penalty {
    /// A power; its parameter is the exponent.
    Power,
    /// A count of what is above its parameter, `gamma`, made smooth.
    Smooth {
        /// Whether it is scaled to be 1 at 1.
        normalized: bool,
    },
}

/// Importances, penalty sums and L0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImportanceGates {
    /// The pair of sigmoids.
    pub gates: Gates,
    /// Noise on the logits.
    pub noise: LogitNoise,
    /// The penalty and its parameter; without it there are no sums.
    pub penalty: Option<(Penalty, StepScalar)>,
    /// A component is active if its importance exceeds this.
    pub alive: f32,
}

/// Results of [`ImportanceGates`].
#[derive(Debug, Clone, Copy)]
pub struct Importances {
    /// Importances, f32 `[.., c]`.
    pub importance: Value,
    /// Sums of the penalty over rows, f32 `[c]`; zeros without one.
    pub penalty_sums: Value,
    /// L0: the number of active components of a row, on average; a scalar without a gradient.
    pub active: Value,
}

/// Gradient of [`ImportanceGates`] with respect to `z`. Inputs: `z`, the given noise, then the
/// gradients of the results that have one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ImportanceGatesGrad {
    pub(crate) forward: ImportanceGates,
    pub(crate) of_importance: bool,
    pub(crate) of_sums: bool,
}

impl Builder {
    /// Importances from logits f32 `[.., c]`; the gradient flows to the logits.
    ///
    /// # Errors
    ///
    /// When given noise is missing or has another shape.
    pub fn importance_gates(
        &mut self,
        op: ImportanceGates,
        logits: Value,
        noise: Option<Value>,
    ) -> Result<Importances> {
        let mut inputs = vec![logits];
        inputs.extend(noise.filter(|_| op.is_given()));
        let outputs = self.op(op, &inputs)?;
        Ok(Importances {
            importance: outputs[0],
            penalty_sums: outputs[1],
            active: outputs[2],
        })
    }
}

impl ImportanceGates {
    /// Whether the noise is an input.
    fn is_given(&self) -> bool {
        self.noise == LogitNoise::Given
    }

    fn inputs(&self) -> usize {
        1 + usize::from(self.is_given())
    }
}

impl Op for ImportanceGates {
    op! {
        name "importance_gates"; formats [Either, Full] => [Either, Full];
        kernels(self) cpu::forward(self), cuda::value(self);
        scratch_bytes(self, inputs) 4 * row_chunks(inputs[0]) * (inputs[0].columns() + 1);
        flops(self, inputs) 4 * inputs[0].len() as u64;
        expensive_ops(self, inputs) match self.noise {
            LogitNoise::Drawn(_) => drawn(inputs[0].len()),
            LogitNoise::None | LogitNoise::Given => ExpensiveOps::default(),
        };
    }

    fn outputs(&self, inputs: &[&Type]) -> Result<Vec<Type>> {
        if inputs.len() != self.inputs() || inputs.iter().any(|input| *input != inputs[0]) {
            return refuse!(
                self,
                "{:?} needs logits, and given noise of their shape",
                self.noise
            );
        }
        let columns = Type::f32(&[inputs[0].columns()]);
        Ok(vec![inputs[0].clone(), columns, Type::scalar()])
    }

    fn gradient(&self, node: &NodeView<'_>, gradients: &mut Gradients<'_>) -> Result<()> {
        let of = [gradients.of(node.outputs[0]), gradients.of(node.outputs[1])];
        let of_sums = of[1].filter(|_| self.penalty.is_some());
        let op = ImportanceGatesGrad {
            forward: *self,
            of_importance: of[0].is_some(),
            of_sums: of_sums.is_some(),
        };
        let inputs: Vec<Value> = node
            .inputs
            .iter()
            .copied()
            .chain(of[0])
            .chain(of_sums)
            .collect();
        gradients.emit(op, &inputs, &[node.inputs[0]])
    }
}

impl Op for ImportanceGatesGrad {
    op! {
        name "importance_gates_grad"; accumulates;
        // Logits, given noise, and gradients; that of sums is a vector, and always f32.
        formats(self) match self.forward.is_given() {
            true => [&[Either, Full, Either], &[Either]],
            false => [&[Either], &[Either]],
        };
        kernels(self) cpu::backward(self), cuda::gradient(self);
        flops(self, inputs) 8 * inputs[0].len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Store;
    use crate::cpu::{Alone, Pool};
    use crate::cuda::program::Program;
    use crate::cuda::tests::{agree, replay};
    use crate::ops::oracle::{Sample, close, random};
    use crate::step_parameters::StepParameters;

    /// Importances, sums and `dz` at `z`, for gradients `gg` of the importances and `gs` of the
    /// sums.
    fn run(
        op: impl Fn(&mut Builder) -> ImportanceGates,
        p: f32,
        z: &Sample,
        gg: &[f32],
        gs: &[f32],
    ) -> [Vec<f32>; 3] {
        let mut store = Store::new();
        let slot = store.add("z", &z.dims, z.values.clone());
        let mut b = Builder::new();
        let value = b.persistent(&store, slot);
        let op = op(&mut b);
        let found = b.importance_gates(op, value, None).unwrap();
        let (g, s) = (found.importance, found.penalty_sums);
        let gg_value = b.input("gg", &Type::f32(&z.dims)).unwrap();
        let gs_value = b.input("gs", &Type::f32(&z.dims[1..])).unwrap();
        let grad = ImportanceGatesGrad {
            forward: op,
            of_importance: true,
            of_sums: true,
        };
        let dz = b.op1(grad, &[value, gg_value, gs_value]).unwrap();
        for (name, value) in [("g", g), ("s", s), ("dz", dz)] {
            b.output(name, value);
        }
        let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
        executor.input("gg").copy_from_slice(gg);
        executor.input("gs").copy_from_slice(gs);
        executor.set_scalar("p", p);
        executor.run(&mut store);
        ["g", "s", "dz"].map(|name| executor.output(name, &store).to_vec())
    }

    fn gates(gates: Gates) -> impl Fn(&mut Builder) -> ImportanceGates {
        move |b| ImportanceGates {
            gates,
            noise: LogitNoise::None,
            penalty: Some((Penalty::Power, b.step_scalar("p"))),
            alive: 0.0,
        }
    }

    // By hand from the rules above.
    #[test]
    fn the_leaky_pair_is_exact_at_and_between_its_borders() {
        let z = Sample {
            dims: vec![1, 7],
            values: vec![-1.0, -1.0, 0.0, 0.5, 1.0, 2.0, 2.0],
        };
        let gg = [-3.0, 3.0, 3.0, 3.0, 3.0, 3.0, -3.0];
        let [g, s, dz] = run(gates(Gates::LeakyHard), 1.0, &z, &gg, &[0.0; 7]);
        assert_eq!(g, [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]);
        close("sums", &s, &[0.0, 0.0, 0.0, 0.5, 1.0, 1.01, 1.01], 1e-6);
        assert_eq!(dz, [-0.03, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0]);
        // The penalty alone: slope 0 below zero, 1 on [0, 1], alpha above.
        let [_, _, dz] = run(gates(Gates::LeakyHard), 1.0, &z, &[0.0; 7], &[2.0; 7]);
        assert_eq!(dz, [0.0, 0.0, 2.0, 2.0, 2.0, 0.02, 0.02]);
        let [_, s, dz] = run(gates(Gates::LeakyHard), 2.0, &z, &[0.0; 7], &[1.0; 7]);
        close(
            "squares",
            &s,
            &[0.0, 0.0, 0.0, 0.25, 1.0, 1.0201, 1.0201],
            1e-6,
        );
        close(
            "the slopes",
            &dz,
            &[0.0, 0.0, 0.0, 1.0, 2.0, 0.0202, 0.0202],
            1e-6,
        );
    }

    #[test]
    fn every_other_pair_agrees_with_finite_differences() {
        let z = random(&[40, 3], 5);
        let near = |z: f32| z.abs().min((z - 1.0).abs()) < 2e-3;
        let (gg, gs) = (random(&[40, 3], 6).values, [0.3, -0.2, 0.7]);
        for kind in [
            Gates::Hard,
            Gates::UpperLeakyHard,
            Gates::Normal,
            Gates::SwishHard,
        ] {
            let [_, _, dz] = run(gates(kind), 1.7, &z, &gg, &gs);
            let loss = |z: &Sample| -> Vec<f64> {
                let [g, ..] = run(gates(kind), 1.7, z, &gg, &gs);
                g.iter()
                    .zip(&gg)
                    .enumerate()
                    .map(|(i, (&g, &gg))| {
                        // The non-leaky pairs use one function for both.
                        let penalty =
                            (f64::from(g).max(0.0) + 1e-12).powf(1.7) * f64::from(gs[i % 3]);
                        f64::from(g) * f64::from(gg) + penalty
                    })
                    .collect()
            };
            let h = 1e-3;
            let moved = |by: f32| Sample {
                dims: z.dims.clone(),
                values: z.values.iter().map(|z| z + by).collect(),
            };
            let (above, below) = (loss(&moved(h)), loss(&moved(-h)));
            for (i, &z) in z.values.iter().enumerate().filter(|(_, z)| !near(**z)) {
                let difference = (above[i] - below[i]) / f64::from(2.0 * h);
                // Rounding of f32 values below 2, over 2h; and h^2 times the third derivative.
                assert!(
                    (difference - f64::from(dz[i])).abs() < 1e-3 + 2e-3 * difference.abs(),
                    "{kind:?} at {z}: {difference} {}",
                    dz[i]
                );
            }
        }
    }

    #[test]
    fn swish_pair_has_its_known_values() {
        // By hand: symmetric about (1/2, 1/2); at 0: (-1) l(10) + 1 = 4.54e-5.
        let z = Sample {
            dims: vec![1, 3],
            values: vec![0.0, 0.5, 1.0],
        };
        let [g, ..] = run(gates(Gates::SwishHard), 1.0, &z, &[0.0; 3], &[0.0; 3]);
        close("swish", &g, &[4.54e-5, 0.5, 1.0 - 4.54e-5], 1e-6);
    }

    #[test]
    fn small_exponents_keep_their_slope_near_zero() {
        let z = Sample {
            dims: vec![1, 3],
            values: vec![1e-9, 1e-3, -1.0],
        };
        let [_, s, dz] = run(gates(Gates::LeakyHard), 0.3, &z, &[0.0; 3], &[1.0; 3]);
        let exact = |z: f64| (z + 1e-12f64).powf(0.3);
        for (s, z) in s.iter().zip([1e-9, 1e-3, 0.0]) {
            assert!((f64::from(*s) / exact(z) - 1.0).abs() < 5e-6, "{s} {z}");
        }
        for (dz, z) in dz.iter().zip([1e-9, 1e-3]) {
            let slope = 0.3 * (z + 1e-12f64).powf(-0.7);
            assert!((f64::from(*dz) / slope - 1.0).abs() < 5e-6, "{dz} {slope}");
        }
        assert_eq!(dz[2].to_bits(), 0f32.to_bits());
    }

    // The bound of `power` in `kernel.cu`, at the extremes of a GPU's instructions: their results
    // are off by all that they may be, in either direction.
    #[test]
    fn a_power_is_as_close_as_a_gpu_promises() {
        let unit = 2f64.powi(-22);
        for p in [-0.99f32, -0.7, -0.1, 0.1, 0.3, 0.7, 0.9, 1.5, 4.0] {
            for x in [
                1e-12f32, 1e-9, 1e-6, 1e-3, 0.1, 0.49, 0.51, 0.9, 0.999, 1.0, 1.01, 3.0,
            ] {
                let log = f64::from(x).log2();
                let p = f64::from(p);
                let size = log.abs();
                let bound =
                    std::f64::consts::LN_2 * p.abs() * (unit * size.max(1.0) + unit / 4.0 * size)
                        + unit;
                for sign in [-1.0, 1.0] {
                    let found = log + sign * unit * size.max(1.0);
                    let product =
                        p * found * (1.0 + sign * (p * found).signum() * p.signum() * unit / 4.0);
                    let power = product.exp2() * (1.0 + sign * p.signum() * unit);
                    let off = (power / f64::from(x).powf(p) - 1.0).abs();
                    // The second order of the bound.
                    assert!(
                        off <= bound * (1.0 + 2.0 * bound),
                        "{x}^{p}: {off:e} {bound:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_smooth_penalty_has_the_values_and_slopes_of_its_formula() {
        let z = Sample {
            dims: vec![1, 9],
            values: vec![-1.0, 0.0, 1e-4, 0.01, 0.2, 0.5, 1.0, 1.5, 200.0],
        };
        for (gamma, normalized) in [(0.5, false), (0.5, true), (1.0, true), (0.01, false)] {
            let op = |b: &mut Builder| ImportanceGates {
                penalty: Some((Penalty::Smooth { normalized }, b.step_scalar("p"))),
                ..gates(Gates::LeakyHard)(b)
            };
            let [_, s, dz] = run(op, gamma, &z, &[0.0; 9], &[1.0; 9]);
            let square = f64::from(gamma).powi(2);
            let n = if normalized { 1.0 + square } else { 1.0 };
            for ((s, dz), z) in s.iter().zip(dz).zip(&z.values) {
                let z = f64::from(*z);
                let (x, steepness) = match z {
                    z if z < 0.0 => (0.0, 0.0),
                    z if z > 1.0 => (1.0 + 0.01 * (z - 1.0), 0.01),
                    z => (z, 1.0),
                };
                let psi = n * x * x / (x * x + square);
                let slope = 2.0 * n * x * square / (x * x + square).powi(2) * steepness;
                assert!((f64::from(*s) - psi).abs() <= 5e-7 * psi, "{s} {psi}");
                assert!(
                    (f64::from(dz) - slope).abs() <= 1e-6 * slope,
                    "{dz} {slope}"
                );
            }
        }
    }

    #[test]
    fn noise_changes_only_the_lower_sigmoid() {
        let z = random(&[6, 5], 1);
        let mut store = Store::new();
        let slot = store.add("z", &z.dims, z.values.clone());
        let mut b = Builder::new();
        let value = b.persistent(&store, slot);
        let u = b.input("u", &Type::f32(&z.dims)).unwrap();
        let penalty = Some((Penalty::Power, b.step_scalar("p")));
        let noisy = ImportanceGates {
            gates: Gates::LeakyHard,
            noise: LogitNoise::Given,
            penalty,
            alive: 0.5,
        };
        let quiet = ImportanceGates {
            noise: LogitNoise::None,
            ..noisy
        };
        let moved = b.importance_gates(noisy, value, Some(u)).unwrap();
        let plain = b.importance_gates(quiet, value, None).unwrap();
        b.output("g", moved.importance);
        b.output("s", moved.penalty_sums);
        b.output("plain", plain.penalty_sums);
        b.output("active", moved.active);
        let mut executor = Alone::new(&b, Arc::new(Pool::single()));
        executor.set_scalar("p", 1.0);
        executor.input("u").fill(0.5);
        executor.run(&mut store);
        let expected: Vec<f32> = z
            .values
            .iter()
            .map(|z| (1.05 * z - 0.025).clamp(0.0, 1.0))
            .collect();
        close("importances", executor.output("g", &store), &expected, 1e-6);
        let active = expected.iter().filter(|g| **g > 0.5).count();
        // The mean over 6 rows.
        close(
            "active",
            executor.output("active", &store),
            &[active as f32 / 6.0],
            1e-6,
        );
        assert_eq!(
            executor.output("s", &store),
            executor.output("plain", &store)
        );
    }

    #[test]
    fn a_nan_logit_gives_nan_values_and_gradients() {
        let values = vec![-1.0, f32::NAN, 0.5, 2.0];
        for kind in [
            Gates::LeakyHard,
            Gates::Hard,
            Gates::UpperLeakyHard,
            Gates::Normal,
            Gates::SwishHard,
        ] {
            let (mut b, mut store) = (Builder::new(), Store::new());
            let z = store.add("z", &[1, 4], values.clone());
            let gradients = [-3.0, 0.0, 3.0].map(|gradient| {
                let slot = store.add(format!("{gradient}"), &[1, 4], vec![gradient; 4]);
                b.persistent(&store, slot)
            });
            let ones = store.add("ones", &[4], vec![1.0; 4]);
            let [z, ones] = [z, ones].map(|slot| b.persistent(&store, slot));
            let mut parameters = StepParameters::default();
            let smooth = Penalty::Smooth { normalized: true };
            let powers = [0.0, 0.3, 1.0, 1.7, 2.0].map(|p| (Penalty::Power, p));
            for (penalty, p) in powers.into_iter().chain([(smooth, 0.1)]) {
                let forward = ImportanceGates {
                    gates: kind,
                    noise: LogitNoise::None,
                    penalty: Some((penalty, b.step_scalar(&p.to_string()))),
                    alive: 0.0,
                };
                parameters.scalars.push(p);
                let found = b.importance_gates(forward, z, None).unwrap();
                b.output(format!("importance {p}"), found.importance);
                b.output(format!("sums {p}"), found.penalty_sums);
                let grad = |of_sums: bool| ImportanceGatesGrad {
                    forward,
                    of_importance: !of_sums,
                    of_sums,
                };
                for (index, gradient) in gradients.into_iter().enumerate() {
                    let dz = b.op1(grad(false), &[z, gradient]).unwrap();
                    b.output(format!("gradient {p} {index}"), dz);
                }
                let dz = b.op1(grad(true), &[z, ones]).unwrap();
                b.output(format!("gradient of sums {p}"), dz);
            }
            let mut executor = Alone::new(&b, Arc::new(Pool::single()));
            executor.parameters = parameters.clone();
            executor.run(&mut store);
            let names: Vec<String> = executor.output_names().map(str::to_owned).collect();
            let mut all: Vec<(String, Vec<f32>)> = names
                .into_iter()
                .map(|name| {
                    (
                        format!("{name} on the CPU"),
                        executor.output(&name, &store).to_vec(),
                    )
                })
                .collect();
            if let Some((device, found)) = replay(Program::new(&b), &store, &[], &parameters) {
                let outputs = found.into_iter().take(all.len());
                all.extend(outputs.map(|(name, values)| (format!("{name} {device}"), values)));
            }
            for (name, found) in all {
                let nan = found.iter().map(|x| x.is_nan()).collect::<Vec<_>>();
                assert_eq!(
                    nan,
                    [false, true, false, false],
                    "{kind:?} {name}: {found:?}"
                );
            }
        }
    }

    // Several blocks side by side and many stretches of rows, the last of each shorter. Sums of 600
    // powers below 1.1 in another order, whose terms a GPU computes within 1e-5.
    #[test]
    fn a_device_agrees_on_importances_sums_and_gradients() {
        for columns in [300, 301] {
            let dims = [599, columns];
            let mut store = Store::new();
            let mut kept = |name: &str, dims: &[usize], seed| {
                let values = random(dims, seed).values;
                store.add(name, dims, values)
            };
            let slots = [
                kept("z", &dims, 1),
                kept("gg", &dims, 2),
                kept("gs", &dims[1..], 3),
            ];
            let mut b = Builder::new();
            let [z, gg, gs] = slots.map(|slot| b.persistent(&store, slot));
            let mut parameters = StepParameters::default();
            for (kind, p) in [
                (Gates::LeakyHard, 0.3),
                (Gates::SwishHard, 1.7),
                (Gates::Normal, 2.0),
            ] {
                let forward = ImportanceGates {
                    gates: kind,
                    noise: LogitNoise::None,
                    penalty: Some((Penalty::Power, b.step_scalar(&p.to_string()))),
                    alive: 0.1,
                };
                parameters.scalars.push(p);
                let found = b.importance_gates(forward, z, None).unwrap();
                let grad = ImportanceGatesGrad {
                    forward,
                    of_importance: true,
                    of_sums: true,
                };
                let dz = b.op1(grad, &[z, gg, gs]).unwrap();
                for (name, value) in [
                    ("importance", found.importance),
                    ("sums", found.penalty_sums),
                    ("active", found.active),
                    ("dz", dz),
                ] {
                    b.output(format!("{name} {p}"), value);
                }
            }
            agree(&b, &store, &[], &parameters, 1e-5);
        }
    }

    // By hand: a row longer than a tile, then rows that share one.
    #[test]
    fn sums_and_counts_include_every_element_once() {
        for (rows, c) in [(3, 2500), (700, 3)] {
            let mut store = Store::new();
            let values = (0..rows * c).map(|i| if i % c == 1 { 0.5 } else { -1.0 });
            let slot = store.add("z", &[rows, c], values.collect());
            let mut b = Builder::new();
            let value = b.persistent(&store, slot);
            let op = gates(Gates::LeakyHard)(&mut b);
            let found = b.importance_gates(op, value, None).unwrap();
            b.output("sums", found.penalty_sums);
            b.output("active", found.active);
            let mut executor = Alone::new(&b, Arc::new(Pool::new(2).unwrap()));
            executor.set_scalar("p", 2.0);
            executor.run(&mut store);
            let mut expected = vec![0.0; c];
            expected[1] = 0.25 * rows as f32;
            close("sums", executor.output("sums", &store), &expected, 1e-6);
            assert_eq!(executor.output("active", &store), [1.0]);
        }
    }
}
