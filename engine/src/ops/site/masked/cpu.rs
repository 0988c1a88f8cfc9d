//! Elements are read as one long row, in tiles that fit in the nearest cache: first the tile's
//! draws, then its results, so that short and long rows cost the same. In compacted matrices, tiles
//! end with their row.

use std::ops::Range;

use super::{Draw, Mask, Masked, MaskedGrad};
use crate::cpu::reduce::{add_chunks, sum_over};
use crate::cpu::routed_rows::{Compacted, among, clear_others, routed};
use crate::cpu::uniform::Uniforms;
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::each_chunk;

/// Elements of a tile.
const TILE: usize = 1024;

type Tile = [f32; TILE];

/// Calls `work` with a kind of mask that is a constant at compile time: a loop that tested it at
/// each element would not become vector instructions.
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
    let h = frame.output(0).values;
    let scratch = frame.scratch();
    let site = Site::new(op, 0, frame, scratch);
    let parts = Compacted::new(h, site.c, site.routed);
    each_chunk!(frame, [site.rows, site.c], parts, |range, mut h| {
        let mut tiles = Tiles::new();
        for piece in site.pieces(range, false) {
            let at = site.load(&piece, &mut tiles);
            let h = Output::overwrite(h.part(piece.own, piece.len));
            at.masked(site.mask, piece.compacted(site.a), h);
        }
    });
}

/// Tiles end with their row if there are sums: the delta's gradient is a sum over a row, and a
/// given row's over the rows.
pub(super) fn backward(op: &MaskedGrad, frame: &mut Frame<'_>) {
    let gradient = frame.input(0);
    let scratch = frame.scratch();
    let sums = op.sums(|index| frame.ty(index), frame.ty(0).rows());
    let [of_given, of_delta] = op.partials(|index| frame.ty(index));
    let (given_partials, scratch) = scratch.split_at_mut(of_given);
    let (delta_partials, room) = scratch.split_at_mut(of_delta);
    let site = Site::new(&op.of, 1, frame, room);
    let (c, mask) = (site.c, site.mask);
    let outputs = op.results().map(|index| Some(frame.output(index?)));
    let [a, importance, mut given, mut delta] = outputs;
    let of_delta = delta.is_some();
    let by_row = of_delta || sums.given;
    let given_sum = if sums.given { given.take() } else { None };
    let delta_sum = if sums.delta { delta.take() } else { None };
    let adds = [&a, &importance, &given, &delta].map(|of| of.as_ref().is_some_and(|of| of.add));
    let parts = (
        (
            a.map(|a| Compacted::new(a.values, c, site.routed)),
            rows_of(importance, c),
        ),
        (rows_of(given, c), rows_of(delta, 1)),
        (
            PerChunk(&mut *given_partials, usize::from(sums.given) * c),
            PerChunk(&mut *delta_partials, usize::from(sums.delta)),
        ),
    );
    each_chunk!(frame, [site.rows, c], parts, |range, parts| {
        let ((mut of_a, mut importance), (mut given, mut delta), partials) = parts;
        let (given_sum, delta_sum) = (partials.0.0, partials.1.0);
        given_sum.fill(0.0);
        delta_sum.fill(0.0);
        for (out, add) in [(&mut importance, adds[1]), (&mut given, adds[2])] {
            if let Some(out) = out {
                site.clear_others(&range, out.0, add);
            }
        }
        if let (Some(delta), Some(routed)) = (&mut delta, site.routed.filter(|_| !adds[3])) {
            clear_others(routed, &range, delta.0, 1);
        }
        let first = range.start;
        let mut tiles = Tiles::new();
        let mut total = 0.0;
        for piece in site.pieces(range, by_row) {
            let at = site.load(&piece, &mut tiles);
            let (x, a) = (piece.compacted(gradient), piece.compacted(site.a));
            let full = piece.all - first * c..piece.all - first * c + piece.len;
            if let Some(out) = &mut of_a {
                let out = Output::new(out.part(piece.own, piece.len), adds[0]);
                at.masked(mask, x, out);
            }
            if let Some(out) = &mut importance {
                let out = Output::new(&mut out.0[full.clone()], adds[1]);
                slopes(mask, x, a, at.r, out);
            }
            if let Some(out) = &mut given {
                let out = Output::new(&mut out.0[full], adds[2]);
                slopes(mask, x, a, at.g, out);
            } else if sums.given {
                let out = &mut given_sum[piece.all % c..][..piece.len];
                slopes(mask, x, a, at.g, Output::add_to(out));
            }
            if of_delta {
                total -= sum_over(
                    [x, a],
                    #[inline(always)]
                    |[x, a]| x * a,
                );
            }
            if of_delta && (piece.all + piece.len).is_multiple_of(c) {
                if let Some(delta) = &mut delta {
                    let out = &mut delta.0[piece.all / c - first];
                    *out = if adds[3] { *out + total } else { total };
                } else {
                    delta_sum[0] += total;
                }
                total = 0.0;
            }
        }
    });
    if let Some(sum) = given_sum {
        add_chunks(frame.pool, sum, given_partials);
    }
    if let Some(sum) = delta_sum {
        add_chunks(frame.pool, sum, delta_partials);
    }
}

fn rows_of(gradient: Option<Output<&mut [f32]>>, columns: usize) -> Option<Rows<'_>> {
    Some(Rows(gradient?.values, columns))
}

