use spd_draws::{LANES, uniform_lanes};

use super::{Gates, ImportanceGates, ImportanceGatesGrad, LogitNoise};
use crate::cpu::math::{clamp, logistic, pow, vectorised};
use crate::cpu::{Frame, PerChunk, Rows};
use crate::ops::draws::row_number;
use crate::ops::grain_rows;
use crate::ops::sum_rows::cpu::add_partials;

/// Slope of the leaky sides.
const ALPHA: f32 = 0.01;
/// Keeps the power and its slope finite at zero.
const EPS: f32 = 1e-12;
/// Steepness of the smooth hard sigmoid.
const BETA: f32 = 10.0;
/// Columns that are handled at once.
const BLOCK: usize = 4 * LANES;

pub(super) fn forward(op: &ImportanceGates, frame: &mut Frame<'_>) {
    let (g, _) = frame.output(0);
    let (sums, _) = frame.output(1);
    let partials = frame.scratch();
    let noise = Noise::new(op, frame);
    let z = frame.input(0);
    let c = frame.ty(0).columns();
    let p = op.exponent.map(|scalar| frame.scalar(scalar));
    let parts = (Rows(g, c), PerChunk(&mut *partials, c));
    frame
        .pool
        .run(z.len() / c, grain_rows(c), parts, |range, (g, sums)| {
            vectorised(
                #[inline(always)]
                || {
                    sums.0.fill(0.0);
                    for (row, g) in range.zip(g.0.chunks_exact_mut(c)) {
                        let z = &z[row * c..][..c];
                        for start in (0..c).step_by(BLOCK) {
                            let end = c.min(start + BLOCK);
                            let (g, z) = (&mut g[start..end], &z[start..end]);
                            match noise.block(row, start, g.len()) {
                                None => g
                                    .iter_mut()
                                    .zip(z)
                                    .for_each(|(g, z)| *g = lower(op.gates, *z)),
                                Some(u) => {
                                    for i in 0..g.len() {
                                        g[i] = lower(op.gates, noisy(z[i], u[i]));
                                    }
                                }
                            }
                            if let Some(p) = p {
                                add_powers(op.gates, p, z, &mut sums.0[start..end]);
                            }
                        }
                    }
                },
            );
        });
    add_partials(sums, false, partials);
}

/// Adds `(upper(z) + eps)^p`. The exponents 1 and 2 need no logarithm.
#[inline(always)]
fn add_powers(gates: Gates, p: f32, z: &[f32], sums: &mut [f32]) {
    let terms = sums.iter_mut().zip(z);
    if p.to_bits() == 1f32.to_bits() {
        for (sum, z) in terms {
            *sum += penalised(gates, *z).0;
        }
    } else if p.to_bits() == 2f32.to_bits() {
        for (sum, z) in terms {
            let x = penalised(gates, *z).0;
            *sum = x.mul_add(x, *sum);
        }
    } else {
        for (sum, z) in terms {
            *sum += pow(penalised(gates, *z).0, p);
        }
    }
}

pub(super) fn backward(op: &ImportanceGatesGrad, frame: &mut Frame<'_>) {
    let (dz, add) = frame.output(0);
    let gates = op.forward.gates;
    let noise = Noise::new(&op.forward, frame);
    let z = frame.input(0);
    let c = frame.ty(0).columns();
    let first = op.forward.inputs();
    let of_importance = op.of_importance.then(|| frame.input(first));
    let of_sums = op
        .of_sums
        .then(|| frame.input(first + usize::from(op.of_importance)));
    let p = op
        .forward
        .exponent
        .map_or(1.0, |scalar| frame.scalar(scalar));
    frame
        .pool
        .run(z.len() / c, grain_rows(c), Rows(dz, c), |range, dz| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, dz) in range.zip(dz.0.chunks_exact_mut(c)) {
                        if !add {
                            dz.fill(0.0);
                        }
                        for start in (0..c).step_by(BLOCK) {
                            let end = c.min(start + BLOCK);
                            let at = row * c + start..row * c + end;
                            let (dz, z) = (&mut dz[start..end], &z[at.clone()]);
                            if let Some(of_importance) = of_importance {
                                let gradient = &of_importance[at];
                                match noise.block(row, start, dz.len()) {
                                    None => {
                                        for i in 0..dz.len() {
                                            dz[i] += lower_grad(gates, z[i], gradient[i]);
                                        }
                                    }
                                    Some(u) => {
                                        for i in 0..dz.len() {
                                            dz[i] += 1.05
                                                * lower_grad(gates, noisy(z[i], u[i]), gradient[i]);
                                        }
                                    }
                                }
                            }
                            if let Some(of_sums) = of_sums {
                                add_power_slopes(gates, p, z, &of_sums[start..end], dz);
                            }
                        }
                    }
                },
            );
        });
}

