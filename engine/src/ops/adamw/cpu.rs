use super::AdamW;
use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::GRAIN;

pub(super) fn run(op: &AdamW, frame: &mut Frame<'_>) {
    let total = |index: usize| *frame.input(index).last().expect("norms end in their total");
    if !(4..frame.inputs()).all(|index| total(index).is_finite()) {
        return;
    }
    let factor = op
        .clip
        .map_or(1.0, |clip| (clip / (total(4).sqrt() + 1e-6)).min(1.0));
    let lr = frame.scalar(op.lr);
    let keep = 1.0 - lr * op.decay;
    let step = lr / frame.scalar(op.correction1);
    let root = frame.scalar(op.correction2).sqrt().recip();
    let (w, m, v) = (frame.state(0), frame.state(1), frame.state(2));
    let gradient = frame.input(3);
    let AdamW {
        beta1, beta2, eps, ..
    } = *op;
    let parts = (Rows(w, 1), Rows(m, 1), Rows(v, 1));
    frame
        .pool
        .run(gradient.len(), GRAIN, parts, |range, (w, m, v)| {
            vectorised(
                #[inline(always)]
                || {
                    let tensors = w.0.iter_mut().zip(m.0).zip(v.0).zip(&gradient[range]);
                    for (((w, m), v), g) in tensors {
                        let g = factor * g;
                        *m = beta1 * *m + (1.0 - beta1) * g;
                        *v = beta2 * *v + (1.0 - beta2) * g * g;
                        *w = *w * keep - step * *m / ((*v).sqrt() * root + eps);
                    }
                },
            );
        });
}
