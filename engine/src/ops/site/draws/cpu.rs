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
    let grain = grain_rows(rows, 4 * columns);
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
    // For each row its draws, and room for those of the sites in order.
    let columns = 1 + 2 * op.sites;
    let draws = &mut frame.scratch()[..op.rows * columns];
    let parts = Rows(&mut *draws, columns);
    frame.pool.run(op.rows, 1 << 7, parts, |range, rows| {
        for (row, of_row) in range.zip(rows.0.chunks_exact_mut(columns)) {
            let (draws, numbers) = of_row.split_at_mut(1 + op.sites);
            op.stream
                .fill_uniform(p.seed, p.step, first_row + row_number(row), draws);
            let others = (draws[0] * op.sites as f32).floor();
            numbers.copy_from_slice(&draws[1..]);
            numbers.sort_unstable_by(f32::total_cmp);
            // The largest number in the subset, in the place of the draw of its size. An integer
            // below the number of sites is exact in f32.
            let mut ranked = numbers.iter().copied().zip(0u16..);
            let largest = ranked.find(|&(_, rank)| f32::from(rank) >= others);
            draws[0] = largest.map_or(1.0, |found| found.0);
        }
    });
    for site in 0..op.sites {
        let route = Rows(frame.output(site).values, 1);
        frame.pool.run(op.rows, 1 << 10, route, |range, route| {
            let rows = draws[range.start * columns..].chunks_exact(columns);
            for (of_row, routed) in rows.zip(route.0) {
                let is_routed = of_row[1 + site] <= of_row[0];
                *routed = if is_routed { 1.0 } else { 0.0 };
            }
        });
    }
}

fn row_number(row: usize) -> u32 {
    u32::try_from(row).expect("a batch has fewer than 2^32 rows")
}
