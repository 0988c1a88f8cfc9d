use super::IGNORED;
use crate::cpu::math::exp;
use crate::cpu::reduce::mean;
use crate::cpu::{Frame, Output, Rows};
use crate::ops::each_chunk;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let losses = frame.scratch();
    let (logits, labels, lse) = (frame.input(0), frame.input_u32(1), frame.input(2));
    let columns = frame.ty(0).columns();
    for (row, loss) in losses.iter_mut().enumerate() {
        *loss = if labels[row] == IGNORED {
            0.0
        } else {
            lse[row] - logits[row * columns + column(labels[row], columns)]
        };
    }
    out[0] = mean(losses, counted(labels));
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (logits, labels, lse) = (frame.input(0), frame.input_u32(1), frame.input(2));
    let (rows, columns) = (labels.len(), frame.ty(0).columns());
    let scale = frame.input(3)[0] / counted(labels) as f32;
    each_chunk!(frame, [rows, columns], Rows(out, columns), |range, out| {
        for (row, out) in range.zip(out.0.chunks_exact_mut(columns)) {
            let logits = &logits[row * columns..][..columns];
            if !add {
                out.fill(0.0);
            }
            if labels[row] != IGNORED {
                for (g, x) in out.iter_mut().zip(logits) {
                    *g += scale * exp(x - lse[row]);
                }
                out[column(labels[row], columns)] -= scale;
            }
        }
    });
}

/// Number of rows in the mean; at least 1, to divide by.
pub(in crate::ops) fn counted(labels: &[u32]) -> usize {
    labels
        .iter()
        .filter(|&&label| label != IGNORED)
        .count()
        .max(1)
}

pub(in crate::ops) fn column(label: u32, columns: usize) -> usize {
    let label = label as usize;
    assert!(
        label < columns,
        "label {label} is not in the vocabulary of {columns}"
    );
    label
}
