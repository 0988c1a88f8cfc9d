use spd_draws::{Stream, uniform_lanes};

use super::{Draw, Mask, Masked, MaskedGrad, Operands, Sums, Wants};
use crate::cpu::lanes::{BLOCK, Block, load, map, store};
use crate::cpu::math::{sum, vectorised};
use crate::cpu::{Frame, PerChunk, Rows};
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

pub(super) fn backward(op: &MaskedGrad, frame: &mut Frame<'_>) {
    match op.wants {
        Wants {
            a: true,
            importance,
            given: false,
            delta: false,
        } => to_importance(&op.of, importance, frame),
        _ => to_sources(op, frame),
    }
}

/// The gradients of a loss that is trained on: of the activation and, where the mask depends on it, of the importance.
fn to_importance(op: &Masked, importance: bool, frame: &mut Frame<'_>) {
    let gradient = frame.input(0);
    let site = Site::new(op, op.operands(1), frame);
    let (ga, add_a) = frame.output(0);
    let c = site.c;
    let rows = ga.len() / c;
    if !importance {
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

/// Any of the gradients: in an adversary's steps of the draws and the delta, and of the activation behind the first site.
fn to_sources(op: &MaskedGrad, frame: &mut Frame<'_>) {
    let gradient = frame.input(0);
    let site = Site::new(&op.of, op.of.operands(1), frame);
    let c = site.c;
    let rows = gradient.len() / c;
    let sums = op.sums(|index| frame.ty(index), rows);
    let wants = op.wants;
    let mut outputs = 0..;
    let [a, importance, given, delta] =
        [wants.a, wants.importance, wants.given, wants.delta].map(|wanted| {
            let index = wanted.then(|| outputs.next()).flatten()?;
            let (values, add) = frame.output(index);
            Some(Gradient { values, add })
        });
    let partials = frame.scratch();
    let (mut given, mut delta) = (given, delta);
    let given_sum = if sums.given { given.take() } else { None };
    let delta_sum = if sums.delta { delta.take() } else { None };
    let adds = [&a, &importance, &given, &delta].map(|of| of.as_ref().is_some_and(|of| of.add));
    let parts = (
        (rows_of(a, c), rows_of(importance, c)),
        (rows_of(given, c), rows_of(delta, 1)),
        PerChunk(&mut *partials, sums.columns(c)),
    );
    frame.pool.run(rows, grain_rows(c), parts, |range, parts| {
        let ((mut a, mut importance), (mut given, mut delta), partial) = parts;
        partial.0.fill(0.0);
        let (given_sum, delta_sum) = partial.0.split_at_mut(if sums.given { c } else { 0 });
        vectorised(
            #[inline(always)]
            || {
                for (at, row) in range.enumerate() {
                    let weights = site.row(row);
                    let mut dots = [0.0; BLOCK];
                    for start in (0..c).step_by(BLOCK) {
                        let block = site.block(row, start);
                        let gh = load(site.columns(gradient, row, start));
                        if let Some(out) = &mut a {
                            let m = site.mask(&block, weights);
                            store(&times(&gh, &m), adds[0], out.rest(at, start));
                        }
                        let gm = times(&gh, &load(site.columns(site.a, row, start)));
                        if let Some(out) = &mut importance {
                            let slope = site.slope(&block, weights);
                            store(&times(&gm, &slope), adds[1], out.rest(at, start));
                        }
                        if let Some(out) = &mut given {
                            let slope = site.source_slope(&block, weights);
                            store(&times(&gm, &slope), adds[2], out.rest(at, start));
                        } else if sums.given {
                            let slope = site.source_slope(&block, weights);
                            store(&times(&gm, &slope), true, &mut given_sum[start..]);
                        }
                        store(&gm, true, &mut dots);
                    }
                    let (route, _) = weights;
                    let total = -route * sum(BLOCK, |lane| dots[lane]);
                    if let Some(out) = &mut delta {
                        out.0[at] = if adds[3] { out.0[at] + total } else { total };
                    } else if sums.delta {
                        delta_sum[0] += total;
                    }
                }
            },
        );
    });
    add_sums(given_sum, partials, (0, sums), c);
    add_sums(delta_sum, partials, (usize::from(sums.given) * c, sums), c);
}

/// A gradient that is made, or added to.
struct Gradient<'a> {
    values: &'a mut [f32],
    add: bool,
}

fn rows_of(gradient: Option<Gradient<'_>>, columns: usize) -> Option<Rows<'_>> {
    Some(Rows(gradient?.values, columns))
}

/// Adds up the partial sums that start at a column of each chunk's, in order.
fn add_sums(to: Option<Gradient<'_>>, partials: &[f32], (first, sums): (usize, Sums), c: usize) {
    let Some(Gradient { values, add }) = to else {
        return;
    };
    if !add {
        values.fill(0.0);
    }
    for partial in partials.chunks_exact(sums.columns(c)) {
        for (total, part) in values.iter_mut().zip(&partial[first..]) {
            *total += part;
        }
    }
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
    /// The last row of `given`: of a single row, the first.
    last_given: usize,
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
        let c = frame.ty(at.a).columns();
        let given = input(at.given);
        Self {
            mask: op.mask,
            c,
            a: frame.input(at.a),
            importance: input(at.importance),
            given,
            last_given: given.map_or(0, |given| given.len() / c - 1),
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
            self.delta
                .map_or(0.0, |delta| delta[row.min(delta.len() - 1)]),
        )
    }

    /// The rest of a row.
    #[inline(always)]
    fn columns<'s>(&self, tensor: &'s [f32], row: usize, start: usize) -> &'s [f32] {
        &tensor[row * self.c + start..(row + 1) * self.c]
    }

    #[inline(always)]
    fn block(&self, row: usize, start: usize) -> Sources {
        let of = |tensor: Option<&[f32]>, row: usize| match tensor {
            Some(tensor) => load(self.columns(tensor, row, start)),
            None => [0.0; BLOCK],
        };
        let g = of(self.importance, row);
        let mut r = of(self.given, row.min(self.last_given));
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

    /// `route dm / dr`.
    #[inline(always)]
    fn source_slope(&self, sources: &Sources, (route, _): Weights) -> Block {
        match self.mask {
            Mask::Between(_) => map(
                [&sources.g],
                #[inline(always)]
                |[g]| route * (1.0 - g),
            ),
            _ => [route; BLOCK],
        }
    }
}
