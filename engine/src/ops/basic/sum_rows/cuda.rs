use crate::cuda::lowering::{Lowering, Source, arguments, constants, vector};
use crate::cuda::operand::Operand;

const KERNELS: Source = Source::new("sum_rows", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let y = (to.output(0), to.adds(0));
    to.sum_rows(to.input(0), to.ty(0).columns(), y);
}

impl Lowering<'_> {
    /// Adds the launches `y = [y +] sum of the rows of x`.
    pub(crate) fn sum_rows(&mut self, x: Operand, columns: usize, y: (Operand, bool)) {
        let rows = x.len / columns.max(1);
        let width = vector(columns, x.dtype);
        let sums = self.row_sums(rows, columns, width);
        let constants = constants![rows, columns, sums.stretch, width];
        self.kernel(KERNELS, "sum_rows_parts", &constants)
            .blocks(sums.blocks[0], sums.blocks[1])
            .launch(&arguments![x, sums.parts.out()]);
        self.add_stretches(sums.parts, (0, columns), y);
    }
}
