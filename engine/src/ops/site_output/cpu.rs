use super::SiteOutput;
use crate::cpu::gemm::{Matrix, Shape, product};
use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::grain_rows;

pub(super) fn forward(op: &SiteOutput, frame: &mut Frame<'_>) {
    let (y, _) = frame.output(0);
    let (h, u, clean) = (frame.input(0), frame.input(1), frame.input(2));
    let [bias, delta, route] = op
        .after(3)
        .map(|index| index.map(|index| frame.input(index)));
    let shape = Shape {
        m: frame.ty(0).rows(),
        n: frame.ty(1).columns(),
        k: frame.ty(1).rows(),
    };
    let n = shape.n;
    frame
        .pool
        .run(shape.m, grain_rows(n), Rows(&mut *y, n), |range, y| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, y) in range.zip(y.0.chunks_exact_mut(n)) {
                        let s = share(delta, route, row);
                        let clean = &clean[row * n..][..n];
                        match bias {
                            Some(bias) => {
                                for i in 0..n {
                                    y[i] = s * clean[i] + (1.0 - s) * bias[i];
                                }
                            }
                            None => y.iter_mut().zip(clean).for_each(|(y, c)| *y = s * c),
                        }
                    }
                },
            );
        });
    let operands = (
        Matrix {
            values: h,
            transposed: false,
        },
        Matrix {
            values: u,
            transposed: false,
        },
    );
    product(frame.pool, shape, 1.0, operands, (y, true), frame.scratch());
}

pub(super) fn clean_grad(op: &SiteOutput, frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let g = frame.input(0);
    let [_, delta, route] = op
        .after(1)
        .map(|index| index.map(|index| frame.input(index)));
    let n = frame.ty(0).columns();
    frame.pool.run(
        frame.ty(0).rows(),
        grain_rows(n),
        Rows(out, n),
        |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    for (row, out) in range.zip(out.0.chunks_exact_mut(n)) {
                        let s = share(delta, route, row);
                        for (out, g) in out.iter_mut().zip(&g[row * n..][..n]) {
                            *out = if add { *out + s * g } else { s * g };
                        }
                    }
                },
            );
        },
    );
}

/// `s = r d + (1 - r)`: the share of the clean output at a row.
#[inline(always)]
fn share(delta: Option<&[f32]>, route: Option<&[f32]>, row: usize) -> f32 {
    let d = delta.map_or(0.0, |delta| delta[row]);
    let r = route.map_or(1.0, |route| route[row]);
    r * d + (1.0 - r)
}