/// Adds `gradient p (upper(z) + eps)^(p - 1) upper'(z)`.
#[inline(always)]
fn add_power_slopes(gates: Gates, p: f32, z: &[f32], gradient: &[f32], dz: &mut [f32]) {
    if p.to_bits() == 1f32.to_bits() {
        for i in 0..dz.len() {
            dz[i] += gradient[i] * penalised(gates, z[i]).1;
        }
    } else if p.to_bits() == 2f32.to_bits() {
        for i in 0..dz.len() {
            let (x, slope) = penalised(gates, z[i]);
            dz[i] += gradient[i] * (2.0 * x) * slope;
        }
    } else {
        for i in 0..dz.len() {
            let (x, slope) = penalised(gates, z[i]);
            dz[i] += gradient[i] * (p * pow(x, p - 1.0)) * slope;
        }
    }
}

/// The noise of a block of logits.
struct Noise<'a> {
    given: Option<&'a [f32]>,
    drawn: Option<u32>,
    c: usize,
    seed: u64,
    step: u32,
    first_row: u32,
}

impl<'a> Noise<'a> {
    fn new(op: &ImportanceGates, frame: &Frame<'a>) -> Self {
        Self {
            given: (op.noise == LogitNoise::Given).then(|| frame.input(1)),
            drawn: match op.noise {
                LogitNoise::Drawn(stream) => Some(stream.word()),
                _ => None,
            },
            c: frame.ty(0).columns(),
            seed: frame.parameters.seed,
            step: frame.parameters.step,
            first_row: frame.parameters.first_row,
        }
    }

    #[inline(always)]
    fn block(&self, row: usize, start: usize, len: usize) -> Option<[f32; BLOCK]> {
        let mut u = [0.0; BLOCK];
        if let Some(word) = self.drawn {
            let row = self.first_row + row_number(row);
            uniform_lanes(
                self.seed,
                row_number(start / 4),
                row,
                word,
                self.step,
                &mut u,
            );
            return Some(u);
        }
        self.given.map(|given| {
            u[..len].copy_from_slice(&given[row * self.c + start..][..len]);
            u
        })
    }
}

#[inline(always)]
fn noisy(z: f32, u: f32) -> f32 {
    1.05f32.mul_add(z, -0.05 * u)
}

#[inline(always)]
fn lower(gates: Gates, z: f32) -> f32 {
    match gates {
        Gates::LeakyHard => clamp(z, 0.0, 1.0),
        _ => upper(gates, z),
    }
}

#[inline(always)]
fn lower_grad(gates: Gates, z: f32, gradient: f32) -> f32 {
    match gates {
        Gates::LeakyHard => {
            let below = if gradient < 0.0 {
                ALPHA * gradient
            } else {
                0.0
            };
            let inside = if z <= 1.0 { gradient } else { 0.0 };
            if z <= 0.0 { below } else { inside }
        }
        _ => gradient * upper_slope(gates, z),
    }
}

/// What the penalty raises to a power. The smooth sigmoid dips below zero by 0.003, where a power has no value: it
/// counts as zero there, with slope zero.
#[inline(always)]
fn penalised(gates: Gates, z: f32) -> (f32, f32) {
    let (y, slope) = (upper(gates, z), upper_slope(gates, z));
    if y < 0.0 {
        (EPS, 0.0)
    } else {
        (y + EPS, slope)
    }
}

#[inline(always)]
fn upper(gates: Gates, z: f32) -> f32 {
    match gates {
        Gates::LeakyHard | Gates::UpperLeakyHard => {
            let inside = clamp(z, 0.0, 1.0);
            if z > 1.0 {
                ALPHA.mul_add(z - 1.0, 1.0)
            } else {
                inside
            }
        }
        Gates::Hard => clamp(z, 0.0, 1.0),
        Gates::Normal => logistic(z),
        Gates::SwishHard => {
            let (rise, fall) = (logistic(BETA * z), logistic(BETA * (1.0 - z)));
            1.0 - z + z * rise + (z - 1.0) * fall
        }
    }
}

#[inline(always)]
fn upper_slope(gates: Gates, z: f32) -> f32 {
    let above = match gates {
        Gates::LeakyHard | Gates::UpperLeakyHard => ALPHA,
        Gates::Hard => 0.0,
        Gates::Normal => {
            let y = logistic(z);
            return y * (1.0 - y);
        }
        Gates::SwishHard => {
            let (rise, fall) = (logistic(BETA * z), logistic(BETA * (1.0 - z)));
            return rise + BETA * z * rise * (1.0 - rise) + fall
                - BETA * (z - 1.0) * fall * (1.0 - fall)
                - 1.0;
        }
    };
    let outside = if z > 1.0 { above } else { 0.0 };
    if (0.0..=1.0).contains(&z) {
        1.0
    } else {
        outside
    }
}
