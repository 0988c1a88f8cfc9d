use crate::cuda::lowering::{Lowering, Source, arguments, constants};

const KERNELS: Source = Source::new("embedding", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (tokens, wte, y) = (to.input(0), to.input(1), to.output(0));
    let placed = to.inputs() > 2;
    let wpe = if placed { to.input(2) } else { wte };
    let (vocabulary, columns) = (to.ty(1).rows(), to.ty(1).columns());
    let constants = constants![tokens.len, to.ty(0).columns(), vocabulary, columns, placed];
    to.kernel(KERNELS, "embed", &constants)
        .fours(tokens.len, columns)
        .launch(&arguments![tokens, wte, wpe, y]);
}

pub(super) fn add_positions(to: &mut Lowering<'_>) {
    let (x, wpe, y) = (to.input(0), to.input(1), to.output(0));
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let constants = constants![rows, to.ty(0).dims[1], columns];
    to.kernel(KERNELS, "add_positions", &constants)
        .fours(rows, columns)
        .launch(&arguments![x, wpe, y]);
}

pub(super) fn token_gradient(vocabulary: usize, to: &mut Lowering<'_>) {
    let (tokens, g, out) = (to.input(0), to.input(1), to.output(0));
    let constants = constants![tokens.len, to.ty(1).columns(), to.adds(0)];
    to.kernel(KERNELS, "embed_token_grad", &constants)
        .blocks(vocabulary, 1)
        .launch(&arguments![tokens, g, out]);
}

pub(super) fn position_gradient(context: usize, to: &mut Lowering<'_>) {
    let (g, out) = (to.input(0), to.output(0));
    let dims = &to.ty(0).dims;
    let (batch, positions, columns) = (dims[0], dims[1], dims[2]);
    let constants = constants![batch, positions, context, columns, to.adds(0)];
    to.kernel(KERNELS, "embed_position_grad", &constants)
        .fours(context, columns)
        .launch(&arguments![g, out]);
}
