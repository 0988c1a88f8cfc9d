//! The cut of a product into parts for threads, and the memory that it takes.
//!
//! The cut of the sums, and so every bit of the result, depends only on the shape, and on whether
//! the product is multiplied [in tiles](super::bf16::in_tiles). Rows and columns are cut finer for
//! more threads.

use std::ops::Range;

use super::bf16::in_tiles;
use super::pool::chunks;
use super::shape::Shape;
use super::thin;
use crate::ops::{grain_rows, most_chunks};
use crate::precision::Precision;

/// Parts of a product; thin products are cut by rows or along their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// Number of parts down, across and along the sums.
    Blocks([usize; 3]),
    /// Rows of a chunk.
    Narrow(usize),
    /// Terms of the sums of a chunk.
    ThinSums(usize),
}

/// Multiplications that are worth a chunk of their own: some 30 microseconds.
const CHUNK_WORK: usize = 1 << 20;
const MOST_CHUNKS: usize = 32;
/// Parts of a product for each thread: a thread that is done early takes over parts of another. A
/// thread has one if it packs the factors of its part.
const PARTS_A_THREAD: usize = 2;
/// Blocks of a product, if each is worth it: a power of two, as most numbers of threads are.
const BLOCKS: usize = 8;
/// Number of blocks that suffices when more would be too small.
const FEW_BLOCKS: usize = 4;
/// Rows and columns above which a block is halved. The gemm crate packs the columns of a block and
/// passes its rows over them, six at a time: with few rows that packing does not pay, and with few
/// columns rows are read often.
const HALVED: [usize; 2] = [480, 240];
const MOST: [usize; 2] = [1024, 1536];
/// Terms of a sum that are halved, and elements of the largest result for which they are: each part
/// has a result of its own.
const HALVED_SUMS: usize = 400;
const PARTIAL: usize = 1 << 18;
/// Least rows and columns of a block that is halved for more threads. The gemm crate has other
/// loops for blocks of at most 64 by 64, which end the parts of a sum elsewhere.
const LEAST: [usize; 2] = [96, 128];
/// Rows and columns that the crate's inner loop computes at once; blocks end at multiples of them.
/// 16 columns with AVX2 (two vectors of 8), 64 with AVX-512 (four of 16).
pub(super) const STEP_ROWS: usize = 6;
pub(super) const STEP_COLUMNS: usize = 64;
pub(super) const STEP_SUMS: usize = 64;
/// Least ratio of the terms of long sums to the longer side of a small result.
const LONG: usize = 8;

/// Elements of a matrix that stays in a near cache while a long one is read.
const SMALL: usize = 1 << 14;
/// Terms of a sum from which a product with such a matrix is cut into blocks if it is multiplied in
/// tiles, of 32 terms each, and the most columns for which it is not: most of a tile would be empty.
const TILE_TERMS: usize = 16;
const FEW_COLUMNS: usize = 8;

/// Terms of a sum that the crate packs at a time, and the most columns for which it packs those
/// too.
const PACKED_SUMS: usize = 512;
const PACKED_COLUMNS: usize = 256;

/// Fewest rows of a chunk of a thin product, for many threads.
const FEW_THIN_ROWS: usize = 48;

impl Shape {
    /// The parts of a product for so many threads; `transposed` says how each operand is stored,
    /// and `packs` whether each part packs its share of both for bf16.
    pub(super) fn cut_for(
        self,
        threads: usize,
        transposed: [bool; 2],
        in_tiles: bool,
        packs: bool,
    ) -> Cut {
        let Self { m, n, k } = self;
        match self.cut(transposed, in_tiles) {
            Cut::Blocks([mut down, mut across, along]) => {
                let wanted = threads * if packs { 1 } else { PARTS_A_THREAD };
                while packs && down * across > 1 && down * across * along > wanted {
                    let is_flat = down > 1 && m / down < n / across;
                    let parts = if is_flat || across == 1 {
                        &mut down
                    } else {
                        &mut across
                    };
                    *parts = parts.div_ceil(2);
                }
                let wanted = wanted.min(m * n * k / CHUNK_WORK);
                while down * across * along < wanted {
                    let [rows, columns] = [m / (2 * down), n / (2 * across)];
                    if rows >= LEAST[0] && (rows >= columns || columns < LEAST[1]) {
                        down *= 2;
                    } else if columns >= LEAST[1] {
                        across *= 2;
                    } else {
                        break;
                    }
                }
                Cut::Blocks([down, across, along])
            }
            Cut::Narrow(rows) => {
                // As many for each thread, and a power of two, as in element-wise kernels, unless
                // the rows are few.
                let parts = m.div_ceil(rows).max(threads * PARTS_A_THREAD);
                let parts = parts.next_power_of_two().min(m / FEW_THIN_ROWS).max(1);
                Cut::Narrow(m.div_ceil(parts))
            }
            sums @ Cut::ThinSums(_) => sums,
        }
    }

