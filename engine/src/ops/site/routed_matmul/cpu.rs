use super::{Kind, RoutedMatMul};
use crate::cpu::gemm::{self, Product};
use crate::cpu::routed_rows::{Compacted, among, clear_others, common, routed};
use crate::cpu::shape::{Matrix, Shape};
use crate::cpu::{Frame, Output, Pool, Rows, sparse};
use crate::ops::grain_rows;

/// Number of lists of rows in scratch, each with room for all: the rows of either matrix, and the
/// positions in each of those that both have.
pub(super) const LISTS: usize = 4;

pub(super) fn run(op: RoutedMatMul, frame: &mut Frame<'_>) {
    let out = frame.output(0);
    let shape = op.shape(&[frame.ty(0), frame.ty(1)]);
    let (rows, copied) = (op.rows(shape), op.copied(shape));
    let (a, b) = (frame.input(0), frame.input(1));
    let routes = match (op.first, op.second) {
        (true, true) => [Some(frame.input(2)), Some(frame.input(3))],
        (first, second) => [first, second].map(|compacted| compacted.then(|| frame.input(2))),
    };
    let (lists, scratch) = frame.scratch().split_at_mut(LISTS * rows);
    let [first, second] = places(rows, routes, lists);
    let (left, scratch) = scratch.split_at_mut(copied[0] * rows);
    let (right, scratch) = scratch.split_at_mut(copied[1] * rows);
    let pool = frame.pool;
    let Shape { m, n, k } = shape;
    let product = |shape, a, b| Product {
        precision: frame.precision(),
        shape,
        alpha: 1.0,
        a,
        b,
        packed: None,
    };
    let count = first.count;
    match op.kind {
        Kind::Rows { transposed } => {
            let a = Matrix::plain(first.side_by_side(pool, a, k, left));
            let b = Matrix::of(b, transposed);
            let product = product(Shape { m: count, n, k }, a, b);
            match second.list {
                None => {
                    let out = Output::new(&mut out.values[..count * n], out.add);
                    multiply(pool, &product, out, scratch);
                }
                Some(list) => {
                    let own = &mut right[..count * n];
                    multiply(pool, &product, Output::overwrite(&mut *own), scratch);
                    scatter(pool, second.held, list, own, out, n);
                }
            }
        }
        Kind::Sums => {
            let a = Matrix::of(first.side_by_side(pool, a, m, left), true);
            let b = Matrix::plain(second.side_by_side(pool, b, n, right));
            let product = product(Shape { m, n, k: count }, a, b);
            multiply(pool, &product, out, scratch);
        }
    }
}

/// Positions of the multiplied rows in one of the two matrices of rows.
#[derive(Debug, Clone, Copy)]
struct Places<'a> {
    /// Number of rows of the matrix.
    held: usize,
    /// Number of multiplied rows.
    count: usize,
    /// Their positions, in order; `None` if they are the first.
    list: Option<&'a [u32]>,
}

impl<'a> Places<'a> {
    /// The multiplied rows; a copy of them if they are not adjacent.
    fn side_by_side<'v>(
        &self,
        pool: &Pool,
        values: &'v [f32],
        columns: usize,
        copy: &'v mut [f32],
    ) -> &'v [f32] {
        let Some(list) = self.list else {
            return &values[..self.count * columns];
        };
        let copy = &mut copy[..self.count * columns];
        gather(pool, self.held, list, values, &mut *copy, columns);
        copy
    }
}

/// The positions in two matrices, each of all rows or of the routed ones. `room` holds [`LISTS`]
/// lists of all rows.
fn places<'a>(rows: usize, routes: [Option<&[f32]>; 2], room: &'a mut [f32]) -> [Places<'a>; 2] {
    let (one, room) = room.split_at_mut(rows);
    let (other, room) = room.split_at_mut(rows);
    let whole = |held, count| Places {
        held,
        count,
        list: None,
    };
    let apart = |held, list: &'a [u32]| Places {
        held,
        count: list.len(),
        list: Some(list),
    };
    match routes {
        [None, None] => [whole(rows, rows); 2],
        [Some(route), None] => {
            let list = routed(route, one);
            [whole(list.len(), list.len()), apart(rows, list)]
        }
        [None, Some(route)] => {
            let list = routed(route, one);
            [apart(rows, list), whole(list.len(), list.len())]
        }
        [Some(first), Some(second)] => {
            let (first, second) = (routed(first, one), routed(second, other));
            let (in_first, in_second) = room.split_at_mut(rows);
            let (in_first, in_second) = common([first, second], in_first, in_second);
            [apart(first.len(), in_first), apart(second.len(), in_second)]
        }
    }
}

pub(super) fn compact_rows(back: bool, frame: &mut Frame<'_>) {
    let out = frame.output(0);
    let (x, route) = (frame.input(0), frame.input(1));
    let columns = frame.ty(0).columns();
    let all = route.len();
    let rows = routed(route, frame.scratch());
    if back {
        scatter(frame.pool, all, rows, x, out, columns);
    } else {
        gather(frame.pool, all, rows, x, out.values, columns);
    }
}

/// A product of any number of rows and terms, including none.
fn multiply(pool: &Pool, product: &Product<'_>, mut out: Output<&mut [f32]>, scratch: &mut [f32]) {
    if product.shape.m == 0 || product.shape.k == 0 {
        if !out.add {
            out.values.fill(0.0);
        }
    } else if !sparse::product(pool, product, out.reborrow()) {
        gemm::product(pool, product, out, scratch);
    }
}

/// Copies the routed `rows` out of `all` rows.
fn gather(pool: &Pool, all: usize, rows: &[u32], from: &[f32], to: &mut [f32], columns: usize) {
    let parts = Compacted::new(to, columns, Some(rows));
    pool.run(all, grain_rows(columns), parts, |range, mut to| {
        for (own, &row) in rows[among(rows, &range)].iter().enumerate() {
            to.part(own * columns, columns)
                .copy_from_slice(&from[row as usize * columns..][..columns]);
        }
    });
}

/// `out = [out +]` compacted `rows` at their positions among `all`, and 0 elsewhere.
pub(in crate::ops) fn scatter(
    pool: &Pool,
    all: usize,
    rows: &[u32],
    from: &[f32],
    out: Output<&mut [f32]>,
    columns: usize,
) {
    let Output { values, add } = out;
    pool.run(
        all,
        grain_rows(columns),
        Rows(values, columns),
        |range, out| {
            if !add {
                clear_others(rows, &range, out.0, columns);
            }
            let compacted = among(rows, &range);
            for (compacted, &row) in compacted.clone().zip(&rows[compacted]) {
                let from = &from[compacted * columns..][..columns];
                let out = &mut out.0[(row as usize - range.start) * columns..][..columns];
                Output::new(out, add).put(from.iter().copied());
            }
        },
    );
}
