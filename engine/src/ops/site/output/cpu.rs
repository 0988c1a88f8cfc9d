use super::{SiteOutput, shape};
use crate::cpu::gemm::Product;
use crate::cpu::reduce::{add_chunks, sum_over};
use crate::cpu::routed_rows::routed;
use crate::cpu::shape::{Matrix, Shape};
use crate::cpu::{Frame, Output, PerChunk, Rows, listed};
use crate::ops::each_chunk;

pub(super) fn forward(op: &SiteOutput, frame: &mut Frame<'_>) {
    let y = frame.output(0).values;
    let (h, u, clean) = (frame.input(0), frame.input(1), frame.input(2));
    let [bias, delta, route] = op
        .after(3)
        .map(|index| index.map(|index| frame.input(index)));
    let Shape { m, n, k } = shape(&[frame.ty(0), frame.ty(1)]);
    each_chunk!(frame, [m, n], Rows(&mut *y, n), |range, y| {
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
    });
    let (room, scratch) = frame.scratch().split_at_mut(route.map_or(0, <[f32]>::len));
    let routed = route.map(|route| routed(route, room));
    let m = routed.map_or(m, <[u32]>::len);
    let product = Product {
        precision: frame.precision(),
        shape: Shape { m, n, k },
        alpha: 1.0,
        a: Matrix::plain(&h[..m * k]),
        b: Matrix::plain(u),
        packed: None,
        to: routed,
    };
    listed::product(frame.pool, &product, Output::add_to(y), scratch);
}

pub(super) fn share_of_rows(op: &SiteOutput, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let g = frame.input(0);
    let [_, delta, route] = op
        .after(1)
        .map(|index| index.map(|index| frame.input(index)));
    let (rows, n) = (frame.ty(0).rows(), frame.ty(0).columns());
    each_chunk!(frame, [rows, n], Rows(out, n), |range, out| {
        for (row, out) in range.zip(out.0.chunks_exact_mut(n)) {
            let s = share(delta, route, row);
            Output::new(out, add).put(g[row * n..][..n].iter().map(|g| s * g));
        }
    });
}

/// `r (c - b) . G` at each position, or summed over all.
pub(super) fn delta_grad(op: &SiteOutput, frame: &mut Frame<'_>) {
    let out = frame.output(0);
    let partials = frame.scratch();
    let [bias, _, route] = op
        .after(2)
        .map(|index| index.map(|index| frame.input(index)));
    let (rows, n) = (frame.ty(0).rows(), frame.ty(0).columns());
    let outputs = Outputs {
        gradient: frame.input(0),
        clean: frame.input(1),
        bias,
        route,
        n,
    };
    if out.values.len() < rows {
        let parts = PerChunk(&mut *partials, 1);
        each_chunk!(frame, [rows, n], parts, |range, partial| {
            partial.0[0] = range.map(|row| outputs.dot(row)).sum();
        });
        add_chunks(frame.pool, out, partials);
        return;
    }
    let Output { values, add } = out;
    each_chunk!(frame, [rows, n], Rows(values, 1), |range, out| {
        Output::new(out.0, add).put(range.map(|row| outputs.dot(row)));
    });
}

struct Outputs<'a> {
    gradient: &'a [f32],
    clean: &'a [f32],
    bias: Option<&'a [f32]>,
    route: Option<&'a [f32]>,
    n: usize,
}

impl Outputs<'_> {
    /// `r (c - b) . G` of a row.
    #[inline(always)]
    fn dot(&self, row: usize) -> f32 {
        let columns = row * self.n..(row + 1) * self.n;
        let (g, clean) = (&self.gradient[columns.clone()], &self.clean[columns]);
        let dot = match self.bias {
            Some(bias) => sum_over(
                [g, clean, bias],
                #[inline(always)]
                |[g, c, b]| g * (c - b),
            ),
            None => sum_over(
                [g, clean],
                #[inline(always)]
                |[g, c]| g * c,
            ),
        };
        self.route.map_or(1.0, |route| route[row]) * dot
    }
}

/// `s = r d + (1 - r)`: the share of the clean output in a row.
#[inline(always)]
fn share(delta: Option<&[f32]>, route: Option<&[f32]>, row: usize) -> f32 {
    let d = delta.map_or(0.0, |delta| delta[row.min(delta.len() - 1)]);
    let r = route.map_or(1.0, |route| route[row]);
    r * d + (1.0 - r)
}