    /// The parts of a product for a few threads.
    pub(super) fn cut(self, transposed: [bool; 2], in_tiles: bool) -> Cut {
        let Self { m, n, k } = self;
        let fills_tiles = in_tiles && k >= TILE_TERMS && n > FEW_COLUMNS;
        match transposed {
            [false, _] if k * n <= SMALL && m >= 64 && !fills_tiles => {
                return Cut::Narrow(grain_rows(m, k + n));
            }
            [true, false] if m.min(n) <= 8 && m * n <= SMALL && k >= LONG * m.max(n) => {
                return Cut::ThinSums(grain_rows(k, m + n).max(k.div_ceil(MOST_CHUNKS)));
            }
            _ => {}
        }
        let wanted = chunks_worth(m * n * k);
        // Sums of long columns into a small result (weight gradients of toy models): partial
        // results are cheap.
        if m * n <= SMALL && k >= LONG * m.max(n) {
            return Cut::Blocks([1, 1, wanted.min(k.div_ceil(STEP_SUMS))]);
        }
        let wanted = wanted.min(BLOCKS);
        let parts = |all: usize, most: usize| match all.div_ceil(most) {
            few @ ..BLOCKS => few.next_power_of_two(),
            many => many,
        };
        let (mut down, mut across, mut along) = (parts(m, MOST[0]), parts(n, MOST[1]), 1);
        // The rows of such a product lie across memory, and blocks side by side each pack them.
        let only_along = in_tiles && transposed[0] && m * n <= PARTIAL;
        while down * across < wanted && !only_along {
            if m / down >= HALVED[0] {
                down *= 2;
            } else if n / across >= HALVED[1] {
                across *= 2;
            } else {
                break;
            }
        }
        let few = wanted.min(FEW_BLOCKS);
        while down * across * along < few && m * n <= PARTIAL && k / along >= HALVED_SUMS {
            along *= 2;
        }
        while down * across * along < few {
            *(if m / down >= n / across {
                &mut down
            } else {
                &mut across
            }) *= 2;
        }
        Cut::Blocks([down, across, along])
    }

    /// Whether a product in bf16 is cut into blocks, each of which packs its factors.
    pub(crate) fn in_blocks(self, transposed: [bool; 2]) -> bool {
        matches!(
            self.cut(transposed, in_tiles(Precision::Bf16)),
            Cut::Blocks(_)
        )
    }

    /// f32s of scratch that [`product`](super::gemm::product) needs, in tiles or not.
    pub(crate) fn scratch(self, transposed: [bool; 2]) -> usize {
        let Self { m, n, k } = self;
        let of = |in_tiles| match self.cut(transposed, in_tiles) {
            Cut::Blocks([_, _, 1]) => 0,
            Cut::Blocks([_, _, along]) => along * m * n,
            Cut::ThinSums(each) => chunks(k, each) * m * n,
            Cut::Narrow(_) => thin::panels_len(k, n),
        };
        of(false).max(of(true))
    }

    /// f32s that a thread packs at a time for a block of this shape: its rows, and its columns if
    /// they are few.
    pub(crate) fn packed_by_block(self) -> usize {
        let columns = if self.n <= PACKED_COLUMNS { self.n } else { 0 };
        self.k.min(PACKED_SUMS) * (self.m + columns)
    }

    /// Most f32s that a thread holds during its part of [`product`](super::gemm::product) in f32,
    /// beside the scratch, for any number of threads.
    pub(crate) fn packed(self, transposed: [bool; 2]) -> usize {
        let Self { m, n, k } = self;
        let Cut::Blocks([down, across, along]) = self.cut(transposed, false) else {
            return 0;
        };
        let block = Self {
            m: longest(down, m, STEP_ROWS),
            n: longest(across, n, STEP_COLUMNS),
            k: longest(along, k, STEP_SUMS),
        };
        block.packed_by_block()
    }

