//! Matrix products of factors that are rounded to bf16, summed in f32.
//!
//! ```text
//! factors (f32)  ->  panels (bf16, packed)  ->  sums of 32 rows by 32 columns (f32)  ->  out
//! ```
//!
//! Both factors are packed in tiles of 16 lines of 32 terms, two to a word, as AMX takes them;
//! AVX512_BF16 and plain vectors read the same tiles. Packing rounds too, so that no extra pass
//! over a factor is made. It waits for memory, and sums do not: AVX512_BF16 [fetches](ahead) what is
//! packed next while it multiplies. A frozen right factor is packed [once for all products](pack),
//! and a small one once for all blocks of rows.
//!
//! A product of two bf16 numbers is exact in f32 (8 bits times 8 bits), so processors differ only
//! in the rounding of sums of at most `k` terms: each within `k 2^-24` of the sum of magnitudes.
//! AMX and AVX512_BF16 [round](in_tiles) most thin products too, and treat numbers below 2^-126 as 0
//! (Intel, Architecture Instruction Set Extensions: TDPBF16PS, VDPBF16PS). Tests have run
//! AVX512_BF16 on a Zen 4, and AMX on a Xeon.

mod ahead;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod packing;
mod panels;
mod tile;
mod vectors;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;

use super::math::vectorised;
use super::output::Output;
use super::shape::{Shape, Strided};
use super::tile::RawTile;
use crate::precision::Precision;
use ahead::Ahead;
pub(crate) use panels::Panel;
use tile::{Block, Order, SIDE};

/// Terms of a sum, and columns, that are packed at a time, beside [`SIDE`] rows: all of them stay in
/// a near cache.
const SUMS: usize = 512;
const COLUMNS: usize = 640;
/// Elements of a right factor packed in advance that rows of the left one pass over. They have more
/// columns than a panel, as rows are packed again for the next columns, and fit into a near cache.
const PACKED: usize = 1 << 19;

/// Bytes that a thread holds for products: panels of both factors.
pub(crate) const PANELS: usize = SUMS * (SIDE + COLUMNS) * size_of::<u16>();

/// Instructions that multiply pairs of bf16 and add them to f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Vectors of f32: two products for each word.
    Vectors,
    /// `vdpbf16ps`.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// `tdpbf16ps`.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx,
}

/// Whether this processor multiplies bf16 faster than f32: with AMX or AVX512_BF16.
///
/// The environment variable `SPD_BF16_PRODUCTS` overrides it, so that a machine can be tested as if
/// it were another: `on`, `off`, or `slow` for a processor that [is slower](bf16_is_slower). With
/// `on` and no such instructions, plain vectors multiply, with the same roundings.
pub fn has_bf16_products() -> bool {
    match std::env::var_os("SPD_BF16_PRODUCTS") {
        Some(answer) if answer == "on" || answer == "slow" => true,
        Some(answer) if answer == "off" => false,
        _ => Unit::best() != Unit::Vectors,
    }
}

/// Whether products in a precision are multiplied in tiles of 16 lines of 32 terms, by AMX or
/// AVX512_BF16: then thin products of more than a few columns too are faster in bf16 than in f32.
pub(super) fn in_tiles(precision: Precision) -> bool {
    precision == Precision::Bf16 && Unit::best() != Unit::Vectors
}

/// Whether a step with bf16 products takes longer here than one in f32: on Intel processors with
/// AVX512_BF16 and without AMX 1.4 to 1.8 times.
pub fn bf16_is_slower() -> bool {
    match std::env::var_os("SPD_BF16_PRODUCTS") {
        Some(answer) => answer == "slow",
        None => is_slower(Unit::best(), vendor()),
    }
}

#[cfg(target_arch = "x86_64")]
fn is_slower(unit: Unit, vendor: [u8; 12]) -> bool {
    unit == Unit::Avx512 && vendor == *b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_slower(_: Unit, _: [u8; 12]) -> bool {
    false
}

/// Vendor of this processor, from `cpuid`.
fn vendor() -> [u8; 12] {
    #[cfg(target_arch = "x86_64")]
    let words = {
        let found = std::arch::x86_64::__cpuid(0);
        [found.ebx, found.edx, found.ecx]
    };
    #[cfg(not(target_arch = "x86_64"))]
    let words = [0_u32; 3];
    bytemuck::cast(words.map(u32::to_le))
}

/// The instructions that decide how a program rounds on this processor, such as
/// `AVX-512, AVX512_BF16`. Processors with the same instructions compute the same bits.
pub fn instructions() -> String {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        found.push("AVX-512");
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        found.push("AVX2");
    }
    if has_bf16_products() {
        found.push(Unit::best().name());
    }
    if found.is_empty() {
        found.push(std::env::consts::ARCH);
    }
    found.join(", ")
}

