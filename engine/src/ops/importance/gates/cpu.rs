//! Elements are read in tiles of whole rows (or of parts of a long one) that fit in the nearest
//! cache. A tile of short rows begins at column 0.

use std::ops::Range;

use super::{Gates, ImportanceGates, ImportanceGatesGrad, LogitNoise, Penalty};
use crate::cpu::math::{clamp, logistic, pow};
use crate::cpu::reduce::{add_chunks, add_to, mean, sum_over};
use crate::cpu::uniform::Uniforms;
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::{each_chunk, row_chunks};

/// Slope of the leaky sides.
const ALPHA: f32 = 0.01;
/// Keeps the power and its slope finite at zero.
const EPS: f32 = 1e-12;
/// Steepness of the smooth hard sigmoid.
const BETA: f32 = 10.0;

/// Most elements of a tile.
const TILE: usize = 1024;

type Tile = [f32; TILE];

/// The tiles of some rows of `c` elements.
#[inline(always)]
fn tiles(rows: &Range<usize>, c: usize) -> impl Iterator<Item = Range<usize>> {
    // A long row ends with a shorter tile.
    let (unit, tile) = if c <= TILE {
        (rows.len() * c, TILE / c * c)
    } else {
        (c, TILE)
    };
    (rows.start * c..rows.end * c)
        .step_by(unit)
        .flat_map(move |start| {
            (start..start + unit)
                .step_by(tile)
                .map(move |from| from..(from + tile).min(start + unit))
        })
}

pub(super) fn forward(op: &ImportanceGates, frame: &mut Frame<'_>) {
    let g = frame.output(0).values;
    let sums = frame.output(1).values;
    let active = frame.output(2).values;
    let partials = frame.scratch();
    let noise = Noise::new(op, frame);
    let z = frame.input(0);
    let c = frame.ty(0).columns();
    let rows = z.len() / c;
    let penalty = op
        .penalty
        .map(|(penalty, scalar)| (penalty, frame.scalar(scalar)));
    // For each chunk its sums, and its number of active components.
    let (partials, counts) = partials.split_at_mut(row_chunks(frame.ty(0)) * c);
    let parts = (
        Rows(g, c),
        PerChunk(&mut *partials, c),
        PerChunk(&mut *counts, 1),
    );
    each_chunk!(frame, [rows, c], parts, |range, (g, sums, count)| {
        sums.0.fill(0.0);
        count.0[0] = 0.0;
        let [mut noisy, mut terms] = [[0.0; TILE]; 2];
        for tile in tiles(&range, c) {
            let (start, z) = (tile.start, &z[tile.clone()]);
            let g = &mut g.0[tile.start - range.start * c..tile.end - range.start * c];
            let noisy = noise.add(start, z, &mut noisy);
            apply(op.gates, g, noisy, lower);
            // A chunk has at most 2^14 elements, so the count is exact.
            count.0[0] += sum_over(
                [&*g],
                #[inline(always)]
                |[g]| if g > op.alive { 1.0 } else { 0.0 },
            );
            if let Some((penalty, parameter)) = penalty {
                let terms = &mut terms[..z.len()];
                penalise(op.gates, penalty, terms, z);
                sum_terms(penalty, parameter, terms);
                for row in terms.chunks(c) {
                    add_to(&mut sums.0[start % c..], row);
                }
            }
        }
    });
    add_chunks(frame.pool, Output::overwrite(sums), partials);
    active[0] = mean(counts, rows);
}

/// `x^p`, NaN where `x` is NaN. The exponents 0, 1 and 2 need no logarithm.
#[inline(always)]
fn power(x: &mut [f32], p: f32) {
    if p.to_bits() == 0f32.to_bits() {
        x.iter_mut()
            .for_each(|x| *x = if x.is_nan() { *x } else { 1.0 });
    } else if p.to_bits() == 2f32.to_bits() {
        x.iter_mut().for_each(|x| *x *= *x);
    } else if p.to_bits() != 1f32.to_bits() {
        x.iter_mut().for_each(|x| *x = pow(*x, p));
    }
}

