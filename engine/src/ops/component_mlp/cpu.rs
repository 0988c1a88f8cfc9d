use crate::cpu::math::{gelu, normal, vectorised};
use crate::cpu::{Frame, PerChunk, Rows};
use crate::ops::sum_rows::cpu::add_partials;

/// Rows that go through a hidden unit at once, and rows of a chunk.
pub(super) const BLOCK: usize = 256;

/// Lanes of the sums over rows.
const LANES: usize = 16;

type Column = [f32; BLOCK];

pub(super) fn forward(frame: &mut Frame<'_>) {
    let (z, _) = frame.output(0);
    let [a, w1, b1, w2, b2] = [0, 1, 2, 3, 4].map(|index| frame.input(index));
    let (rows, c, h) = (
        frame.ty(0).rows(),
        frame.ty(0).columns(),
        frame.ty(1).columns(),
    );
    frame.pool.run(rows, BLOCK, Rows(z, c), |range, z| {
        vectorised(
            #[inline(always)]
            || {
                let a = &a[range.start * c..range.end * c];
                for component in 0..c {
                    let mut x = [0.0; BLOCK];
                    gather(a, c, component, &mut x);
                    let mut total = [b2[component]; BLOCK];
                    for unit in component * h..(component + 1) * h {
                        let (w1, b1, w2) = (w1[unit], b1[unit], w2[unit]);
                        for (total, x) in total.iter_mut().zip(&x) {
                            *total = w2.mul_add(gelu(w1.mul_add(*x, b1)), *total);
                        }
                    }
                    for (row, total) in z.0.chunks_exact_mut(c).zip(&total) {
                        row[component] = *total;
                    }
                }
            },
        );
    });
}

pub(super) fn backward(frame: &mut Frame<'_>) {
    let [gradient, a, w1, b1, w2] = [0, 1, 2, 3, 4].map(|index| frame.input(index));
    let (rows, c, h) = (
        frame.ty(1).rows(),
        frame.ty(1).columns(),
        frame.ty(2).columns(),
    );
    let (ga, add) = frame.output(0);
    // Per chunk the gradients of w1, b1 and w2 [c, h] each, then of b2 [c].
    let width = c * (3 * h + 1);
    let partials = frame.scratch();
    let parts = (Rows(ga, c), PerChunk(&mut *partials, width));
    frame.pool.run(rows, BLOCK, parts, |range, (ga, partial)| {
        vectorised(
            #[inline(always)]
            || {
                let (gw1, rest) = partial.0.split_at_mut(c * h);
                let (gb1, rest) = rest.split_at_mut(c * h);
                let (gw2, gb2) = rest.split_at_mut(c * h);
                let (a, gradient) = (
                    &a[range.start * c..range.end * c],
                    &gradient[range.start * c..range.end * c],
                );
                for component in 0..c {
                    let (mut x, mut g) = ([0.0; BLOCK], [0.0; BLOCK]);
                    gather(a, c, component, &mut x);
                    gather(gradient, c, component, &mut g);
                    let mut total = [0.0; BLOCK];
                    for unit in component * h..(component + 1) * h {
                        let weights = [w1[unit], b1[unit], w2[unit]];
                        [gw1[unit], gb1[unit], gw2[unit]] =
                            hidden_unit(&x, &g, weights, &mut total);
                    }
                    gb2[component] = column_sum(&g);
                    for (row, total) in ga.0.chunks_exact_mut(c).zip(&total) {
                        row[component] = if add { row[component] + total } else { *total };
                    }
                }
            },
        );
    });
    // The chunks lie one after another; each weight's part of a chunk is summed over the chunks in order.
    let partials = &*partials;
    for (index, (start, len)) in [
        (0, c * h),
        (c * h, c * h),
        (2 * c * h, c * h),
        (3 * c * h, c),
    ]
    .into_iter()
    .enumerate()
    {
        let (out, mut add) = frame.output(index + 1);
        for chunk in partials.chunks_exact(width) {
            add_partials(out, add, &chunk[start..start + len]);
            add = true;
        }
    }
}

/// One hidden unit over a block: adds to the gradient of the activations, returns those of its weights.
#[inline(always)]
fn hidden_unit(x: &Column, g: &Column, [w1, b1, w2]: [f32; 3], total: &mut Column) -> [f32; 3] {
    let (mut gw1, mut gb1, mut gw2) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    for start in (0..BLOCK).step_by(LANES) {
        for lane in 0..LANES {
            let (x, g) = (x[start + lane], g[start + lane]);
            let p = w1.mul_add(x, b1);
            let (phi, density) = normal(p);
            let t = g * w2 * p.mul_add(density, phi);
            total[start + lane] = t.mul_add(w1, total[start + lane]);
            gw1[lane] = t.mul_add(x, gw1[lane]);
            gb1[lane] += t;
            gw2[lane] = g.mul_add(p * phi, gw2[lane]);
        }
    }
    [lane_sum(gw1), lane_sum(gb1), lane_sum(gw2)]
}

/// One column of a block of rows; rows past the end stay zero, and contribute nothing.
#[inline(always)]
fn gather(rows: &[f32], c: usize, component: usize, column: &mut Column) {
    for (row, value) in rows.chunks_exact(c).zip(column) {
        *value = row[component];
    }
}

#[inline(always)]
fn column_sum(column: &Column) -> f32 {
    let mut lanes = [0f32; LANES];
    for start in (0..BLOCK).step_by(LANES) {
        for lane in 0..LANES {
            lanes[lane] += column[start + lane];
        }
    }
    lane_sum(lanes)
}

#[inline(always)]
fn lane_sum(lanes: [f32; LANES]) -> f32 {
    lanes.iter().sum()
}
