use super::{SiteOutput, shape};
use crate::cpu::shape::Shape;
use crate::cuda::lowering::{Argument, Constant, Lowering, Source, row_threads, stretches};
use crate::cuda::product::Product;

const KERNELS: Source = Source::new("site_output", include_str!("kernel.cu"));

/// Bias, delta and route, and the number of deltas.
fn after(op: &SiteOutput, first: usize, to: &Lowering<'_>) -> ([Argument; 3], usize) {
    let at = op.after(first);
    let deltas = at[1].map_or(0, |index| to.ty(index).len());
    let operands = at.map(|index| Argument::from(index.map(|index| to.input(index))));
    (operands, deltas)
}

pub(super) fn value(op: &SiteOutput, to: &mut Lowering<'_>) {
    let Shape { m, n, k } = shape(&[to.ty(0), to.ty(1)]);
    let [h, u, clean] = [0, 1, 2].map(|index| to.input(index));
    let ([bias, delta, route], deltas) = after(op, 3, to);
    let y = to.output(0);
    let sizes = [m, n].map(Constant::from);
    let settings = [op.bias.into(), deltas.into(), op.route.into()];
    let constants = [&sizes[..], &settings[..]].concat();
    to.kernel(KERNELS, "site_output_start", &constants)
        .fours(m, n)
        .launch(&[clean.into(), bias, delta, route, y.into()]);
    to.product(Product {
        m,
        n,
        k,
        alpha: 1.0,
        a: Lowering::matrix(h, k, false),
        b: Lowering::matrix(u, n, false),
        out: Lowering::matrix(y, n, false),
        add: true,
        bias: None,
        batch: 1,
    });
}

pub(super) fn share_of_rows(op: &SiteOutput, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let g = to.input(0);
    let ([_, delta, route], deltas) = after(op, 1, to);
    let constants = [
        rows.into(),
        columns.into(),
        deltas.into(),
        op.route.into(),
        to.adds(0).into(),
    ];
    let out = to.output(0);
    to.kernel(KERNELS, "site_share", &constants)
        .fours(rows, columns)
        .launch(&[g.into(), delta, route, out.into()]);
}

pub(super) fn bias_gradient(op: &SiteOutput, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let g = to.input(0);
    let ([_, delta, route], deltas) = after(op, 1, to);
    let (stretch, count) = stretches(rows, columns);
    let parts = to.scratch(count * columns);
    let constants = [
        rows.into(),
        columns.into(),
        stretch.into(),
        deltas.into(),
        op.route.into(),
    ];
    to.kernel(KERNELS, "site_output_bias_parts", &constants)
        .blocks(columns.div_ceil(32), count)
        .launch(&[g.into(), delta, route, parts.out().into()]);
    let out = (to.output(0), to.adds(0));
    to.add_stretches(parts, (0, columns), out);
}

pub(super) fn delta_gradient(op: &SiteOutput, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (g, clean) = (to.input(0), to.input(1));
    let ([bias, _, route], _) = after(op, 2, to);
    let out = (to.output(0), to.adds(0));
    let summed = out.0.len < rows;
    let dots = if summed { to.scratch(rows) } else { out.0 };
    let threads = row_threads(columns);
    let constants = [
        threads.into(),
        columns.into(),
        op.bias.into(),
        op.route.into(),
        (out.1 && !summed).into(),
    ];
    to.kernel(KERNELS, "site_output_delta_grad", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&[g.into(), clean.into(), bias, route, dots.out().into()]);
    if summed {
        to.sum_parts(dots, out, 1.0);
    }
}
