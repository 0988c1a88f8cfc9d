use super::{Uniform, UniformSubsets};
use crate::cpu::uniform::Uniforms;
use crate::cpu::{Frame, Rows};
use crate::ops::{each_chunk, grain_rows};

pub(super) fn uniform(op: &Uniform, frame: &mut Frame<'_>) {
    let out = frame.output(0).values;
    let columns = op.columns;
    let rows = out.len() / columns;
    let draws = Uniforms::new(op.stream, frame.parameters, [rows, columns]);
    let draws = if op.shared { draws.shared() } else { draws };
    // A draw costs about as much as four elements of a matrix.
    let grain = grain_rows(4 * columns);
    each_chunk!(frame, rows, grain, Rows(out, columns), |range, out| {
        if columns == 1 {
            draws.first_of_rows(range.start, out.0);
        } else {
            draws.fill(range.start * columns, out.0);
        }
        if let Some(below) = op.below {
            for value in out.0 {
                *value = if *value < below { 1.0 } else { 0.0 };
            }
        }
    });
}

pub(super) fn uniform_subsets(op: &UniformSubsets, frame: &mut Frame<'_>) {
    let p = frame.parameters;
    let first_row = p.first_row(op.rows);
    // For each row the largest number in the subset, then room for the numbers of one row.
    let (cuts, draws) = frame.scratch().split_at_mut(op.rows);
    for (row, cut) in cuts.iter_mut().enumerate() {
        op.stream
            .fill_uniform(p.seed, p.step, first_row + row_number(row), draws);
        let others = (draws[0] * op.sites as f32).floor();
        let numbers = &mut draws[1..];
        numbers.sort_unstable_by(f32::total_cmp);
        // An integer below the number of sites, exact in f32.
        *cut = numbers
            .iter()
            .copied()
            .zip(0u16..)
            .find(|&(_, rank)| f32::from(rank) >= others)
            .map_or(1.0, |n| n.0);
    }
    let cuts = &*cuts;
    for site in 0..op.sites {
        let route = frame.output(site).values;
        frame
            .pool
            .run(op.rows, 1 << 10, Rows(route, 1), |range, route| {
                for (row, routed) in range.zip(route.0) {
                    let number = op.stream.uniform(
                        p.seed,
                        p.step,
                        first_row + row_number(row),
                        1 + row_number(site),
                    );
                    *routed = if number <= cuts[row] { 1.0 } else { 0.0 };
                }
            });
    }
}

fn row_number(row: usize) -> u32 {
    u32::try_from(row).expect("a batch has fewer than 2^32 rows")
}
