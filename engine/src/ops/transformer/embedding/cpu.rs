use half::slice::HalfFloatSliceExt;

use super::vocabulary_chunk;
use crate::cpu::reduce::add_to;
use crate::cpu::{Frame, Output, Rows};
use crate::ops::{each_chunk, grain_rows};
use crate::store::Values;

pub(super) fn run(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let (tokens, wte) = (frame.input_u32(0), frame.values(1));
    let wpe = (frame.inputs() > 2).then(|| frame.input(2));
    let positions = frame.ty(0).columns();
    let (vocabulary, d) = (frame.ty(1).rows(), frame.ty(1).columns());
    let chunk = grain_rows(tokens.len(), d);
    each_chunk!(frame, tokens.len(), chunk, Rows(out, d), |range, out| {
        for (row, y) in range.zip(out.0.chunks_exact_mut(d)) {
            let token = tokens[row] as usize;
            assert!(
                token < vocabulary,
                "token {token} is not in the vocabulary of {vocabulary}"
            );
            let from = token * d..(token + 1) * d;
            match wte {
                Values::F32(wte) => y.copy_from_slice(&wte[from]),
                Values::Bf16(wte) => wte[from].convert_to_f32_slice(y),
            }
            if let Some(wpe) = wpe {
                add_to(y, &wpe[row % positions * d..][..d]);
            }
        }
    });
}

pub(super) fn run_add_positions(frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let (x, wpe) = (frame.input(0), frame.input(1));
    let (positions, d) = (frame.ty(0).dims[1], frame.ty(0).columns());
    let rows = x.len() / d;
    each_chunk!(frame, [rows, d], Rows(out, d), |range, out| {
        out.0.copy_from_slice(&x[range.start * d..range.end * d]);
        for (row, y) in range.zip(out.0.chunks_exact_mut(d)) {
            add_to(y, &wpe[row % positions * d..][..d]);
        }
    });
}

/// Each chunk has the vectors of some tokens, and searches all rows for those.
pub(super) fn run_token_gradient(vocabulary: usize, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let (tokens, g) = (frame.input_u32(0), frame.input(1));
    let d = frame.ty(1).columns();
    let chunk = vocabulary_chunk(vocabulary);
    each_chunk!(frame, vocabulary, chunk, Rows(out, d), |range, out| {
        if !add {
            out.0.fill(0.0);
        }
        for (token, g) in tokens.iter().zip(g.chunks_exact(d)) {
            let token = *token as usize;
            if range.contains(&token) {
                add_to(&mut out.0[(token - range.start) * d..][..d], g);
            }
        }
    });
}

pub(super) fn run_position_gradient(context: usize, frame: &mut Frame<'_>) {
    let Output { values: out, add } = frame.output(0);
    let g = frame.input(0);
    let (positions, d) = (frame.ty(0).dims[1], frame.ty(0).columns());
    each_chunk!(frame, [context, d], Rows(out, d), |range, out| {
        if !add {
            out.0.fill(0.0);
        }
        for g in g.chunks_exact(positions * d) {
            // Positions past the end of the rows get nothing.
            let g = &g[positions.min(range.start) * d..positions.min(range.end) * d];
            add_to(out.0, g);
        }
    });
}
