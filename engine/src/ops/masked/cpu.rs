use spd_draws::{LANES, Stream, uniform_lanes};

use super::{Draw, Mask, Masked, Operands};
use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::draws::row_number;
use crate::ops::grain_rows;

/// Columns that are handled at once: as many as a call of the generator draws.
const BLOCK: usize = 4 * LANES;

pub(super) fn forward(op: &Masked, frame: &mut Frame<'_>) {
    let (h, _) = frame.output(0);
    let site = Site::new(op, op.operands(0), frame);
    frame.pool.run(
        h.len() / site.c,
        grain_rows(site.c),
        Rows(h, site.c),
        |range, h| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, h) in range.zip(h.0.chunks_exact_mut(site.c)) {
                        let (route, delta) = site.row(row);
                        for (start, h) in (0..site.c).step_by(BLOCK).zip(h.chunks_mut(BLOCK)) {
                            let (a, g, r) = site.block(row, start, h.len());
                            for i in 0..h.len() {
                                h[i] = a[i] * (route * (site.mask(g[i], r[i]) - delta));
                            }
                        }
                    }
                },
            );
        },
    );
}

pub(super) fn backward(op: &Masked, frame: &mut Frame<'_>) {
    let gradient = frame.input(0);
    let site = Site::new(op, op.operands(1), frame);
    let (ga, add_a) = frame.output(0);
    let c = site.c;
    let rows = ga.len() / c;
    if !op.mask.has_gradient() {
        return frame
            .pool
            .run(rows, grain_rows(c), Rows(ga, c), |range, ga| {
                vectorised(
                    #[inline(always)]
                    || {
                        for (row, ga) in range.zip(ga.0.chunks_exact_mut(c)) {
                            let (route, delta) = site.row(row);
                            for (start, ga) in (0..c).step_by(BLOCK).zip(ga.chunks_mut(BLOCK)) {
                                let (_, g, r) = site.block(row, start, ga.len());
                                let gh = &gradient[row * c + start..][..ga.len()];
                                for i in 0..ga.len() {
                                    let term = gh[i] * (route * (site.mask(g[i], r[i]) - delta));
                                    ga[i] = if add_a { ga[i] + term } else { term };
                                }
                            }
                        }
                    },
                );
            });
    }
    let (gg, add_g) = frame.output(1);
    frame.pool.run(
        rows,
        grain_rows(c),
        (Rows(ga, c), Rows(gg, c)),
        |range, (ga, gg)| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, (ga, gg)) in
                        range.zip(ga.0.chunks_exact_mut(c).zip(gg.0.chunks_exact_mut(c)))
                    {
                        let (route, delta) = site.row(row);
                        let blocks = ga.chunks_mut(BLOCK).zip(gg.chunks_mut(BLOCK));
                        for (start, (ga, gg)) in (0..c).step_by(BLOCK).zip(blocks) {
                            let (a, g, r) = site.block(row, start, ga.len());
                            let gh = &gradient[row * c + start..][..ga.len()];
                            for i in 0..ga.len() {
                                let term = gh[i] * (route * (site.mask(g[i], r[i]) - delta));
                                ga[i] = if add_a { ga[i] + term } else { term };
                            }
                            for i in 0..gg.len() {
                                let term = gh[i] * a[i] * (route * site.slope(r[i]));
                                gg[i] = if add_g { gg[i] + term } else { term };
                            }
                        }
                    }
                },
            );
        },
    );
}

/// The operands of a masked site as slices, and its draws.
struct Site<'a> {
    mask: Mask,
    c: usize,
    a: &'a [f32],
    importance: Option<&'a [f32]>,
    given: Option<&'a [f32]>,
    delta: Option<&'a [f32]>,
    route: Option<&'a [f32]>,
    stream: Option<(Stream, bool)>,
    seed: u64,
    step: u32,
    first_row: u32,
}

impl<'a> Site<'a> {
    fn new(op: &Masked, at: Operands, frame: &Frame<'a>) -> Self {
        let input = |index: Option<usize>| index.map(|index| frame.input(index));
        let stream = match op.mask {
            Mask::Between(draw) | Mask::Drawn(draw) => match draw {
                Draw::Uniform(stream) => Some((stream, false)),
                Draw::Coin(stream) => Some((stream, true)),
                Draw::Given => None,
            },
            _ => None,
        };
        Self {
            mask: op.mask,
            c: frame.ty(at.a).columns(),
            a: frame.input(at.a),
            importance: input(at.importance),
            given: input(at.given),
            delta: input(at.delta),
            route: input(at.route),
            stream,
            seed: frame.parameters.seed,
            step: frame.parameters.step,
            first_row: frame.parameters.first_row,
        }
    }

    /// Route and delta of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> (f32, f32) {
        (
            self.route.map_or(1.0, |route| route[row]),
            self.delta.map_or(0.0, |delta| delta[row]),
        )
    }

    /// Activations, importances and draws of a block of columns. What the mask does not need is anything.
    #[inline(always)]
    fn block(&self, row: usize, start: usize, len: usize) -> (&'a [f32], &'a [f32], [f32; BLOCK]) {
        let at = row * self.c + start;
        let a = &self.a[at..][..len];
        let g = self
            .importance
            .map_or(a, |importance| &importance[at..][..len]);
        let mut r = [0.0; BLOCK];
        if let Some((stream, coin)) = self.stream {
            let first_block = row_number(start / 4);
            let row = self.first_row + row_number(row);
            uniform_lanes(
                self.seed,
                first_block,
                row,
                stream.word(),
                self.step,
                &mut r,
            );
            if coin {
                for r in &mut r {
                    *r = if *r < 0.5 { 0.0 } else { 1.0 };
                }
            }
        } else if let Some(given) = self.given {
            r[..len].copy_from_slice(&given[at..][..len]);
        }
        (a, g, r)
    }

    #[inline(always)]
    fn mask(&self, g: f32, r: f32) -> f32 {
        match self.mask {
            Mask::Importance => g,
            Mask::Between(_) => g + (1.0 - g) * r,
            Mask::Drawn(_) => r,
            Mask::Rounded(threshold) => {
                if g > threshold {
                    1.0
                } else {
                    0.0
                }
            }
            Mask::Ones => 1.0,
        }
    }

    /// `dm / dg`.
    #[inline(always)]
    fn slope(&self, r: f32) -> f32 {
        match self.mask {
            Mask::Between(_) => 1.0 - r,
            _ => 1.0,
        }
    }
}
