use super::Ascend;
use crate::cpu::math::clamp;
use crate::cpu::{Frame, Rows};
use crate::ops::each_chunk;

pub(super) fn run(op: &Ascend, frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let (source, gradient) = (frame.input(0), frame.input(1));
    let step = op.step_size;
    each_chunk!(frame, [out.len(), 1], Rows(out, 1), |range, out| {
        let pairs = source[range.clone()].iter().zip(&gradient[range]);
        for (out, (&r, &g)) in out.0.iter_mut().zip(pairs) {
            let up = if g > 0.0 { step } else { 0.0 };
            let down = if g < 0.0 { step } else { 0.0 };
            // 0, or NaN for a NaN gradient.
            let nothing = if g.is_nan() { g } else { 0.0 };
            *out = clamp(r + (up - down) + nothing, 0.0, 1.0);
        }
    });
}
