use super::MatMul;
use crate::cpu::shape::Shape;
use crate::cuda::lowering::Lowering;
use crate::cuda::product::Product;

pub(super) fn value(op: &MatMul, to: &mut Lowering<'_>) {
    let Shape { m, n, k } = op.shape(to.ty(0), to.ty(1));
    let (a, b) = (to.input(0), to.input(1));
    to.trimmed_product(Product {
        m,
        n,
        k,
        alpha: op.alpha,
        a: Lowering::matrix(a, to.ty(0).columns(), op.a_transposed),
        b: Lowering::matrix(b, to.ty(1).columns(), op.b_transposed),
        out: Lowering::matrix(to.output(0), n, false),
        add: to.adds(0),
        bias: (to.inputs() > 2).then(|| to.input(2)),
        batch: 1,
    });
}
