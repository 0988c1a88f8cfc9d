use super::{Decay, Lines};
use crate::cpu::{Frame, Rows};
use crate::ops::each_chunk;

pub(super) fn run(op: &Decay, frame: &mut Frame<'_>) {
    if !frame.are_finite_from(2) {
        return;
    }
    let (matrix, needed, columns) = (frame.state(0), frame.input(1), frame.ty(0).columns());
    let (rows, rate) = (matrix.len() / columns, frame.scalar(op.lr) * op.decay);
    let factor = |needed: f32| {
        let lacks = (1.0 - needed).max(0.0);
        let keep = (1.0 - rate * lacks).max(0.0);
        if op.root { keep.sqrt() } else { keep }
    };
    let parts = Rows(matrix, columns);
    each_chunk!(frame, [rows, columns], parts, |range, part| {
        for (row, values) in range.zip(part.0.chunks_exact_mut(columns)) {
            match op.of {
                Lines::Rows => {
                    let factor = factor(needed[row]);
                    values.iter_mut().for_each(|value| *value *= factor);
                }
                Lines::Columns => {
                    for (value, &needed) in values.iter_mut().zip(needed) {
                        *value *= factor(needed);
                    }
                }
            }
        }
    });
}