/// The operands of a masked site as slices, and its draws.
struct Site<'a> {
    mask: Mask,
    /// Number of all rows.
    rows: usize,
    c: usize,
    a: &'a [f32],
    importance: Option<&'a [f32]>,
    given: Option<&'a [f32]>,
    /// A given row, the same for all positions.
    given_row: Option<&'a [f32]>,
    delta: Option<&'a [f32]>,
    routed: Option<&'a [u32]>,
    drawn: Option<(Uniforms, bool)>,
}

/// Adjacent elements: their offsets in this chunk's part of a compacted matrix, in the whole of it,
/// and in a matrix of all rows.
#[derive(Clone, Copy)]
struct Piece {
    own: usize,
    compacted: usize,
    all: usize,
    len: usize,
}

impl Piece {
    #[inline(always)]
    fn compacted<'t>(&self, tensor: &'t [f32]) -> &'t [f32] {
        &tensor[self.compacted..self.compacted + self.len]
    }
}

/// Operands of a tile beside the tensors.
struct Tiles {
    /// Draws or given draws; zeros if the mask has none.
    r: Tile,
    /// The delta mask of each element's row; zeros if there is none.
    delta: Tile,
    /// In place of importances that the mask does not read.
    zeros: Tile,
}

impl Tiles {
    #[inline(always)]
    fn new() -> Self {
        Self {
            r: [0.0; TILE],
            delta: [0.0; TILE],
            zeros: [0.0; TILE],
        }
    }
}

impl<'a> Site<'a> {
    /// Inputs from the one at `first` on; `room` is for the numbers of the routed rows.
    fn new(op: &Masked, first: usize, frame: &Frame<'a>, room: &'a mut [f32]) -> Self {
        let operands = op.operands(first);
        let [importance, given, delta, route] =
            operands.map(|index| index.map(|index| frame.input(index)));
        let (rows, c) = (frame.ty(first).rows(), frame.ty(first).columns());
        let (given_row, given) = match given {
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
            rows,
            c,
            a: frame.input(first),
            importance,
            given,
            given_row,
            delta,
            routed: route.map(|route| routed(route, room)),
            drawn: drawn
                .map(|(stream, coin)| (Uniforms::new(stream, frame.parameters, [rows, c]), coin)),
        }
    }

    /// The routed rows of a chunk: their numbers in the chunk's part of a compacted matrix, in the
    /// whole of it, and among all rows.
    #[inline(always)]
    fn rows(&self, range: Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
        let compacted = self
            .routed
            .map_or_else(|| range.clone(), |routed| among(routed, &range));
        compacted.enumerate().map(
            #[inline(always)]
            |(own, compacted)| {
                let row = self
                    .routed
                    .map_or(compacted, |routed| routed[compacted] as usize);
                (own, compacted, row)
            },
        )
    }

    /// A chunk in pieces no longer than a tile, of one row each if it is cut `by_row`.
    #[inline(always)]
    fn pieces(&self, range: Range<usize>, by_row: bool) -> impl Iterator<Item = Piece> {
        let c = self.c;
        let (rows, len) = if by_row || self.routed.is_some() {
            (range, c)
        } else {
            // Adjacent rows are one long row.
            (range.start..range.start + 1, range.len() * c)
        };
        self.rows(rows).flat_map(
            #[inline(always)]
            move |(own, compacted, row)| {
                (0..len).step_by(TILE).map(
                    #[inline(always)]
                    move |at| Piece {
                        own: own * c + at,
                        compacted: compacted * c + at,
                        all: row * c + at,
                        len: TILE.min(len - at),
                    },
                )
            },
        )
    }

    /// Clears the rows of a gradient that are not routed, unless it is added to.
    fn clear_others(&self, range: &Range<usize>, part: &mut [f32], add: bool) {
        if let Some(routed) = self.routed.filter(|_| !add) {
            clear_others(routed, range, part, self.c);
        }
    }

    #[inline(always)]
    fn load<'t>(&'t self, piece: &Piece, tiles: &'t mut Tiles) -> At<'t> {
        let Tiles { r, delta, zeros } = tiles;
        let (start, len) = (piece.all, piece.len);
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
        if let Some(rows) = self.delta {
            self.spread(rows, start, &mut delta[..len]);
        }
        let of = |tensor: &'t [f32]| &tensor[start..start + len];
        At {
            g: self.importance.map_or(&zeros[..len], of),
            r: self.given.map_or(&r[..len], of),
            delta: &delta[..len],
        }
    }

    /// Spreads a number for each row, or a single number, over the elements.
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

/// A row repeated, from its element `start` on.
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
    g: &'t [f32],
    r: &'t [f32],
    delta: &'t [f32],
}

impl At<'_> {
    /// `out = [out +] x (m - delta)`.
    #[inline(always)]
    fn masked(&self, mask: Mask, x: &[f32], out: Output<&mut [f32]>) {
        let elements = x.iter().zip(self.g).zip(self.r).zip(self.delta);
        known(
            mask,
            #[inline(always)]
            |mask| out.put(elements.map(|(((x, g), r), delta)| x * (of(mask, *g, *r) - delta))),
        );
    }
}

/// `out = [out +] gradient a dm / dg` with the draws as `t`, or `dm / dr` with the importances.
#[inline(always)]
fn slopes(mask: Mask, x: &[f32], a: &[f32], t: &[f32], out: Output<&mut [f32]>) {
    // 1 - t for a mask between importance and 1, and 1 for the importance or the draw itself.
    let share = if let Mask::Between(_) = mask {
        1.0
    } else {
        0.0
    };
    let elements = x.iter().zip(a).zip(t);
    out.put(elements.map(|((x, a), t)| x * a * (1.0 - share * t)));
}
