use super::MatMul;
use crate::cpu::gemm::{self, Product};
use crate::cpu::shape::Matrix;
use crate::cpu::{Frame, Output, Rows, sparse};
use crate::ops::grain_rows;

pub(super) fn run(op: &MatMul, frame: &mut Frame<'_>) {
    let mut out = frame.output(0);
    let scratch = frame.scratch();
    // A factor held in bf16 is given only in its packed form.
    let (a, b) = (frame.input(0), frame.input_unless_packed(1));
    let shape = op.shape(frame.ty(0), frame.ty(1));
    if frame.inputs() > 2 {
        let bias = frame.input(2);
        frame.pool.run(
            shape.m,
            grain_rows(shape.m, shape.n),
            Rows(&mut *out.values, shape.n),
            |_, rows| {
                for row in rows.0.chunks_exact_mut(shape.n) {
                    Output::new(row, out.add).put(bias.iter().copied());
                }
            },
        );
        out.add = true;
    }
    let product = Product {
        precision: frame.precision(),
        shape,
        alpha: op.alpha,
        a: Matrix::of(a, op.a_transposed),
        b: Matrix::of(b, op.b_transposed),
        packed: frame.packed(1, op.b_transposed),
        to: None,
    };
    if b.is_empty() || !sparse::product(frame.pool, &product, out.reborrow()) {
        gemm::product(frame.pool, &product, out, scratch);
    }
}
