use crate::cuda::lowering::{Lowering, Source};

const KERNELS: Source = Source::new("embedding", include_str!("kernel.cu"));

pub(super) fn value(to: &mut Lowering<'_>) {
    let (tokens, wte, y) = (to.input(0), to.input(1), to.output(0));
    let placed = to.inputs() > 2;
    let wpe = if placed { to.input(2) } else { wte };
    let (vocabulary, columns) = (to.ty(1).rows(), to.ty(1).columns());
    let constants = [
        tokens.len.into(),
        to.ty(0).columns().into(),
        vocabulary.into(),
        columns.into(),
        placed.into(),
    ];
    to.kernel(KERNELS, "embed", &constants)
        .fours(tokens.len, columns)
        .launch(&[tokens, wte, wpe, y].map(Into::into));
}

pub(super) fn add_positions(to: &mut Lowering<'_>) {
    let (x, wpe, y) = (to.input(0), to.input(1), to.output(0));
    let (rows, columns) = (to.ty(0).rows(), to.ty(0).columns());
    let constants = [rows.into(), to.ty(0).dims[1].into(), columns.into()];
    to.kernel(KERNELS, "add_positions", &constants)
        .fours(rows, columns)
        .launch(&[x, wpe, y].map(Into::into));
}

pub(super) fn token_gradient(vocabulary: usize, to: &mut Lowering<'_>) {
    let (tokens, g, out) = (to.input(0), to.input(1), to.output(0));
    let constants = [
        tokens.len.into(),
        to.ty(1).columns().into(),
        to.adds(0).into(),
    ];
    to.kernel(KERNELS, "embed_token_grad", &constants)
        .blocks(vocabulary, 1)
        .launch(&[tokens, g, out].map(Into::into));
}

pub(super) fn position_gradient(context: usize, to: &mut Lowering<'_>) {
    let (g, out) = (to.input(0), to.output(0));
    let dims = &to.ty(0).dims;
    let (batch, positions, columns) = (dims[0], dims[1], dims[2]);
    let constants = [
        batch.into(),
        positions.into(),
        context.into(),
        columns.into(),
        to.adds(0).into(),
    ];
    to.kernel(KERNELS, "embed_position_grad", &constants)
        .fours(context, columns)
        .launch(&[g.into(), out.into()]);
}
