use crate::cpu::math::{logistic, vectorised};
use crate::cpu::{Frame, Rows};
use crate::ops::GRAIN;

pub(super) fn run(frame: &mut Frame<'_>) {
    let (y, _) = frame.output(0);
    let (gate, up) = (frame.input(0), frame.input(1));
    frame.pool.run(y.len(), GRAIN, Rows(y, 1), |range, y| {
        vectorised(
            #[inline(always)]
            || {
                let operands = gate[range.clone()].iter().zip(&up[range]);
                for (y, (a, b)) in y.0.iter_mut().zip(operands) {
                    *y = a * logistic(*a) * b;
                }
            },
        );
    });
}

pub(super) fn run_gradient(frame: &mut Frame<'_>) {
    let (gate_out, add_gate) = frame.output(0);
    let (up_out, add_up) = frame.output(1);
    let (gate, up, g) = (frame.input(0), frame.input(1), frame.input(2));
    let parts = (Rows(gate_out, 1), Rows(up_out, 1));
    frame
        .pool
        .run(gate.len(), GRAIN, parts, |range, (gate_out, up_out)| {
            vectorised(
                #[inline(always)]
                || {
                    if !add_gate {
                        gate_out.0.fill(0.0);
                    }
                    if !add_up {
                        up_out.0.fill(0.0);
                    }
                    let operands = gate[range.clone()].iter().zip(&up[range.clone()]);
                    let operands = operands.zip(&g[range]);
                    let out = gate_out.0.iter_mut().zip(up_out.0);
                    for ((gate_out, up_out), ((a, b), g)) in out.zip(operands) {
                        let s = logistic(*a);
                        *gate_out += g * b * s * (1.0 + a * (1.0 - s));
                        *up_out += g * a * s;
                    }
                },
            );
        });
}