    /// Most f32s of scratch that [`product`](super::gemm::product) needs, for this shape and those
    /// of fewer rows or shorter sums.
    pub(crate) fn most_scratch(self, transposed: [bool; 2]) -> usize {
        let Self { m, n, k } = self;
        let small = (m * n).min(SMALL);
        let partials = match transposed {
            _ if k < LONG * n => 0,
            [true, false] => most_chunks(k, m + n)
                .min(MOST_CHUNKS)
                .max(chunks_worth(small * k)),
            _ => chunks_worth(small * k),
        };
        let few = if k >= HALVED_SUMS {
            FEW_BLOCKS * (m * n).min(PARTIAL)
        } else {
            0
        };
        let panels = if k * n <= SMALL {
            thin::panels_len(k, n)
        } else {
            0
        };
        panels.max(partials * small).max(few)
    }
}

/// Chunks for so many multiplications.
fn chunks_worth(work: usize) -> usize {
    (work / CHUNK_WORK).clamp(1, MOST_CHUNKS)
}

/// One of `parts` parts of `all`, as equal as multiples of `step` can be.
pub(super) fn part(number: usize, parts: usize, all: usize, step: usize) -> Range<usize> {
    let steps = all.div_ceil(step);
    let end = |number: usize| all.min(number * steps / parts * step);
    end(number)..end(number + 1)
}

