//! Elements are read as one long row, in tiles that fit in the nearest cache: first the tile's draws, then what is made of
//! them, so that short rows and long ones cost the same.

use super::{Draw, Mask, Masked, MaskedGrad, Operands, Sums, Wants};
use crate::cpu::math::{sum, vectorised};
use crate::cpu::uniform::Uniforms;
use crate::cpu::{Frame, PerChunk, Rows};
use crate::ops::grain_rows;

/// Elements of a tile.
const TILE: usize = 1024;

type Tile = [f32; TILE];

/// Calls `work` with the kind of mask known where it is compiled: a loop that had to ask for it at each element would not
/// become vector instructions.
#[inline(always)]
fn known(mask: Mask, work: impl FnOnce(Mask)) {
    match mask {
        Mask::Importance => work(Mask::Importance),
        Mask::Between(_) => work(Mask::Between(Draw::Given)),
        Mask::Drawn(_) => work(Mask::Drawn(Draw::Given)),
        Mask::Rounded(threshold) => work(Mask::Rounded(threshold)),
        Mask::Ones => work(Mask::Ones),
    }
}

/// The mask of an element from its importance and draw.
#[inline(always)]
fn of(mask: Mask, g: f32, r: f32) -> f32 {
    match mask {
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
                    let mut tiles = Tiles::new();
                    for (index, h) in h.0.chunks_mut(TILE).enumerate() {
                        let at = site.load(range.start * c + index * TILE, h.len(), &mut tiles);
                        at.masked(site.mask, site.a, (h, false));
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
                        let mut tiles = Tiles::new();
                        for (index, ga) in ga.0.chunks_mut(TILE).enumerate() {
                            let start = range.start * c + index * TILE;
                            let at = site.load(start, ga.len(), &mut tiles);
                            at.masked(site.mask, gradient, (ga, add_a));
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
                    let mut tiles = Tiles::new();
                    let pairs = ga.0.chunks_mut(TILE).zip(gg.0.chunks_mut(TILE));
                    for (index, (ga, gg)) in pairs.enumerate() {
                        let start = range.start * c + index * TILE;
                        let at = site.load(start, ga.len(), &mut tiles);
                        at.masked(site.mask, gradient, (ga, add_a));
                        at.slopes(site.mask, (gradient, site.a), (gg, add_g));
                    }
                },
            );
        });
}