pub(super) fn backward(op: &ImportanceGatesGrad, frame: &mut Frame<'_>) {
    let Output { values: dz, add } = frame.output(0);
    let gates = op.forward.gates;
    let noise = Noise::new(&op.forward, frame);
    let z = frame.input(0);
    let c = frame.ty(0).columns();
    let first = op.forward.inputs();
    let of_importance = op.of_importance.then(|| frame.input(first));
    let of_sums = op
        .of_sums
        .then(|| frame.input(first + usize::from(op.of_importance)));
    let penalty = op.forward.penalty;
    let of_sums = of_sums.zip(penalty);
    let of_sums =
        of_sums.map(|(of_sums, (penalty, scalar))| (of_sums, penalty, frame.scalar(scalar)));
    each_chunk!(frame, [z.len() / c, c], Rows(dz, c), |range, dz| {
        let [mut noisy, mut slopes, mut columns] = [[0.0; TILE]; 3];
        if let Some((of_sums, ..)) = of_sums
            && c <= TILE
        {
            columns
                .chunks_mut(c)
                .for_each(|row| row.copy_from_slice(&of_sums[..row.len()]));
        }
        for tile in tiles(&range, c) {
            let (start, z) = (tile.start, &z[tile.clone()]);
            let dz = &mut dz.0[tile.start - range.start * c..tile.end - range.start * c];
            if !add {
                dz.fill(0.0);
            }
            if let Some(of_importance) = of_importance {
                let gradient = &of_importance[tile];
                let noisy = noise.add(start, z, &mut noisy);
                add_lower(gates, dz, noisy, gradient, noise.slope());
            }
            if let Some((of_sums, penalty, parameter)) = of_sums {
                let slopes = &mut slopes[..z.len()];
                penalise(gates, penalty, slopes, z);
                let scale = sum_slopes(penalty, parameter, slopes);
                let gradient = if c <= TILE {
                    &columns
                } else {
                    &of_sums[start % c..]
                };
                add_penalty_slopes(gates, dz, z, slopes, gradient, scale);
            }
        }
    });
}

/// Adds `scale` times the gradient through the lower sigmoid.
#[inline(always)]
fn add_lower(gates: Gates, dz: &mut [f32], z: &[f32], gradient: &[f32], scale: f32) {
    known(
        gates,
        #[inline(always)]
        |gates| {
            for ((dz, z), gradient) in dz.iter_mut().zip(z).zip(gradient) {
                *dz += scale * lower_grad(gates, *z, *gradient);
            }
        },
    );
}

/// Adds `gradient scale slope upper'(z)`.
#[inline(always)]
fn add_penalty_slopes(
    gates: Gates,
    dz: &mut [f32],
    z: &[f32],
    slopes: &[f32],
    gradient: &[f32],
    scale: f32,
) {
    known(
        gates,
        #[inline(always)]
        |gates| {
            for (((dz, z), slope), gradient) in dz.iter_mut().zip(z).zip(slopes).zip(gradient) {
                *dz += gradient * (scale * slope) * penalised(gates, *z).1;
            }
        },
    );
}

/// Sets `out` to what is penalised of each logit, for [`sum_terms`] and [`sum_slopes`].
#[inline(always)]
fn penalise(gates: Gates, penalty: Penalty, out: &mut [f32], z: &[f32]) {
    let above = match penalty {
        Penalty::Power => EPS,
        Penalty::Smooth { .. } => 0.0,
    };
    apply(
        gates,
        out,
        z,
        #[inline(always)]
        |gates, z| penalised(gates, z).0 + above,
    );
}

/// `psi` of each.
#[inline(always)]
fn sum_terms(penalty: Penalty, parameter: f32, x: &mut [f32]) {
    match penalty {
        Penalty::Power => power(x, parameter),
        Penalty::Smooth { normalized } => {
            let (scale, most) = (1.0 / parameter, largest(normalized, parameter));
            for x in x {
                let u = *x * scale;
                *x = most * (u * u) / u.mul_add(u, 1.0);
            }
        }
    }
}

