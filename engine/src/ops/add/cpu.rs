use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::GRAIN;

pub(super) fn run(frame: &mut Frame<'_>) {
    let (out, add) = frame.output(0);
    let inputs = frame.inputs();
    let frame = &*frame;
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    for index in 0..inputs {
                        let input = &frame.input(index)[range.clone()];
                        if index == 0 && !add {
                            out.0.copy_from_slice(input);
                        } else {
                            for (total, term) in out.0.iter_mut().zip(input) {
                                *total += term;
                            }
                        }
                    }
                },
            );
        });
}
