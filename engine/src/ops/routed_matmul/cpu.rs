use super::{Kind, RoutedMatMul};
use crate::cpu::gemm::{Matrix, Shape, product};
use crate::cpu::packed::{Packed, among, clear_others, routed};
use crate::cpu::{Frame, Pool, Rows};
use crate::ops::grain_rows;

pub(super) fn run(op: RoutedMatMul, frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let (a, b, route) = (frame.input(0), frame.input(1), frame.input(2));
    let types = [0, 1, 2].map(|index| frame.ty(index));
    let shape = op.shape(&types);
    let (room, scratch) = frame.scratch().split_at_mut(route.len());
    let rows = routed(route, room);
    let copied = op.copied(shape);
    let (copy, scratch) = scratch.split_at_mut(route.len() * copied);
    let copy = &mut copy[..rows.len() * copied];
    let all = (route.len(), rows);
    let plain = |values| Matrix {
        values,
        transposed: false,
    };
    let turned = |values| Matrix {
        values,
        transposed: true,
    };
    let Shape { m, n, k } = shape;
    let pool = frame.pool;
    match op.kind {
        Kind::Pack { transposed } => {
            gather(pool, all, a, (&mut *copy, k));
            let b = Matrix {
                values: b,
                transposed,
            };
            let shape = Shape {
                m: rows.len(),
                n,
                k,
            };
            let out = &mut out[..rows.len() * n];
            multiply(pool, shape, (plain(copy), b), (out, add), scratch);
        }
        Kind::Unpack => {
            let shape = Shape {
                m: rows.len(),
                n,
                k,
            };
            let factors = (plain(&a[..rows.len() * k]), turned(b));
            multiply(pool, shape, factors, (&mut *copy, false), scratch);
            scatter(pool, all, copy, (out, add), n);
        }
        Kind::Sums { left } => {
            let (gathered, packed) = if left { (b, a) } else { (a, b) };
            gather(pool, all, gathered, (&mut *copy, copied));
            let packed = &packed[..rows.len() * if left { m } else { n }];
            let (a, b) = if left {
                (packed, &*copy)
            } else {
                (&*copy, packed)
            };
            let shape = Shape {
                m,
                n,
                k: rows.len(),
            };
            multiply(pool, shape, (turned(a), plain(b)), (out, add), scratch);
        }
    }
}

pub(super) fn pack_rows(back: bool, frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let (x, route) = (frame.input(0), frame.input(1));
    let columns = frame.ty(0).columns();
    let all = (route.len(), routed(route, frame.scratch()));
    if back {
        scatter(frame.pool, all, x, (out, add), columns);
    } else {
        gather(frame.pool, all, x, (out, columns));
    }
}

/// As [`product`], where there may be no rows and no sums.
fn multiply(
    pool: &Pool,
    shape: Shape,
    factors: (Matrix<'_>, Matrix<'_>),
    (out, add): (&mut [f32], bool),
    scratch: &mut [f32],
) {
    if shape.m > 0 && shape.k > 0 {
        product(pool, shape, 1.0, factors, (out, add), scratch);
    } else if !add {
        out.fill(0.0);
    }
}

/// Copies the routed ones of all rows.
fn gather(
    pool: &Pool,
    (all, rows): (usize, &[u32]),
    from: &[f32],
    (to, columns): (&mut [f32], usize),
) {
    let parts = Packed::new(to, columns, Some(rows));
    pool.run(all, grain_rows(columns), parts, |range, mut to| {
        for (own, &row) in rows[among(rows, &range)].iter().enumerate() {
            to.part(own * columns, columns)
                .copy_from_slice(&from[row as usize * columns..][..columns]);
        }
    });
}

/// `out = [out +]` packed rows where they belong, and 0 elsewhere.
pub(in crate::ops) fn scatter(
    pool: &Pool,
    (all, rows): (usize, &[u32]),
    from: &[f32],
    (out, add): (&mut [f32], bool),
    columns: usize,
) {
    pool.run(
        all,
        grain_rows(columns),
        Rows(out, columns),
        |range, out| {
            if !add {
                clear_others(rows, &range, out.0, columns);
            }
            let packed = among(rows, &range);
            for (packed, &row) in packed.clone().zip(&rows[packed]) {
                let from = &from[packed * columns..][..columns];
                let out = &mut out.0[(row as usize - range.start) * columns..][..columns];
                if add {
                    out.iter_mut()
                        .zip(from)
                        .for_each(|(out, from)| *out += from);
                } else {
                    out.copy_from_slice(from);
                }
            }
        },
    );
}