/// The slope of `psi` at each, but for a factor, which it returns.
#[inline(always)]
fn sum_slopes(penalty: Penalty, parameter: f32, x: &mut [f32]) -> f32 {
    match penalty {
        Penalty::Power => {
            power(x, parameter - 1.0);
            parameter
        }
        Penalty::Smooth { normalized } => {
            let scale = 1.0 / parameter;
            for x in x {
                let u = *x * scale;
                let below = u.mul_add(u, 1.0);
                *x = u / (below * below);
            }
            2.0 * largest(normalized, parameter) * scale
        }
    }
}

/// The number that the smooth penalty nears.
#[inline(always)]
fn largest(normalized: bool, gamma: f32) -> f32 {
    if normalized {
        gamma.mul_add(gamma, 1.0)
    } else {
        1.0
    }
}

/// Sets `out` to `of` each element.
#[inline(always)]
fn apply(gates: Gates, out: &mut [f32], z: &[f32], of: impl Fn(Gates, f32) -> f32) {
    known(
        gates,
        #[inline(always)]
        |gates| {
            for (out, z) in out.iter_mut().zip(z) {
                *out = of(gates, *z);
            }
        },
    );
}

/// Calls `work` with gates that are a constant at compile time: a loop that tested them at each
/// element would not become vector instructions.
#[inline(always)]
fn known(gates: Gates, work: impl FnOnce(Gates)) {
    match gates {
        Gates::LeakyHard => work(Gates::LeakyHard),
        Gates::Hard => work(Gates::Hard),
        Gates::UpperLeakyHard => work(Gates::UpperLeakyHard),
        Gates::Normal => work(Gates::Normal),
        Gates::SwishHard => work(Gates::SwishHard),
    }
}

/// The noise of the logits.
struct Noise<'a> {
    given: Option<&'a [f32]>,
    drawn: Option<Uniforms>,
}

impl<'a> Noise<'a> {
    fn new(op: &ImportanceGates, frame: &Frame<'a>) -> Self {
        let size = [frame.ty(0).rows(), frame.ty(0).columns()];
        Self {
            given: (op.noise == LogitNoise::Given).then(|| frame.input(1)),
            drawn: match op.noise {
                LogitNoise::Drawn(stream) => Some(Uniforms::new(stream, frame.parameters, size)),
                _ => None,
            },
        }
    }

    /// `1.05 z - 0.05 u` for the elements from `start` on, or `z` without noise.
    #[inline(always)]
    fn add<'z>(&self, start: usize, z: &'z [f32], tile: &'z mut Tile) -> &'z [f32] {
        let tile = &mut tile[..z.len()];
        if let Some(drawn) = &self.drawn {
            drawn.fill(start, tile);
        } else if let Some(given) = self.given {
            tile.copy_from_slice(&given[start..start + z.len()]);
        } else {
            return z;
        }
        for (u, z) in tile.iter_mut().zip(z) {
            *u = 1.05f32.mul_add(*z, -0.05 * *u);
        }
        tile
    }

    /// Slope of the noisy logit with respect to the logit.
    #[inline(always)]
    fn slope(&self) -> f32 {
        if self.drawn.is_some() || self.given.is_some() {
            1.05
        } else {
            1.0
        }
    }
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
            let inside = if z <= 1.0 {
                gradient
            } else {
                unless_nan(z, 0.0)
            };
            if z <= 0.0 { below } else { inside }
        }
        _ => gradient * upper_slope(gates, z),
    }
}

/// The penalty's argument, and its slope. The smooth sigmoid dips below zero by 0.003, where a
/// power is undefined: it counts as zero there, with slope zero.
#[inline(always)]
fn penalised(gates: Gates, z: f32) -> (f32, f32) {
    let (y, slope) = (upper(gates, z), upper_slope(gates, z));
    if y < 0.0 { (0.0, 0.0) } else { (y, slope) }
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
    let outside = unless_nan(z, if z > 1.0 { above } else { 0.0 });
    if (0.0..=1.0).contains(&z) {
        1.0
    } else {
        outside
    }
}

/// `value`, or NaN if `z` is NaN: a NaN logit gives a NaN gradient, which checks for finite
/// gradients find.
#[inline(always)]
fn unless_nan(z: f32, value: f32) -> f32 {
    if z.is_nan() { z } else { value }
}
