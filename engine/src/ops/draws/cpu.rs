use spd_draws::uniform_lanes;

use super::{Bernoulli, Uniform, UniformSubsets};
use crate::cpu::lanes::{BLOCK, store};
use crate::cpu::math::vectorised;
use crate::cpu::{Frame, Rows};
use crate::ops::{GRAIN, grain_rows};

pub(super) fn uniform(op: &Uniform, frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let p = frame.parameters;
    let first_row = if op.shared { 0 } else { p.first_row };
    let (stream, columns) = (op.stream, op.columns);
    let rows = out.len() / columns;
    let parts = Rows(out, columns);
    frame
        .pool
        .run(rows, grain_rows(columns), parts, |range, out| {
            let rows = range.map(|row| first_row + row_number(row));
            if columns == 1 {
                for (row, value) in rows.zip(out.0) {
                    *value = stream.uniform(p.seed, p.step, row, 0);
                }
                return;
            }
            vectorised(
                #[inline(always)]
                || {
                    let mut draws = [0.0; BLOCK];
                    for (row, out) in rows.zip(out.0.chunks_exact_mut(columns)) {
                        for start in (0..columns).step_by(BLOCK) {
                            let first_block = row_number(start / 4);
                            let word = stream.word();
                            uniform_lanes(p.seed, first_block, row, word, p.step, &mut draws);
                            store(&draws, false, &mut out[start..]);
                        }
                    }
                },
            );
        });
}

pub(super) fn bernoulli(op: &Bernoulli, frame: &mut Frame<'_>) {
    let (out, _) = frame.output(0);
    let p = frame.parameters;
    frame
        .pool
        .run(out.len(), GRAIN, Rows(out, 1), |range, out| {
            for (row, value) in range.zip(out.0) {
                let row = p.first_row + row_number(row);
                let draw = op.stream.uniform(p.seed, p.step, row, 0);
                *value = if draw < op.probability { 1.0 } else { 0.0 };
            }
        });
}

pub(super) fn uniform_subsets(op: &UniformSubsets, frame: &mut Frame<'_>) {
    let p = frame.parameters;
    // Per row the largest number that is still in, then room for the numbers of one row.
    let (cuts, draws) = frame.scratch().split_at_mut(op.rows);
    for (row, cut) in cuts.iter_mut().enumerate() {
        op.stream
            .fill_uniform(p.seed, p.step, p.first_row + row_number(row), draws);
        let others = (draws[0] * op.sites as f32).floor();
        let numbers = &mut draws[1..];
        numbers.sort_unstable_by(f32::total_cmp);
        // A whole number below the number of sites, exact in f32.
        *cut = numbers
            .iter()
            .copied()
            .zip(0u16..)
            .find(|&(_, rank)| f32::from(rank) >= others)
            .map_or(1.0, |n| n.0);
    }
    let cuts = &*cuts;
    for site in 0..op.sites {
        let (route, _) = frame.output(site);
        frame
            .pool
            .run(op.rows, 1 << 10, Rows(route, 1), |range, route| {
                for (row, routed) in range.zip(route.0) {
                    let number = op.stream.uniform(
                        p.seed,
                        p.step,
                        p.first_row + row_number(row),
                        1 + row_number(site),
                    );
                    *routed = if number <= cuts[row] { 1.0 } else { 0.0 };
                }
            });
    }
}

pub(crate) fn row_number(row: usize) -> u32 {
    u32::try_from(row).expect("a batch has fewer than 2^32 rows")
}