/// Length of the longest [`part`].
fn longest(parts: usize, all: usize, step: usize) -> usize {
    all.min(all.div_ceil(step).div_ceil(parts) * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    // By rows first, then by columns, then by sums if the result is small.
    #[test]
    fn products_are_cut_by_their_shapes() {
        let cut = |m, n, k, transposed| Shape { m, n, k }.cut(transposed, false);
        let blocks = |m, n, k, transposed| match cut(m, n, k, transposed) {
            Cut::Blocks(parts) => parts,
            other => panic!("{other:?}"),
        };
        assert_eq!(blocks(2048, 400, 256, [false, false]), [8, 1, 1]);
        assert_eq!(blocks(1000, 1200, 256, [true, false]), [4, 2, 1]);
        assert_eq!(blocks(256, 1200, 1000, [false, false]), [1, 8, 1]);
        assert_eq!(blocks(400, 400, 2048, [true, false]), [1, 2, 2]);
        assert_eq!(blocks(256, 128, 1200, [false, false]), [1, 1, 4]);
        assert_eq!(blocks(3000, 50_257, 64, [false, true]), [4, 33, 1]);
        assert_eq!(blocks(40, 1000, 70, [false, false]), [1, 2, 1]);
        assert_eq!(blocks(128, 128, 300, [true, true]), [2, 2, 1]);
        assert_eq!(blocks(12, 20, 9000, [true, true]), [1, 1, 2]);
        assert!(matches!(cut(1000, 70, 40, [false, true]), Cut::Narrow(_)));
        assert!(matches!(cut(5, 28, 700, [true, false]), Cut::ThinSums(_)));
        let in_tiles = |n, k| Shape { m: 1000, n, k }.cut([false, true], true);
        assert_eq!(in_tiles(70, 40), Cut::Blocks([2, 1, 1]));
        assert!(matches!(in_tiles(70, 15), Cut::Narrow(_)));
        assert!(matches!(in_tiles(8, 40), Cut::Narrow(_)));
        let sums = Shape::of([256, 400, 2048]);
        assert_eq!(sums.cut([true, false], true), Cut::Blocks([1, 1, 4]));
        assert_eq!(sums.cut([true, false], false), Cut::Blocks([1, 2, 2]));
    }

    // By hand: blocks of the shorter side are joined first, and sums stay as they are.
    #[test]
    fn products_that_pack_have_a_part_for_each_thread() {
        let cut =
            |sides, threads, packs| Shape::of(sides).cut_for(threads, [false, false], true, packs);
        let long = [2048, 400, 256];
        assert_eq!(cut(long, 2, false), Cut::Blocks([8, 1, 1]));
        assert_eq!(cut(long, 2, true), Cut::Blocks([2, 1, 1]));
        assert_eq!(cut(long, 3, true), Cut::Blocks([4, 1, 1]));
        let flat = [256, 3072, 768];
        assert_eq!(cut(flat, 2, true), Cut::Blocks([1, 2, 1]));
        assert_eq!(cut([400, 400, 2048], 1, false), Cut::Blocks([1, 2, 2]));
        assert_eq!(cut([400, 400, 2048], 1, true), Cut::Blocks([1, 1, 2]));
    }

    #[test]
    fn large_products_have_two_parts_for_each_of_many_threads() {
        let shapes = [
            (2048, 400, 256, [false, false]),
            (1000, 1200, 256, [true, false]),
            (256, 3072, 768, [false, false]),
            (3000, 50_257, 64, [false, true]),
        ];
        for ((m, n, k, transposed), threads) in shapes.into_iter().zip([16, 16, 16, 64]) {
            let shape = Shape { m, n, k };
            let cut = shape.cut_for(threads, transposed, false, false);
            let Cut::Blocks([down, across, along]) = cut else {
                panic!("{shape:?}: {cut:?}")
            };
            let parts = down * across * along;
            assert!(parts >= 2 * threads, "{shape:?}: {parts}");
            for few in [1, 2, 4] {
                let cut = shape.cut_for(few, transposed, false, false);
                assert_eq!(cut, shape.cut(transposed, false));
            }
        }
    }

    // By hand: a power of two of parts, or as many as have 48 rows.
    #[test]
    fn rows_of_narrow_products_are_shared_out_among_threads() {
        for ((m, threads), expected) in [
            ((2048, 2), (128, 16)),
            ((128, 2), (64, 2)),
            ((64, 16), (64, 1)),
            ((8192, 64), (64, 128)),
        ] {
            let shape = Shape { m, n: 70, k: 40 };
            for packs in [false, true] {
                let cut = shape.cut_for(threads, [false, true], false, packs);
                let Cut::Narrow(rows) = cut else {
                    panic!("{m}: {cut:?}")
                };
                assert_eq!((rows, chunks(m, rows)), expected, "{m}");
            }
        }
    }

    // A row and a column of blocks of each kind, by hand.
    #[test]
    fn a_thread_packs_the_rows_of_its_block_and_few_columns() {
        let packed = |m, n, k, transposed| Shape { m, n, k }.packed(transposed);
        // 342 steps of 6 rows; 19 steps of 64 columns; 7 of them.
        assert_eq!(packed(2048, 400, 256, [false, false]), 256 * 6 * 43);
        assert_eq!(
            packed(256, 1200, 1000, [false, false]),
            512 * (256 + 3 * 64)
        );
        assert_eq!(packed(400, 400, 2048, [true, false]), 512 * (400 + 4 * 64));
        assert_eq!(packed(1000, 70, 40, [false, true]), 0);
    }

    #[test]
    fn parts_follow_each_other_and_are_equal_up_to_a_step() {
        for (parts, all, step) in [(8, 1200, 24), (4, 50, 24), (3, 1, 8), (5, 1001, 8)] {
            let ranges: Vec<_> = (0..parts).map(|i| part(i, parts, all, step)).collect();
            assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, all));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            let sizes = ranges[..parts - 1].iter().map(Range::len);
            let (least, most) = (sizes.clone().min(), sizes.max());
            assert!(most.unwrap() - least.unwrap() <= step, "{ranges:?}");
        }
    }

    // Rows and sums are known only at run time.
    #[test]
    fn scratch_is_enough_for_fewer_rows_and_shorter_sums() {
        let shapes = [
            (256, 64, 4000),
            (256, 128, 1200),
            (700, 300, 500),
            (90, 90, 9000),
            (300, 9, 100),
            (5, 28, 700),
        ];
        let layouts = [[false, false], [false, true], [true, false], [true, true]];
        for ((m, n, k), stored) in shapes.into_iter().flat_map(|s| layouts.map(|l| (s, l))) {
            let most = Shape { m, n, k }.most_scratch(stored);
            for part in 1..=m.max(k) {
                let (rows, sums) = (part.min(m), part.min(k));
                for shape in [Shape { m: rows, n, k }, Shape { m, n, k: sums }] {
                    assert!(
                        shape.scratch(stored) <= most,
                        "{shape:?} of {m} {n} {k} {stored:?}"
                    );
                }
            }
        }
    }
}
