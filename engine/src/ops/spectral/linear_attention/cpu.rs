use super::{LinearAttention, Sizes};
use crate::cpu::math::vectorised;
use crate::cpu::pool::rows_with_scratch;
use crate::cpu::tile::{Tile, Tiles, Window};
use crate::cpu::{Frame, Output, PerChunk};

pub(super) fn run(op: LinearAttention, frame: &mut Frame<'_>) {
    let Output { values: y, add } = frame.output(0);
    let scratch = frame.scratch();
    let sizes = op.sizes(frame.ty(0));
    let qkv = [0, 1, 2].map(|at| frame.input(at));
    let (positions, heads, size) = (sizes.positions, sizes.heads, sizes.size);
    let window = Window::side_by_side(0, size);
    let [y] = Tiles::cut(y, positions, heads * size, heads, [window]);
    let parts = (y, PerChunk(scratch, (size + 1) * size));
    let units = sizes.units();
    let grain = rows_with_scratch(units);
    frame
        .pool
        .run(units, grain, parts, |range, (mut y, scratch)| {
            for unit in range {
                let y = Output::new(y.tile(unit), add);
                attend(op, sizes, unit, qkv, y, scratch.0);
            }
        });
}

/// One head in one batch row.
fn attend(
    op: LinearAttention,
    sizes: Sizes,
    unit: usize,
    qkv: [&[f32]; 3],
    y: Output<Tile<'_>>,
    scratch: &mut [f32],
) {
    let (positions, heads, size) = (sizes.positions, sizes.heads, sizes.size);
    let Output { values: mut y, add } = y;
    let (state, total) = scratch.split_at_mut(size * size);
    let scale = 1.0 / (size as f32).sqrt();
    vectorised(
        #[inline(always)]
        || {
            state.fill(0.0);
            for step in 0..positions {
                let position = match op.is_ahead {
                    true => positions - 1 - step,
                    false => step,
                };
                let row = (unit / heads * positions + position) * heads + unit % heads;
                let [q, k, v] = qkv.map(|x| &x[row * size..][..size]);
                total.fill(0.0);
                let rows = state.chunks_exact_mut(size).zip(q.iter().zip(k));
                for (state, (q, k)) in rows {
                    for (total, (state, v)) in total.iter_mut().zip(state.iter_mut().zip(v)) {
                        *state = k.mul_add(*v, *state);
                        *total = q.mul_add(*state, *total);
                    }
                }
                let y = Output::new(y.row(position), add);
                y.put(total.iter().map(|total| scale * total));
            }
        },
    );
}
