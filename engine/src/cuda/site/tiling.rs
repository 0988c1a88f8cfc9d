//! Which tiles a block of the site kernels goes through, and what they take of it.
//!
//! Per block of 256 threads there are 64 Ki registers and at most 227 KiB of shared memory. What comes of a tile (rows of `y`, or sums
//! of a gradient) stays in registers until the end: `lines * n / 256` f32s a thread, and twice eight warps at 64 lines have no room
//! for more than 128 of them beside the tile in the making. Everything else is bf16 in shared memory, each row 16 bytes longer than
//! it is, so that the eight rows of a matrix lie in different banks:
//!
//! ```text
//! rows: [lines, k] + [k, width] + [width, n] + [lines, width]     and [lines, n], if the gradient of importances is wanted
//! sums: [lines, k] + [k, width] + [lines, n] + [lines, width]
//! ```
//!
//! A block reads all of `V` and `U`, `2 (k + n)` bytes a component, for `2 lines (k + n)` FLOPs: `lines` FLOPs a byte, from the
//! level-2 cache. At 64 lines the largest sites are within what that gives; at 32 they are bound by it. To split the columns of
//! `y` over blocks instead would make `x V` anew in each: half as much work again at twice the columns, and no fewer bytes.
//! So the first of these is taken that fits: 64 by 64, 64 by 32, 32 by 64, 32 by 32.
//!
//! ```text
//! k = n             128            256            512            768
//! rows        64x64  62 KiB  64x64 114 KiB  64x64 218 KiB  32x32 171 KiB
//! and slopes  64x64  79 KiB  64x64 147 KiB  32x64 214 KiB  32x32 220 KiB
//! sums        64x64  61 KiB  64x64 111 KiB  64x64 211 KiB  32x32 160 KiB
//! ```

/// Shared memory that a block may have on Hopper.
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

/// f32s of shared memory that a bf16 tile takes.
fn room(lines: usize, columns: usize) -> usize {
    lines * (columns + 8) / 2
}

/// `n` columns as the warps share them, where each has 32 of `lines`.
fn columns(lines: usize, n: usize) -> usize {
    n.next_multiple_of((8 * 8 / (lines / 32)).max(32))
}

impl Tiling {
    const fn new(lines: usize, width: usize) -> Self {
        Self { lines, width }
    }

    /// For `[.., k]` through components to `[.., n]`, where `slopes` says whether the gradient of importances is wanted too.
    pub(super) fn of_rows(k: usize, n: usize, slopes: bool) -> Option<Self> {
        // The slopes take the registers of another tile.
        let most = if slopes { 96 } else { 128 };
        TILES.into_iter().find(|tile| {
            tile.lines * columns(tile.lines, n) <= most * THREADS
                && 4 * tile.rows_room(k, n, slopes) <= MOST_SHARED
        })
    }

    /// For sums over positions of components times `n` columns.
    pub(super) fn of_sums(k: usize, n: usize) -> Option<Self> {
        TILES.into_iter().find(|tile| {
            tile.width * columns(tile.width, n) <= 128 * THREADS
                && 4 * tile.sums_room(k, n) <= MOST_SHARED
        })
    }

    /// f32s of shared memory of `site_rows`; either way of storing a factor takes no more.
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

/// f32s of a tile of a factor, whichever way it is stored.
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
    fn what_is_too_wide_has_no_tile() {
        assert_eq!(Tiling::of_rows(4096, 64, false), None);
        assert_eq!(Tiling::of_sums(64, 4096), None);
    }
}
