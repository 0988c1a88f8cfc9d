use super::RotaryTable;
use crate::cpu::{Frame, Rows};

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

/// `out = R x` at the position of a row of the table.
#[inline(always)]
pub(crate) fn turn(table: &[f32], x: &[f32], out: &mut [f32]) {
    let half = table.len() / 2;
    let (cosines, sines) = table.split_at(half);
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    let out = out_low.iter_mut().zip(out_high);
    let angles = cosines.iter().zip(sines);
    for (((out_low, out_high), (cos, sin)), (low, high)) in
        out.zip(angles).zip(low.iter().zip(high))
    {
        *out_low = low * cos - high * sin;
        *out_high = high * cos + low * sin;
    }
}

/// `out = [out +] R^T x` at the position of a row of the table.
#[inline(always)]
pub(crate) fn turn_back(table: &[f32], x: &[f32], out: &mut [f32], add: bool) {
    let half = table.len() / 2;
    let (cosines, sines) = table.split_at(half);
    let (low, high) = x.split_at(half);
    let (out_low, out_high) = out.split_at_mut(half);
    if !add {
        out_low.fill(0.0);
        out_high.fill(0.0);
    }
    let out = out_low.iter_mut().zip(out_high);
    let angles = cosines.iter().zip(sines);
    for (((out_low, out_high), (cos, sin)), (low, high)) in
        out.zip(angles).zip(low.iter().zip(high))
    {
        *out_low += low * cos + high * sin;
        *out_high += high * cos - low * sin;
    }
}
