use super::{Kind, RoutedMatMul};
use crate::cpu::gemm::Product;
use crate::cpu::routed_rows::{common, gather, routed, scatter};
use crate::cpu::shape::{Matrix, Shape};
use crate::cpu::{Frame, Output, listed};

/// Number of lists of rows in scratch, each with room for all: the rows of either matrix, and the
/// positions in each of those that both have.
pub(super) const LISTS: usize = 4;

pub(super) fn run(op: RoutedMatMul, frame: &mut Frame<'_>) {
    let Output { values, add } = frame.output(0);
    let Shape { m, n, k } = op.shape(&[frame.ty(0), frame.ty(1)]);
    let rows = op.rows(Shape { m, n, k });
    let (a, b) = (frame.input(0), frame.input(1));
    let routes = match (op.first, op.second) {
        (true, true) => [Some(frame.input(2)), Some(frame.input(3))],
        (first, second) => [first, second].map(|compacted| compacted.then(|| frame.input(2))),
    };
    let (lists, scratch) = frame.scratch().split_at_mut(LISTS * rows);
    let [first, second] = places(rows, routes, lists);
    let count = first.list.map_or(first.held, <[u32]>::len);
    let (shape, a, b, to, values) = match op.kind {
        Kind::Rows { transposed } => {
            let (shape, values) = (Shape { m: count, n, k }, &mut values[..second.held * n]);
            let b = Matrix::of(b, transposed);
            (shape, first.rows_of(a, k, false), b, second.list, values)
        }
        Kind::Sums => {
            let (shape, b) = (Shape { m, n, k: count }, second.rows_of(b, n, false));
            (shape, first.rows_of(a, m, true), b, None, values)
        }
    };
    let product = Product {
        precision: frame.precision(),
        shape,
        alpha: 1.0,
        a,
        b,
        packed: None,
        to,
    };
    listed::product(frame.pool, &product, Output::new(values, add), scratch);
}

/// Positions of the multiplied rows in one of the two matrices of rows.
#[derive(Debug, Clone, Copy)]
struct Places<'a> {
    /// Number of rows of the matrix.
    held: usize,
    /// The positions, in order; `None` if they are all.
    list: Option<&'a [u32]>,
}

impl<'a> Places<'a> {
    fn rows_of(&self, values: &'a [f32], columns: usize, transposed: bool) -> Matrix<'a> {
        Matrix {
            listed: self.list,
            ..Matrix::of(&values[..self.held * columns], transposed)
        }
    }
}

/// The positions in two matrices, each of all rows or of the routed ones. `room` holds [`LISTS`]
/// lists of all rows.
fn places<'a>(rows: usize, routes: [Option<&[f32]>; 2], room: &'a mut [f32]) -> [Places<'a>; 2] {
    let (one, room) = room.split_at_mut(rows);
    let (other, room) = room.split_at_mut(rows);
    let all = |held| Places { held, list: None };
    let some = |held, list: &'a [u32]| Places {
        held,
        list: Some(list),
    };
    match routes {
        [None, None] => [all(rows); 2],
        [Some(route), None] => {
            let list = routed(route, one);
            [all(list.len()), some(rows, list)]
        }
        [None, Some(route)] => {
            let list = routed(route, one);
            [some(rows, list), all(list.len())]
        }
        [Some(first), Some(second)] => {
            let (first, second) = (routed(first, one), routed(second, other));
            let (in_first, in_second) = room.split_at_mut(rows);
            let (in_first, in_second) = common([first, second], in_first, in_second);
            [some(first.len(), in_first), some(second.len(), in_second)]
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