impl Unit {
    /// Name by which processor vendors call it.
    fn name(self) -> &'static str {
        match self {
            Self::Vectors => "bf16 by f32",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "AVX512_BF16",
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::Amx => "AMX",
        }
    }

    /// The fastest unit of this processor.
    pub(super) fn best() -> Self {
        static BEST: OnceLock<Unit> = OnceLock::new();
        *BEST.get_or_init(|| *Self::all().last().expect("vectors are everywhere"))
    }

    /// The units of this processor, the fastest last.
    fn all() -> Vec<Self> {
        let units = [
            (Self::Vectors, true),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, avx512::is_there()),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            (Self::Amx, amx::is_there()),
        ];
        let there = units.into_iter().filter(|(_, is_there)| *is_there);
        there.map(|(unit, _)| unit).collect()
    }

    /// `out = [out +] alpha sums` for so many rows and columns: sums of products over the terms of
    /// the blocks, rows packed by line, columns by term. Terms behind the first `terms` are 0.
    ///
    /// - `next`: columns that a later call multiplies, of as many terms, or the same ones
    /// - `sums`: room
    ///
    /// # Safety
    ///
    /// `out` must be writable for all rows and columns, and not be accessed by others meanwhile.
    #[expect(unsafe_code, reason = "as for `multiply`")]
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_variables, reason = "AVX512_BF16 fetches what is ahead")
    )]
    unsafe fn multiply(
        self,
        rows: &[Block],
        [columns, next]: [&[Block]; 2],
        (size, terms): ([usize; 2], usize),
        (alpha, out): (f32, Output<RawTile<'_>>),
        (sums, ahead): (&mut Sums, &mut Ahead<'_>),
    ) {
        let lens = [rows, columns, next].map(<[Block]>::len);
        assert_eq!(lens, [terms.div_ceil(SIDE); 3], "sums are of one length");
        match self {
            Self::Vectors => vectors::multiply(rows, columns, sums),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                let (size, to) = ((size, terms), (alpha, out));
                // SAFETY: the caller's promise.
                return unsafe { avx512::multiply(rows, [columns, next], size, to, ahead) };
            }
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::Amx => amx::multiply(rows, columns, sums),
        }
        vectorised(
            #[inline(always)]
            // SAFETY: the caller's promise.
            || unsafe { sums.write(size, alpha, out) },
        );
    }
}

/// Sums of [`SIDE`] rows by [`SIDE`] columns.
#[repr(C, align(64))]
struct Sums([[f32; SIDE]; SIDE]);

impl Sums {
    /// `out = [out +] alpha sums`, for the first rows and columns.
    ///
    /// # Safety
    ///
    /// `out` must be writable for all of them, and not be accessed by others meanwhile.
    #[expect(unsafe_code, reason = "as for `multiply`")]
    #[inline(always)]
    unsafe fn write(&self, [rows, columns]: [usize; 2], alpha: f32, out: Output<RawTile<'_>>) {
        for (row, sums) in self.0.iter().enumerate().take(rows) {
            // SAFETY: the caller's promise.
            let values = unsafe { std::slice::from_raw_parts_mut(out.values.row(row), columns) };
            Output::new(values, out.add).put(sums.iter().map(|sum| alpha * sum));
        }
    }
}

thread_local! {
    /// The panels of this thread: made once, and kept for the next product.
    static ROOM: RefCell<[Panel; 2]> = RefCell::new([SIDE, COLUMNS].map(|lines| Panel::new(lines, SUMS)));
}

/// The right factor of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Factor<'a> {
    /// Packed for this product alone.
    Matrix(Strided<'a>),
    /// A part of a factor that is packed already.
    Packed(Packed<'a>),
}

impl Factor<'_> {
    /// Whether a matrix has so many rows and columns; a packed one is checked when it is read.
    pub(super) fn holds(&self, rows: usize, columns: usize) -> bool {
        match self {
            Self::Matrix(matrix) => matrix.holds(rows, columns),
            Self::Packed(_) => true,
        }
    }
}

