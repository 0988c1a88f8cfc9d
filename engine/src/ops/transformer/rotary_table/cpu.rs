use super::RotaryTable;
use crate::cpu::{Frame, Output, Rows};

pub(super) fn run(op: &RotaryTable, frame: &mut Frame<'_>) {
    let table = frame.output(0).values;
    let half = op.size / 2;
    let rows = Rows(table, op.size);
    frame.pool.run(op.positions, 16, rows, |range, rows| {
        for i in 0..half {
            let angle = op.angle(i);
            for (position, row) in range.clone().zip(rows.0.chunks_exact_mut(2 * half)) {
                let (sin, cos) = angle(position).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "f64 to f32 rounds")]
                {
                    (row[i], row[half + i]) = (cos as f32, sin as f32);
                }
            }
        }
    });
}

/// `out = [out +] R x` at the position of a row of the table, or `R^T x`.
#[inline(always)]
pub(crate) fn turn(table: &[f32], x: &[f32], out: Output<&mut [f32]>, back: bool) {
    let half = table.len() / 2;
    let (cosines, sines) = table.split_at(half);
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.values.split_at_mut(half);
    let sign = if back { -1.0 } else { 1.0 };
    let each = || cosines.iter().zip(sines).zip(low.iter().zip(high));
    Output::new(out_low, out.add)
        .put(each().map(|((cos, sin), (low, high))| low * cos - high * (sign * sin)));
    Output::new(out_high, out.add)
        .put(each().map(|((cos, sin), (low, high))| high * cos + low * (sign * sin)));
}
