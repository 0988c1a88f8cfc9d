//! A captured graph has fixed sizes, so here a compacted matrix has all rows in their places, and
//! those that are not routed are zero: rows of a left factor are cleared before a product, and rows
//! of the result after it.

use super::{Kind, RoutedMatMul};
use crate::cpu::shape::Shape;
use crate::cuda::lowering::{Lowering, Source, arguments, constants};
use crate::cuda::operand::Operand;
use crate::cuda::product::Product;

const KERNELS: Source = Source::new("routed_matmul", include_str!("kernel.cu"));

pub(super) fn value(op: RoutedMatMul, to: &mut Lowering<'_>) {
    let types = [0, 1].map(|index| to.ty(index));
    let Shape { m, n, k } = op.shape(&types);
    let [mut a, b] = [0, 1].map(|index| to.input(index));
    if let (Kind::Rows { .. }, true) = (op.kind, op.second) {
        let route = to.input(to.inputs() - 1);
        let routed = to.scratch_of(a.dtype, m * k);
        scale((a, route), (m, k), (routed.out(), false), to);
        a = routed;
    }
    let [a_transposed, b_transposed] = op.stored();
    let a = Lowering::matrix(a, types[0].columns(), a_transposed);
    let b = Lowering::matrix(b, types[1].columns(), b_transposed);
    let out = Lowering::matrix(to.output(0), n, false);
    to.trimmed_product(Product {
        add: to.adds(0),
        ..Product::new([m, n, k], [a, b, out])
    });
}

pub(super) fn compact_rows(to: &mut Lowering<'_>) {
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let operands = (to.input(0), to.input(1));
    let out = (to.output(0), to.adds(0));
    scale(operands, (rows, columns), out, to);
}

/// `out = [out +] route x`.
fn scale(
    (x, route): (Operand, Operand),
    (rows, columns): (usize, usize),
    (out, add): (Operand, bool),
    to: &mut Lowering<'_>,
) {
    to.kernel(KERNELS, "routed_rows", &constants![rows, columns, add])
        .fours(rows, columns)
        .launch(&arguments![x, route, out]);
}