/// Columns and terms of a packed matrix, from a first one on; both begin at multiples of [`SIDE`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) panel: &'a Panel,
    pub(crate) column: usize,
    pub(crate) term: usize,
}

impl<'a> Packed<'a> {
    /// The blocks of [`SIDE`] columns, and of these terms.
    fn strip(&self, column: usize, terms: &Range<usize>) -> &'a [Block] {
        let (column, first) = (self.column + column, self.term + terms.start);
        debug_assert!(column.is_multiple_of(SIDE) && first.is_multiple_of(SIDE));
        &self.panel.strip(column / SIDE)[first / SIDE..][..terms.len().div_ceil(SIDE)]
    }
}

/// Packs all of a matrix, `[k, n]` or stored `[n, k]`, as the right factor of later products.
pub(crate) fn pack(values: &[f32], [rows, columns]: [usize; 2], transposed: bool) -> Panel {
    let stored = Strided::rows(values, columns);
    let (by_column, lines, terms) = if transposed {
        (stored, rows, columns)
    } else {
        (stored.t(), columns, rows)
    };
    let mut panel = Panel::new(lines, terms);
    panel.fill(0, by_column, 0..lines, 0..terms, Order::ByTerm);
    panel
}

/// `out = [out +] alpha a b` on the caller's thread, with both factors rounded to bf16.
///
/// # Safety
///
/// `out` must be writable for all `m x n` elements, each at an address of its own that nothing else
/// accesses meanwhile.
///
/// # Panics
///
/// When a factor is shorter than the shape, or there are no terms.
#[expect(
    unsafe_code,
    reason = "results of several threads interleave in memory"
)]
pub(super) unsafe fn multiply(
    unit: Unit,
    Shape { m, n, k }: Shape,
    alpha: f32,
    a: Strided<'_>,
    b: Factor<'_>,
    out: Output<RawTile<'_>>,
) {
    assert!(k > 0, "a product of no terms writes nothing");
    ROOM.with_borrow_mut(|[rows, columns]| {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        let _tiles = (unit == Unit::Amx).then(amx::Tiles::configured);
        let mut sums = Sums([[0.0; SIDE]; SIDE]);
        let wide = match b {
            Factor::Matrix(_) => COLUMNS,
            Factor::Packed(_) => PACKED / k.clamp(SIDE, SUMS) / SIDE * SIDE,
        };
        for first_column in (0..n).step_by(wide) {
            let of_panel = first_column..n.min(first_column + wide);
            for first_term in (0..k).step_by(SUMS) {
                let terms = first_term..k.min(first_term + SUMS);
                let add = out.add || first_term > 0;
                for row in (0..m).step_by(SIDE) {
                    let of_row = row..m.min(row + SIDE);
                    let next_row = of_row.end..m.min(of_row.end + SIDE);
                    rows.fill(0, a, of_row.clone(), terms.clone(), Order::ByLine);
                    let mut ahead = Ahead::of(a, next_row.clone(), terms.clone());
                    for start in of_panel.clone().step_by(SIDE) {
                        let strip = (start - first_column) / SIDE;
                        let of_strip = start..of_panel.end.min(start + SIDE);
                        let next_strip = of_strip.end..of_panel.end.min(of_strip.end + SIDE);
                        if let (Factor::Matrix(b), 0) = (b, row) {
                            // A column of `b` is a row of its transpose: both factors are lines of
                            // terms.
                            let b = b.t();
                            columns.fill(strip, b, of_strip.clone(), terms.clone(), Order::ByTerm);
                            ahead = match next_strip.is_empty() {
                                true => Ahead::of(a, next_row.clone(), terms.clone()),
                                false => Ahead::of(b, next_strip.clone(), terms.clone()),
                            };
                        }
                        let of_columns = match b {
                            Factor::Matrix(_) => [columns.strip(strip); 2],
                            Factor::Packed(b) => {
                                let next = next_strip.clone().next().unwrap_or(start);
                                [start, next].map(|start| b.strip(start, &terms))
                            }
                        };
                        let size = ([of_row.len(), of_strip.len()], terms.len());
                        let to = (alpha, Output::new(out.values.at(row, start), add));
                        let room = (&mut sums, &mut ahead);
                        // SAFETY: the caller's promise: these rows and columns are inside the
                        // shape.
                        unsafe { unit.multiply(rows.strip(0), of_columns, size, to, room) };
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::ops::oracle::random;

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn bf16_is_slower_on_intel_processors_with_avx512_bf16_and_no_amx() {
        let (intel, amd) = (*b"GenuineIntel", *b"AuthenticAMD");
        assert!(is_slower(Unit::Avx512, intel));
        for (unit, vendor) in [
            (Unit::Amx, intel),
            (Unit::Vectors, intel),
            (Unit::Avx512, amd),
        ] {
            assert!(!is_slower(unit, vendor), "{unit:?}");
        }
        assert_eq!(vendor(), vendor());
    }

    // Every unit of this processor, every layout of a factor, sizes around those of tiles, panels
    // and strips. The sums are within `(k + 4) 2^-24` of the sum of magnitudes: `k` additions, two
    // more products, and the addition to `out`.
    #[test]
    fn all_units_sum_products_of_rounded_factors() {
        let shapes = [
            (1, 1, 1),
            (3, 5, 7),
            (16, 16, 32),
            (32, 32, 64),
            (33, 31, 65),
            (40, 600, 70),
            (64, 48, 1100),
            (100, 96, 512),
        ];
        for (m, n, k) in shapes {
            let [a, b] = [(m * k, 1), (k * n, 2)].map(|(len, seed)| random(&[len], seed).values);
            for (a_turned, b_turned) in [(false, false), (true, false), (false, true), (true, true)]
            {
                let place = |turned: bool, rows: usize, columns: usize| {
                    if turned { (1, rows) } else { (columns, 1) }
                };
                let of = |values, turned, rows, columns| {
                    let (row, column) = place(turned, rows, columns);
                    Strided {
                        values,
                        row,
                        column,
                        listed: None,
                    }
                };
                let (a, b) = (of(&a, a_turned, m, k), of(&b, b_turned, k, n));
                let rounded = |matrix: Strided<'_>, row: usize, column: usize| {
                    let value = matrix.values[row * matrix.row + column * matrix.column];
                    f64::from(bf16::from_f32(value).to_f32())
                };
                let stride = n + 3;
                for unit in Unit::all() {
                    for add in [false, true] {
                        let mut out = vec![0.5f32; m * stride];
                        let start = out.as_mut_ptr();
                        let tile = RawTile {
                            start,
                            stride,
                            listed: None,
                        };
                        let to = Output::new(tile, add);
                        // SAFETY: `m` rows of `stride` elements, of which `n` are written.
                        #[expect(unsafe_code, reason = "as for `multiply`")]
                        unsafe {
                            multiply(unit, Shape { m, n, k }, -2.0, a, Factor::Matrix(b), to);
                        }
                        for (i, found) in out.into_iter().enumerate() {
                            let (row, column) = (i / stride, i % stride);
                            if column >= n {
                                assert_eq!(found.to_bits(), 0.5f32.to_bits());
                                continue;
                            }
                            let terms = (0..k).map(|l| rounded(a, row, l) * rounded(b, l, column));
                            let (sum, size) =
                                terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                            let expected = -2.0 * sum + if add { 0.5 } else { 0.0 };
                            let tolerance = (k as f64 + 4.0) * 2f64.powi(-24) * (2.0 * size + 0.5);
                            assert!(
                                (f64::from(found) - expected).abs() <= tolerance,
                                "{unit:?} {m} {n} {k} {a_turned} {b_turned}: {found} for {expected}"
                            );
                        }
                    }
                }
            }
        }
        println!("checked on {:?}", Unit::all());
    }

    #[test]
    fn nan_and_infinity_are_kept() {
        for unit in Unit::all() {
            for (x, expected) in [
                (f32::NAN, f32::NAN),
                (f32::INFINITY, f32::INFINITY),
                (f32::MAX, f32::INFINITY),
            ] {
                let (mut a, b) = (vec![1.0; 40], vec![1.0; 40]);
                a[33] = x;
                let (a, b) = (Strided::rows(&a, 40), Factor::Matrix(Strided::rows(&b, 1)));
                let mut out = [0.0f32];
                // SAFETY: one element is written.
                #[expect(unsafe_code, reason = "as for `multiply`")]
                unsafe {
                    multiply(
                        unit,
                        Shape { m: 1, n: 1, k: 40 },
                        1.0,
                        a,
                        b,
                        Output::overwrite(RawTile {
                            start: out.as_mut_ptr(),
                            stride: 1,
                            listed: None,
                        }),
                    );
                }
                assert!(
                    out[0].total_cmp(&expected).is_eq() || out[0].is_nan() && x.is_nan(),
                    "{unit:?} {x}: {out:?}"
                );
            }
        }
    }
}
