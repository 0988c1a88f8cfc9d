use crate::cuda::lowering::{Lowering, Source, arguments, constants, vector};
use crate::cuda::operand::Operand;
use crate::cuda::product::{Matrix, Product};

const KERNELS: Source = Source::new("parallel_linear", include_str!("kernel.cu"));

/// Whether the kernels of one result for each component compute it; a product with a side of 1 would
/// fill a sixteenth of a tile at most.
fn is_thin(i: usize, o: usize) -> bool {
    o == 1 && i <= 32
}

/// Threads of a block of `parallel_dots`.
const DOTS: usize = 128;

/// An operand as a matrix: `each` columns for each component, in rows of `pitch`.
fn columns(operand: Operand, pitch: usize, each: usize, transposed: bool) -> Matrix {
    Matrix {
        operand,
        pitch,
        transposed,
        step: each,
    }
}

/// The weights of all components, f32 `[c, i, o]`.
fn weights(operand: Operand, i: usize, o: usize, transposed: bool) -> Matrix {
    columns(operand, o, i * o, transposed)
}

fn dims(weight: &[usize]) -> [usize; 3] {
    weight.try_into().expect("a weight has 3 dimensions")
}

pub(super) fn value(to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let [c, i, o] = dims(&to.ty(1).dims);
    let [x, w, bias] = [0, 1, 2].map(|index| to.input(index));
    let y = to.output(0);
    if is_thin(i, o) {
        let stretch = rows.div_ceil(1024).max(8);
        let constants = constants![rows, c, i, vector(i, to.ty(0).dtype), stretch];
        return to
            .kernel(KERNELS, "parallel_dots", &constants)
            .blocks(c.div_ceil(DOTS), rows.div_ceil(stretch))
            .threads(DOTS)
            .launch(&arguments![x, w, bias, y]);
    }
    let constants = constants![rows, c * o];
    to.kernel(KERNELS, "rows_of_bias", &constants)
        .fours(rows, c * o)
        .launch(&arguments![bias, y]);
    let (x, y) = (columns(x, c * i, i, false), columns(y, c * o, o, false));
    to.product(Product {
        add: true,
        batch: c,
        ..Product::new([rows, o, i], [x, weights(w, i, o, false), y])
    });
}

pub(super) fn input_gradient(to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let [c, i, o] = dims(&to.ty(1).dims);
    let (g, w, out) = (to.input(0), to.input(1), to.output(0));
    if is_thin(i, o) {
        let constants = constants![rows, c * i, i, to.adds(0)];
        return to
            .kernel(KERNELS, "parallel_outer", &constants)
            .fours(rows, c * i)
            .launch(&arguments![g, w, out]);
    }
    let (g, out) = (columns(g, c * o, o, false), columns(out, c * i, i, false));
    to.product(Product {
        add: to.adds(0),
        batch: c,
        ..Product::new([rows, i, o], [g, weights(w, i, o, true), out])
    });
}

pub(super) fn weight_gradient([c, i, o]: [usize; 3], to: &mut Lowering<'_>) {
    let rows = to.ty(0).rows();
    let (g, x, out) = (to.input(0), to.input(1), to.output(0));
    if is_thin(i, o) {
        let columns = c * i;
        let width = vector(columns, to.ty(1).dtype);
        let sums = to.row_sums(rows, columns, width);
        let constants = constants![rows, columns, sums.stretch, i, width];
        to.kernel(KERNELS, "parallel_weight_parts", &constants)
            .blocks(sums.blocks[0], sums.blocks[1])
            .launch(&arguments![g, x, sums.parts.out()]);
        let out = (out, to.adds(0));
        return to.add_stretches(sums.parts, (0, columns), out);
    }
    let (x, g) = (columns(x, c * i, i, true), columns(g, c * o, o, false));
    to.product(Product {
        add: to.adds(0),
        batch: c,
        ..Product::new([i, o, rows], [x, g, weights(out, i, o, false)])
    });
}
