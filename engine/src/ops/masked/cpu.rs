use spd_draws::{Stream, uniform_lanes};

use super::{Draw, Mask, Masked, Operands};
use crate::cpu::lanes::{BLOCK, Block, load, map, store};
use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::draws::row_number;
use crate::ops::grain_rows;

pub(super) fn forward(op: &Masked, frame: &mut Frame<'_>) {
    let (h, _) = frame.output(0);
    let site = Site::new(op, op.operands(0), frame);
    let c = site.c;
    frame
        .pool
        .run(h.len() / c, grain_rows(c), Rows(h, c), |range, h| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, h) in range.zip(h.0.chunks_exact_mut(c)) {
                        let weights = site.row(row);
                        for start in (0..c).step_by(BLOCK) {
                            let block = site.block(row, start);
                            let a = load(site.columns(site.a, row, start));
                            let m = site.mask(&block, weights);
                            store(&times(&a, &m), false, &mut h[start..]);
                        }
                    }
                },
            );
        });
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
                            let weights = site.row(row);
                            for start in (0..c).step_by(BLOCK) {
                                let block = site.block(row, start);
                                let gh = load(site.columns(gradient, row, start));
                                let m = site.mask(&block, weights);
                                store(&times(&gh, &m), add_a, &mut ga[start..]);
                            }
                        }
                    },
                );
            });
    }
    let (gg, add_g) = frame.output(1);
    let parts = (Rows(ga, c), Rows(gg, c));
    frame
        .pool
        .run(rows, grain_rows(c), parts, |range, (ga, gg)| {
            vectorised(
                #[inline(always)]
                || {
                    let rows = ga.0.chunks_exact_mut(c).zip(gg.0.chunks_exact_mut(c));
                    for (row, (ga, gg)) in range.zip(rows) {
                        let weights = site.row(row);
                        for start in (0..c).step_by(BLOCK) {
                            let block = site.block(row, start);
                            let gh = load(site.columns(gradient, row, start));
                            let m = site.mask(&block, weights);
                            store(&times(&gh, &m), add_a, &mut ga[start..]);
                            let a = load(site.columns(site.a, row, start));
                            let slope = site.slope(&block, weights);
                            store(&times(&times(&gh, &a), &slope), add_g, &mut gg[start..]);
                        }
                    }
                },
            );
        });
}

#[inline(always)]
fn times(a: &Block, b: &Block) -> Block {
    map(
        [a, b],
        #[inline(always)]
        |[a, b]| a * b,
    )
}

/// Route and delta of a row.
type Weights = (f32, f32);

/// Importances and draws of a block of columns; zeros where the mask does not need them.
struct Sources {
    g: Block,
    r: Block,
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

    #[inline(always)]
    fn row(&self, row: usize) -> Weights {
        (
            self.route.map_or(1.0, |route| route[row]),
            self.delta.map_or(0.0, |delta| delta[row]),
        )
    }

    /// The rest of a row.
    #[inline(always)]
    fn columns<'s>(&self, tensor: &'s [f32], row: usize, start: usize) -> &'s [f32] {
        &tensor[row * self.c + start..(row + 1) * self.c]
    }

    #[inline(always)]
    fn block(&self, row: usize, start: usize) -> Sources {
        let of = |tensor: Option<&[f32]>| match tensor {
            Some(tensor) => load(self.columns(tensor, row, start)),
            None => [0.0; BLOCK],
        };
        let (g, mut r) = (of(self.importance), of(self.given));
        if let Some((stream, coin)) = self.stream {
            let (first_block, row) = (row_number(start / 4), self.first_row + row_number(row));
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
        }
        Sources { g, r }
    }

    /// `route (m - delta)`.
    #[inline(always)]
    fn mask(&self, Sources { g, r }: &Sources, (route, delta): Weights) -> Block {
        let m = match self.mask {
            Mask::Importance => *g,
            Mask::Between(_) => map(
                [g, r],
                #[inline(always)]
                |[g, r]| g + (1.0 - g) * r,
            ),
            Mask::Drawn(_) => *r,
            Mask::Rounded(threshold) => map(
                [g],
                #[inline(always)]
                |[g]| if g > threshold { 1.0 } else { 0.0 },
            ),
            Mask::Ones => [1.0; BLOCK],
        };
        map(
            [&m],
            #[inline(always)]
            |[m]| route * (m - delta),
        )
    }

    /// `route dm / dg`.
    #[inline(always)]
    fn slope(&self, sources: &Sources, (route, _): Weights) -> Block {
        match self.mask {
            Mask::Between(_) => map(
                [&sources.r],
                #[inline(always)]
                |[r]| route * (1.0 - r),
            ),
            _ => [route; BLOCK],
        }
    }
}
