use crate::cpu::{Frame, Output, Rows};

/// Rows of the result that one chunk writes: its reads stay within a few cache lines each.
const CHUNK: usize = 16;

pub(super) fn run([a, b, d]: [usize; 3], frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let x = frame.input(0);
    frame.pool.run(b, CHUNK, Rows(out, a * d), |range, out| {
        for i in 0..a {
            for j in range.clone() {
                let from = &x[(i * b + j) * d..][..d];
                let to = &mut out.0[((j - range.start) * a + i) * d..][..d];
                Output::new(to, add).put(from.iter().copied());
            }
        }
    });
}
