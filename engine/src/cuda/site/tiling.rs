//! Tiles of the site kernels, and the registers and shared memory that they take.
//!
//! A block of 256 threads has 64 Ki registers and at most 227 KiB of shared memory. Results of a
//! tile (rows of `y`, or sums of a gradient) stay in registers until the end: `lines * n / 256`
//! f32s per thread. Twice eight warps at 64 lines have registers for at most 128 of them, beside
//! the tile in progress. Everything else is bf16 in shared memory, with rows padded by 16 bytes so
//! that the eight rows of a matrix lie in different banks:
//!
//! ```text
//! rows: [lines, k] + [k, width] + [width, n] + [lines, width]  (+ [lines, n] with slopes)
//! sums: [lines, k] + [k, width] + [lines, n] + [lines, width]
//! ```
//!
//! A block reads all of `V` and `U` from the level-2 cache, `2 (k + n)` bytes per component, for
//! `2 lines (k + n)` FLOPs: `lines` FLOPs per byte. At 64 lines, the cache is fast enough for the
//! largest sites; at 32, it is the limit. Splitting the columns of `y` over blocks would recompute
//! `x V` in each: half as much work again for twice the columns, and no fewer bytes. So the first
//! tile that fits is taken, of 64 by 64, 64 by 32, 32 by 64, 32 by 32.
//!
//! ```text
//! k = n             128            256            512            768
//! rows        64x64  62 KiB  64x64 114 KiB  64x64 218 KiB  32x32 171 KiB
//! and slopes  64x64  79 KiB  64x64 147 KiB  32x64 214 KiB  32x32 220 KiB
//! sums        64x64  61 KiB  64x64 111 KiB  64x64 211 KiB  32x32 160 KiB
//! ```

use crate::cuda::tensor_cores::room;

/// Shared memory of a block on Hopper.
pub(crate) const MOST_SHARED: usize = 227 << 10;

/// Threads of a block.
pub(super) const THREADS: usize = 256;

/// Tiles, best first.
const TILES: [Tiling; 4] = [
    Tiling::new(64, 64),
    Tiling::new(64, 32),
    Tiling::new(32, 64),
    Tiling::new(32, 32),
];

/// A tile of positions by components.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Positions.
    pub(super) lines: usize,
    /// Components.
    pub(super) width: usize,
}

/// `n` rounded up to the warps' shares, of 32 lines each.
fn columns(lines: usize, n: usize) -> usize {
    n.next_multiple_of((8 * 8 / (lines / 32)).max(32))
}

impl Tiling {
    const fn new(lines: usize, width: usize) -> Self {
        Self { lines, width }
    }

    /// The tile for `[.., k]` through components to `[.., n]`; `slopes` adds the gradient of
    /// importances.
    pub(super) fn of_rows(k: usize, n: usize, slopes: bool) -> Option<Self> {
        // Slopes take the registers of another tile.
        let most = if slopes { 96 } else { 128 };
        TILES.into_iter().find(|tile| {
            tile.lines * columns(tile.lines, n) <= most * THREADS
                && 4 * tile.rows_room(k, n, slopes) <= MOST_SHARED
        })
    }

    /// The tile for sums over positions: components times `n` columns.
    pub(super) fn of_sums(k: usize, n: usize) -> Option<Self> {
        TILES.into_iter().find(|tile| {
            tile.width * columns(tile.width, n) <= 128 * THREADS
                && 4 * tile.sums_room(k, n) <= MOST_SHARED
        })
    }

    /// f32s of shared memory of `site_rows`, for either storage of a factor.
    pub(super) fn rows_room(self, k: usize, n: usize, slopes: bool) -> usize {
        let Self { lines, width } = self;
        let (k, n) = (k.next_multiple_of(32), columns(lines, n));
        let inner = if slopes { room(lines, n) } else { 0 };
        room(lines, k) + inner + stored(k, width) + stored(n, width) + room(lines, width)
    }

    /// f32s of shared memory of `site_sums`.
    pub(super) fn sums_room(self, k: usize, n: usize) -> usize {
        let Self { lines, width } = self;
        let (k, n) = (k.next_multiple_of(32), columns(width, n));
        room(lines, k) + room(lines, n) + stored(k, width) + room(lines, width)
    }
}

/// f32s of a tile of a factor, for either storage.
fn stored(k: usize, width: usize) -> usize {
    room(k, width).max(room(width, k))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(tile: Option<Tiling>, room: impl Fn(Tiling) -> usize) -> String {
        let tile = tile.expect("it fits");
        let kib = (4 * room(tile)).div_ceil(1 << 10);
        format!("{}x{} {kib:>3} KiB", tile.lines, tile.width)
    }

    #[test]
    fn tiles_are_those_of_the_table() {
        let row = |name: &str, cell: &dyn Fn(usize) -> String| {
            let cells: Vec<String> = [128, 256, 512, 768].into_iter().map(cell).collect();
            let row = format!("//! {name:<12}{}", cells.join("  "));
            let text = include_str!("tiling.rs");
            assert!(text.lines().any(|line| line == row), "{row}");
        };
        for (name, slopes) in [("rows", false), ("and slopes", true)] {
            row(name, &|d| {
                cell(Tiling::of_rows(d, d, slopes), |tile| {
                    tile.rows_room(d, d, slopes)
                })
            });
        }
        row("sums", &|d| {
            cell(Tiling::of_sums(d, d), |tile| tile.sums_room(d, d))
        });
    }

    #[test]
    fn sites_that_are_too_wide_have_no_tile() {
        assert_eq!(Tiling::of_rows(4096, 64, false), None);
        assert_eq!(Tiling::of_sums(64, 4096), None);
    }
}
