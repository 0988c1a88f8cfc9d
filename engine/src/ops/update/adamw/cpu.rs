use super::{AdamW, Update};
use crate::cpu::{Frame, Rows};
use crate::ops::each_chunk;

pub(super) fn run(op: &Update, frame: &mut Frame<'_>) {
    let (settings, tensors) = (&op.settings, op.tensors);
    let group = 4 * tensors;
    if !frame.are_finite_from(group) {
        return;
    }
    let total = frame.input(group).last().expect("norms end in their total");
    let factor = settings
        .clip
        .map_or(1.0, |clip| (clip / (total.sqrt() + 1e-6)).min(1.0));
    let lr = frame.scalar(settings.lr);
    let keep = 1.0 - lr * settings.decay;
    let step = lr / frame.scalar(settings.correction1);
    let root = frame.scalar(settings.correction2).sqrt().recip();
    let AdamW {
        beta1, beta2, eps, ..
    } = *settings;
    for tensor in 0..tensors {
        let [w, m, v] = [0, 1, 2].map(|kind| frame.state(kind * tensors + tensor));
        let gradient = frame.input(3 * tensors + tensor);
        let parts = (Rows(w, 1), Rows(m, 1), Rows(v, 1));
        each_chunk!(frame, [gradient.len(), 1], parts, |range, (w, m, v)| {
            let elements = w.0.iter_mut().zip(m.0).zip(v.0).zip(&gradient[range]);
            for (((w, m), v), g) in elements {
                let g = factor * g;
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * g * g;
                *w = *w * keep - step * *m / ((*v).sqrt() * root + eps);
            }
        });
    }
}
