use super::{SiteOutput, shape};
use crate::cpu::shape::Shape;
use crate::cuda::lowering::{Argument, Lowering, Source, arguments, constants, row_threads};
use crate::cuda::product::Product;

const KERNELS: Source = Source::new("site_output", include_str!("kernel.cu"));

/// Bias, delta and route, and the number of deltas.
fn after(op: &SiteOutput, first: usize, to: &Lowering<'_>) -> ([Argument; 3], usize) {
    let at = op.after(first);
    let deltas = at[1].map_or(0, |index| to.ty(index).len());
    let operands = at.map(|index| Argument::from(index.map(|index| to.input(index))));
    (operands, deltas)
}

/// Of a site without routes.
pub(super) fn value(op: &SiteOutput, to: &mut Lowering<'_>) {
    let Shape { m, n, k } = shape(&[to.ty(0), to.ty(1)]);
    let [h, u, clean] = [0, 1, 2].map(|index| to.input(index));
    let ([bias, delta, _], deltas) = after(op, 3, to);
    let y = to.output(0);
    to.kernel(
        KERNELS,
        "site_output_start",
        &constants![m, n, op.bias, deltas],
    )
    .fours(m, n)
    .launch(&arguments![clean, bias, delta, y]);
    let matrices = [(h, k), (u, n), (y, n)].map(|(of, pitch)| Lowering::matrix(of, pitch, false));
    to.product(Product {
        add: true,
        ..Product::new([m, n, k], matrices)
    });
}

pub(super) fn share_of_rows(op: &SiteOutput, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let g = to.input(0);
    let ([_, delta, route], deltas) = after(op, 1, to);
    let constants = constants![rows, columns, deltas, op.route, to.adds(0)];
    let out = to.output(0);
    to.kernel(KERNELS, "site_share", &constants)
        .fours(rows, columns)
        .launch(&arguments![g, delta, route, out]);
}

pub(super) fn delta_gradient(op: &SiteOutput, to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let (g, clean) = (to.input(0), to.input(1));
    let ([bias, _, route], _) = after(op, 2, to);
    let out = (to.output(0), to.adds(0));
    let summed = out.0.len < rows;
    let dots = if summed { to.scratch(rows) } else { out.0 };
    let threads = row_threads(columns);
    let constants = constants![threads, columns, op.bias, op.route, out.1 && !summed];
    to.kernel(KERNELS, "site_output_delta_grad", &constants)
        .blocks(rows, 1)
        .threads(threads)
        .launch(&arguments![g, clean, bias, route, dots.out()]);
    if summed {
        to.sum_parts(dots, out, 1.0);
    }
}
