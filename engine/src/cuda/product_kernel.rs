//! Our own kernel for products that cublasLt refuses, or that are too thin for its tiles.

use super::lowering::{Argument, Launch, Lowering, Source, arguments, constants};
use super::product::{Matrix, Product};

/// Source of the kernels.
pub(super) const KERNELS: Source = Source::new("product", include_str!("product.cu"));

impl Product {
    /// Launch that computes the product; operands: the factors, the result, the bias if there is
    /// one.
    pub(crate) fn launch(&self) -> Launch {
        let &Self { m, n, k, batch, .. } = self;
        let [rows, columns, high, wide] = match (m <= 16, n <= 16) {
            (true, true) => [16, 16, 1, 1],
            (false, true) => [256, 16, 4, 4],
            (true, false) => [16, 256, 4, 4],
            (false, false) => [64, 64, 4, 4],
        };
        let word = |size: usize| Argument::Word(u32::try_from(size).expect("elements of a matrix"));
        let strides = |matrix: &Matrix| {
            let (row, column) = if matrix.transposed {
                (1, matrix.pitch)
            } else {
                (matrix.pitch, 1)
            };
            Argument::List([row, column, matrix.step].map(word).to_vec())
        };
        let constants = constants![rows, columns, high, wide, self.add, self.bias.is_some()];
        let mut to = Lowering::new(&[], &[], &[]);
        to.kernel(KERNELS, "multiply_tiles", &constants)
            .blocks(batch * m.div_ceil(rows) * n.div_ceil(columns), 1)
            .launch(&arguments![
                self.a.operand,
                self.b.operand,
                self.bias,
                self.out.operand.out(),
                Argument::Word(self.alpha.to_bits()),
                word(m),
                word(n),
                word(k),
                strides(&self.a),
                strides(&self.b),
                strides(&self.out),
            ]);
        to.only_launch()
    }
}