/// Any of the gradients: in an adversary's steps of the draws and the delta, and of the activation behind the first site.
/// Tiles end with their row, of which the delta's gradient is the sum.
fn to_sources(op: &MaskedGrad, frame: &mut Frame<'_>) {
    let gradient = frame.input(0);
    let site = Site::new(&op.of, op.of.operands(1), frame);
    let (c, mask) = (site.c, site.mask);
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
                let mut tiles = Tiles::new();
                for (index, row) in range.enumerate() {
                    let mut total = 0.0;
                    for column in (0..c).step_by(TILE) {
                        let len = TILE.min(c - column);
                        let at = site.load(row * c + column, len, &mut tiles);
                        let own = index * c + column..index * c + column + len;
                        if let Some(out) = &mut a {
                            at.masked(mask, gradient, (&mut out.0[own.clone()], adds[0]));
                        }
                        let of = (gradient, site.a);
                        if let Some(out) = &mut importance {
                            at.slopes(mask, of, (&mut out.0[own.clone()], adds[1]));
                        }
                        if let Some(out) = &mut given {
                            at.source_slopes(mask, of, (&mut out.0[own], adds[2]));
                        } else if sums.given {
                            at.source_slopes(mask, of, (&mut given_sum[column..][..len], true));
                        }
                        total -= at.route[0] * at.dot(of);
                    }
                    if let Some(out) = &mut delta {
                        let before = if adds[3] { out.0[index] } else { 0.0 };
                        out.0[index] = before + total;
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

/// The operands of a masked site as slices, and its draws.
struct Site<'a> {
    mask: Mask,
    c: usize,
    a: &'a [f32],
    importance: Option<&'a [f32]>,
    given: Option<&'a [f32]>,
    /// A given row that holds for all positions.
    given_row: Option<&'a [f32]>,
    delta: Option<&'a [f32]>,
    route: Option<&'a [f32]>,
    drawn: Option<(Uniforms, bool)>,
}

/// What a tile is made from beside the tensors.
struct Tiles {
    /// Draws, or what is given in their place for all rows; zeros where there are none.
    r: Tile,
    /// The delta mask of each element's row; zeros where there are none.
    delta: Tile,
    /// The route of each element's row; ones where there are none.
    route: Tile,
    /// In place of importances that the mask does not look at.
    zeros: Tile,
}

impl Tiles {
    #[inline(always)]
    fn new() -> Self {
        Self {
            r: [0.0; TILE],
            delta: [0.0; TILE],
            route: [1.0; TILE],
            zeros: [0.0; TILE],
        }
    }
}

impl<'a> Site<'a> {
    fn new(op: &Masked, at: Operands, frame: &Frame<'a>) -> Self {
        let input = |index: Option<usize>| index.map(|index| frame.input(index));
        let c = frame.ty(at.a).columns();
        let (given_row, given) = match input(at.given) {
            Some(row) if row.len() == c => (Some(row), None),
            given => (None, given),
        };
        let drawn = match op.mask {
            Mask::Between(draw) | Mask::Drawn(draw) => match draw {
                Draw::Uniform(stream) => Some((stream, false)),
                Draw::Coin(stream) => Some((stream, true)),
                Draw::Given => None,
            },
            _ => None,
        };
        Self {
            mask: op.mask,
            c,
            a: frame.input(at.a),
            importance: input(at.importance),
            given,
            given_row,
            delta: input(at.delta),
            route: input(at.route),
            drawn: drawn.map(|(stream, coin)| (Uniforms::new(stream, frame.parameters, c), coin)),
        }
    }

    /// Elements `start..start + len`.
    #[inline(always)]
    fn load<'t>(&'t self, start: usize, len: usize, tiles: &'t mut Tiles) -> At<'t> {
        let Tiles {
            r,
            delta,
            route,
            zeros,
        } = tiles;
        if let Some((uniforms, coin)) = &self.drawn {
            uniforms.fill(start, &mut r[..len]);
            if *coin {
                for r in &mut r[..len] {
                    *r = if *r < 0.5 { 0.0 } else { 1.0 };
                }
            }
        }
        if let Some(row) = self.given_row {
            repeat(row, start, &mut r[..len]);
        }
        for (rows, tile) in [(self.delta, &mut *delta), (self.route, &mut *route)] {
            if let Some(rows) = rows {
                self.spread(rows, start, &mut tile[..len]);
            }
        }
        let of = |tensor: &'t [f32]| &tensor[start..start + len];
        At {
            start,
            g: self.importance.map_or(&zeros[..len], of),
            r: self.given.map_or(&r[..len], of),
            delta: &delta[..len],
            route: &route[..len],
        }
    }

    /// What each element's row has; a single number holds for all rows.
    #[inline(always)]
    fn spread(&self, rows: &[f32], start: usize, out: &mut [f32]) {
        let mut row = start / self.c;
        let (mut from, mut to) = (0, (row + 1) * self.c - start);
        while from < out.len() {
            let end = to.min(out.len());
            out[from..end].fill(rows[row.min(rows.len() - 1)]);
            (row, from, to) = (row + 1, end, to + self.c);
        }
    }
}

/// A row again and again, from element `start` of that on.
#[inline(always)]
fn repeat(row: &[f32], start: usize, out: &mut [f32]) {
    let (mut from, mut column) = (0, start % row.len());
    while from < out.len() {
        let len = (row.len() - column).min(out.len() - from);
        out[from..from + len].copy_from_slice(&row[column..column + len]);
        (from, column) = (from + len, 0);
    }
}

/// A tile of a site.
struct At<'t> {
    start: usize,
    g: &'t [f32],
    r: &'t [f32],
    delta: &'t [f32],
    route: &'t [f32],
}

impl At<'_> {
    /// `out = [out +] x route (m - delta)`.
    #[inline(always)]
    fn masked(&self, mask: Mask, x: &[f32], (out, add): (&mut [f32], bool)) {
        let x = &x[self.start..self.start + out.len()];
        let of_rows = self.delta.iter().zip(self.route);
        let elements = x.iter().zip(self.g).zip(self.r).zip(of_rows);
        known(
            mask,
            #[inline(always)]
            |mask| {
                if add {
                    for (out, (((x, g), r), (delta, route))) in out.iter_mut().zip(elements) {
                        *out += x * (route * (of(mask, *g, *r) - delta));
                    }
                } else {
                    for (out, (((x, g), r), (delta, route))) in out.iter_mut().zip(elements) {
                        *out = x * (route * (of(mask, *g, *r) - delta));
                    }
                }
            },
        );
    }

    /// `out = [out +] gradient a route dm / dg`.
    #[inline(always)]
    fn slopes(&self, mask: Mask, of: (&[f32], &[f32]), out: (&mut [f32], bool)) {
        // 1 - r of a mask between importance and 1, and 1 of the importance itself.
        let share = if let Mask::Between(_) = mask {
            1.0
        } else {
            0.0
        };
        self.scaled(of, (self.r, share), out);
    }

    /// `out = [out +] gradient a route dm / dr`.
    #[inline(always)]
    fn source_slopes(&self, mask: Mask, of: (&[f32], &[f32]), out: (&mut [f32], bool)) {
        // 1 - g of a mask between importance and 1, and 1 of the draw itself.
        let share = if let Mask::Between(_) = mask {
            1.0
        } else {
            0.0
        };
        self.scaled(of, (self.g, share), out);
    }

    /// `out = [out +] gradient a route (1 - share t)`.
    #[inline(always)]
    fn scaled(
        &self,
        (x, a): (&[f32], &[f32]),
        (t, share): (&[f32], f32),
        (out, add): (&mut [f32], bool),
    ) {
        let range = self.start..self.start + out.len();
        let elements = x[range.clone()].iter().zip(&a[range]);
        let elements = elements.zip(t).zip(self.route);
        if add {
            for (out, (((x, a), t), route)) in out.iter_mut().zip(elements) {
                *out += x * a * (route * (1.0 - share * t));
            }
        } else {
            for (out, (((x, a), t), route)) in out.iter_mut().zip(elements) {
                *out = x * a * (route * (1.0 - share * t));
            }
        }
    }

    /// The sum of `gradient a`.
    #[inline(always)]
    fn dot(&self, (x, a): (&[f32], &[f32])) -> f32 {
        let range = self.start..self.start + self.g.len();
        let (x, a) = (&x[range.clone()], &a[range]);
        sum(
            x.len(),
            #[inline(always)]
            |i| x[i] * a[i],
        )
    }
}
