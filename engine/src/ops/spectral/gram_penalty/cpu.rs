use super::{LEAST, Sizes};
use crate::cpu::math::dot;
use crate::cpu::reduce::{add_scaled, mean};
use crate::cpu::{Frame, Output, PerChunk, Rows};
use crate::ops::each_chunk;

pub(super) fn run(frame: &mut Frame<'_>) {
    let [y, gram, norms] = [0, 1, 2].map(|at| frame.output(at).values);
    let partials = frame.scratch();
    let (phi, sizes) = (frame.input(0), Sizes::new(frame.ty(0)));
    let columns = sizes.columns;
    let parts = (
        Rows(gram, columns * columns),
        Rows(norms, columns),
        PerChunk(&mut *partials, 1),
    );
    each_chunk!(
        frame,
        sizes.batch,
        1,
        parts,
        |range, (gram, norms, partial)| {
            let len = sizes.positions * columns;
            let phi = &phi[range.start * len..][..len];
            partial.0[0] = distance(phi, gram.0, norms.0);
        }
    );
    y[0] = mean(&partials[..sizes.batch], sizes.elements());
}

/// Makes the matrix and the norms of a basis, and returns `|G - I|^2`.
#[inline(always)]
fn distance(phi: &[f32], gram: &mut [f32], norms: &mut [f32]) -> f32 {
    let columns = norms.len();
    gram.fill(0.0);
    for row in phi.chunks_exact(columns) {
        for (gram, x) in gram.chunks_exact_mut(columns).zip(row) {
            add_scaled(gram, *x, row);
        }
    }
    for (at, norm) in norms.iter_mut().enumerate() {
        let found = gram[at * columns + at].sqrt();
        // Keeps NaN.
        *norm = if found < LEAST { LEAST } else { found };
    }
    let mut sum = 0.0;
    for (k, row) in gram.chunks_exact_mut(columns).enumerate() {
        for (x, norm) in row.iter_mut().zip(&*norms) {
            *x = *x / norms[k] / norm;
        }
        let diagonal = row[k];
        sum += dot(row, row) - 2.0f32.mul_add(diagonal, -1.0);
    }
    sum
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let scratch = frame.scratch();
    let [phi, gram, norms, up] = [0, 1, 2, 3].map(|at| frame.input(at));
    let sizes = Sizes::new(frame.ty(0));
    let columns = sizes.columns;
    let len = sizes.positions * columns;
    let factor = 4.0 * up[0] / sizes.elements() as f32;
    let parts = (Rows(out, len), PerChunk(scratch, 3 * columns));
    each_chunk!(frame, sizes.batch, 1, parts, |range, (out, scratch)| {
        let at = range.start;
        let phi = &phi[at * len..][..len];
        let gram = &gram[at * columns * columns..][..columns * columns];
        let norms = &norms[at * columns..][..columns];
        let (dots, scratch) = scratch.0.split_at_mut(columns);
        let (q, p) = scratch.split_at_mut(columns);
        // (G E)_kk.
        let rows = gram.chunks_exact(columns).zip(norms);
        for (k, (to, (row, norm))) in dots.iter_mut().zip(rows).enumerate() {
            *to = if *norm > LEAST {
                dot(row, row) - row[k]
            } else {
                0.0
            };
        }
        let rows = out.0.chunks_exact_mut(columns);
        for (out, phi) in rows.zip(phi.chunks_exact(columns)) {
            for (q, (x, norm)) in q.iter_mut().zip(phi.iter().zip(norms)) {
                *q = x / norm;
            }
            for (p, q) in p.iter_mut().zip(&*q) {
                *p = -q;
            }
            for (gram, q) in gram.chunks_exact(columns).zip(&*q) {
                add_scaled(p, *q, gram);
            }
            let terms = p.iter().zip(&*q).zip(dots.iter().zip(norms));
            let slope = |((p, q), (dot, norm)): ((&f32, &f32), (&f32, &f32))| {
                factor * (-q).mul_add(*dot, *p) / norm
            };
            Output::new(out, add).put(terms.map(slope));
        }
    });
}
