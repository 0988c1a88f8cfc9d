use super::MatMul;
use crate::cpu::shape::Shape;
use crate::cuda::lowering::Lowering;
use crate::cuda::product::Product;

pub(super) fn value(op: &MatMul, to: &mut Lowering<'_>) {
    let Shape { m, n, k } = op.shape(to.ty(0), to.ty(1));
    let a = Lowering::matrix(to.input(0), to.ty(0).columns(), op.a_transposed);
    let b = Lowering::matrix(to.input(1), to.ty(1).columns(), op.b_transposed);
    let out = Lowering::matrix(to.output(0), n, false);
    to.trimmed_product(Product {
        alpha: op.alpha,
        add: to.adds(0),
        bias: (to.inputs() > 2).then(|| to.input(2)),
        ..Product::new([m, n, k], [a, b, out])
    });
}
