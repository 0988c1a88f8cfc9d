use crate::cpu::{Frame, Output, Rows};
use crate::ops::{each_chunk, grain_rows};

pub(super) fn forward(frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let [x, w, bias] = [0, 1, 2].map(|index| frame.input(index));
    let (rows, dims) = (frame.ty(0).rows(), &frame.ty(1).dims);
    let (c, i, o) = (dims[0], dims[1], dims[2]);
    each_chunk!(frame, [rows, c * i * o], Rows(y, c * o), |range, y| {
        y.0.chunks_exact_mut(c * o)
            .for_each(|row| row.copy_from_slice(bias));
        for (x, y) in x[range.start * c * i..]
            .chunks_exact(c * i)
            .zip(y.0.chunks_exact_mut(c * o))
        {
            for component in 0..c {
                let y = &mut y[component * o..][..o];
                let w = &w[component * i * o..][..i * o];
                for (x, w) in x[component * i..][..i].iter().zip(w.chunks_exact(o)) {
                    for (y, w) in y.iter_mut().zip(w) {
                        *y = x.mul_add(*w, *y);
                    }
                }
            }
        }
    });
}

pub(super) fn input_grad(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (g, w) = (frame.input(0), frame.input(1));
    let (rows, dims) = (frame.ty(0).rows(), &frame.ty(1).dims);
    let (c, i, o) = (dims[0], dims[1], dims[2]);
    each_chunk!(frame, [rows, c * i * o], Rows(out, c * i), |range, out| {
        for (g, out) in g[range.start * c * o..]
            .chunks_exact(c * o)
            .zip(out.0.chunks_exact_mut(c * i))
        {
            for component in 0..c {
                let g = &g[component * o..][..o];
                let w = &w[component * i * o..][..i * o];
                let term = |w: &[f32]| {
                    let pairs = g.iter().zip(w);
                    pairs.fold(0.0f32, |sum, (g, w)| g.mul_add(*w, sum))
                };
                let out = Output::new(&mut out[component * i..][..i], add);
                out.put(w.chunks_exact(o).map(term));
            }
        }
    });
}

pub(super) fn weight_grad([c, i, o]: [usize; 3], frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (g, x) = (frame.input(0), frame.input(1));
    let rows = frame.ty(0).rows();
    // Chunks hold whole components, so that each sum over rows is made by one chunk, in order.
    let chunk = grain_rows(c, rows * i * o);
    each_chunk!(frame, c, chunk, Rows(out, i * o), |components, out| {
        if !add {
            out.0.fill(0.0);
        }
        for row in 0..rows {
            for (component, out) in components.clone().zip(out.0.chunks_exact_mut(i * o)) {
                let g = &g[row * c * o + component * o..][..o];
                let x = &x[row * c * i + component * i..][..i];
                for (x, out) in x.iter().zip(out.chunks_exact_mut(o)) {
                    for (out, g) in out.iter_mut().zip(g) {
                        *out = x.mul_add(*g, *out);
                    }
                }
            }
        }
    });
}
