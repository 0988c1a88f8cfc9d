use super::Documents;
use crate::cpu::Frame;

pub(super) fn run(op: Documents, frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let tokens = frame.input_u32(0);
    let positions = frame.ty(0).columns().max(1);
    let rows = tokens.chunks_exact(positions);
    for (tokens, out) in rows.zip(out.chunks_exact_mut(positions)) {
        let mut ended = 0.0;
        for (&token, out) in tokens.iter().zip(out) {
            *out = ended;
            if token == op.end {
                ended += 1.0;
            }
        }
    }
}
