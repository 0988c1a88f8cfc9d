use spd_draws::uniform_lanes;

use super::{Gates, ImportanceGates, ImportanceGatesGrad, LogitNoise};
use crate::cpu::lanes::{BLOCK, Block, load, map, store};
use crate::cpu::math::{clamp, logistic, pow, vectorised};
use crate::cpu::reduce::add_chunks;
use crate::cpu::{Frame, PerChunk, Rows};
use crate::ops::draws::row_number;
use crate::ops::grain_rows;

/// Slope of the leaky sides.
const ALPHA: f32 = 0.01;
/// Keeps the power and its slope finite at zero.
const EPS: f32 = 1e-12;
/// Steepness of the smooth hard sigmoid.
const BETA: f32 = 10.0;

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
                        for start in (0..c).step_by(BLOCK) {
                            let z = load(&z[row * c + start..(row + 1) * c]);
                            let noisy = noise.add(row, start, &z);
                            let importance = each(
                                op.gates,
                                [&noisy],
                                #[inline(always)]
                                |gates, [z]| lower(gates, z),
                            );
                            store(&importance, false, &mut g[start..]);
                            if let Some(p) = p {
                                store(&powers(op.gates, p, &z), true, &mut sums.0[start..]);
                            }
                        }
                    }
                },
            );
        });
    add_chunks(frame.pool, (sums, false), partials);
}

/// `(upper(z) + eps)^p`. The exponents 1 and 2 need no logarithm.
#[inline(always)]
fn powers(gates: Gates, p: f32, z: &Block) -> Block {
    let x = each(
        gates,
        [z],
        #[inline(always)]
        |gates, [z]| penalised(gates, z).0,
    );
    power(&x, p)
}

#[inline(always)]
fn power(x: &Block, p: f32) -> Block {
    if p.to_bits() == 0f32.to_bits() {
        [1.0; BLOCK]
    } else if p.to_bits() == 1f32.to_bits() {
        *x
    } else if p.to_bits() == 2f32.to_bits() {
        map(
            [x],
            #[inline(always)]
            |[x]| x * x,
        )
    } else {
        map(
            [x],
            #[inline(always)]
            |[x]| pow(x, p),
        )
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
                        for start in (0..c).step_by(BLOCK) {
                            let at = row * c + start..(row + 1) * c;
                            let z = load(&z[at.clone()]);
                            let mut add = add;
                            if let Some(of_importance) = of_importance {
                                let gradient = load(&of_importance[at]);
                                let noisy = noise.add(row, start, &z);
                                let scale = noise.slope();
                                let term = each(
                                    gates,
                                    [&noisy, &gradient],
                                    #[inline(always)]
                                    |gates, [z, gradient]| scale * lower_grad(gates, z, gradient),
                                );
                                store(&term, add, &mut dz[start..]);
                                add = true;
                            }
                            if let Some(of_sums) = of_sums {
                                let term = power_slopes(gates, p, &z, &load(&of_sums[start..]));
                                store(&term, add, &mut dz[start..]);
                            }
                        }
                    }
                },
            );
        });
}

/// `gradient p (upper(z) + eps)^(p - 1) upper'(z)`.
#[inline(always)]
fn power_slopes(gates: Gates, p: f32, z: &Block, gradient: &Block) -> Block {
    let x = each(
        gates,
        [z],
        #[inline(always)]
        |gates, [z]| penalised(gates, z).0,
    );
    let slope = each(
        gates,
        [z],
        #[inline(always)]
        |gates, [z]| penalised(gates, z).1,
    );
    map(
        [gradient, &power(&x, p - 1.0), &slope],
        #[inline(always)]
        |[gradient, power, slope]| gradient * (p * power) * slope,
    )
}

/// `of` at each column, with the gates known where it is compiled: a loop that had to ask for them at each
/// element would not become vector instructions.
#[inline(always)]
fn each<const N: usize>(
    gates: Gates,
    blocks: [&Block; N],
    of: impl Fn(Gates, [f32; N]) -> f32,
) -> Block {
    macro_rules! known {
        ($($gates:ident)*) => {
            match gates {
                $(Gates::$gates => map(
                    blocks,
                    #[inline(always)]
                    |columns| of(Gates::$gates, columns),
                ),)*
            }
        };
    }
    known!(LeakyHard Hard UpperLeakyHard Normal SwishHard)
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

    /// `1.05 z - 0.05 u`, or `z` where there is no noise.
    #[inline(always)]
    fn add(&self, row: usize, start: usize, z: &Block) -> Block {
        let mut u = [0.0; BLOCK];
        if let Some(word) = self.drawn {
            let (first_block, row) = (row_number(start / 4), self.first_row + row_number(row));
            uniform_lanes(self.seed, first_block, row, word, self.step, &mut u);
        } else if let Some(given) = self.given {
            u = load(&given[row * self.c + start..(row + 1) * self.c]);
        } else {
            return *z;
        }
        map(
            [z, &u],
            #[inline(always)]
            |[z, u]| 1.05f32.mul_add(z, -0.05 * u),
        )
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
