use super::GeluKind;
use crate::cpu::gelu::{gelu, gelu_slope};
use crate::cpu::math::{gelu_tanh, gelu_tanh_slope, vectorised};
use crate::cpu::{Frame, Rows};
use crate::ops::GRAIN;

pub(super) fn run(kind: GeluKind, frame: &mut Frame<'_>) {
    match kind {
        GeluKind::Exact => value(frame, gelu),
        GeluKind::Tanh => value(frame, gelu_tanh),
    }
}

pub(super) fn run_gradient(kind: GeluKind, frame: &mut Frame<'_>) {
    match kind {
        GeluKind::Exact => gradient(frame, gelu_slope),
        GeluKind::Tanh => gradient(frame, gelu_tanh_slope),
    }
}

fn value(frame: &mut Frame<'_>, of: impl Fn(f32) -> f32 + Sync) {
    let (out, _) = frame.output(0);
    let x = frame.input(0);
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    for (y, x) in out.0.iter_mut().zip(&x[range]) {
                        *y = of(*x);
                    }
                },
            );
        });
}

fn gradient(frame: &mut Frame<'_>, slope: impl Fn(f32) -> f32 + Sync) {
    let (out, add) = frame.output(0);
    let (x, g) = (frame.input(0), frame.input(1));
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            vectorised(
                #[inline(always)]
                || {
                    if !add {
                        out.0.fill(0.0);
                    }
                    for ((gx, x), g) in out.0.iter_mut().zip(&x[range.clone()]).zip(&g[range]) {
                        *gx += g * slope(*x);
                    }
                },
            );
        });
}
