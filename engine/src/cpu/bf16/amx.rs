//! Sums of products with AMX: `tdpbf16ps` adds 16 rows by 16 columns of 32 products to registers
//! that hold a tile each.
//!
//! Two tiles of rows times two of columns are summed at once, in four of the eight registers: each
//! loaded tile is multiplied twice.
#![expect(unsafe_code, reason = "instructions without intrinsics")]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::Sums;
use super::tile::{Block, SIDE};

/// Whether this processor has AMX for bf16, and the kernel permits this process to use its
/// registers.
pub(super) fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| has_instructions() && is_permitted())
}

/// `AMX-BF16` and `AMX-TILE`: bits 22 and 24 of `edx` of leaf 7.
fn has_instructions() -> bool {
    const BOTH: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BOTH == BOTH
}

/// Linux grants the tile registers to processes that ask:
/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
fn is_permitted() -> bool {
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing but the permissions of this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

/// Shapes of the registers: palette 1, and for each register its rows and the bytes of a row.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    first_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// While it lives, the tile registers of this thread are configured for 16 rows of 64 bytes each.
pub(super) struct Tiles {
    /// Registers belong to their thread.
    thread: PhantomData<*mut u8>,
}

impl Tiles {
    /// # Panics
    ///
    /// When the processor has no AMX.
    pub(super) fn configured() -> Self {
        assert!(is_there(), "AMX");
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(64);
        rows[..8].fill(16);
        let shapes = Shapes {
            palette: 1,
            first_row: 0,
            reserved: [0; 14],
            row_bytes,
            rows,
        };
        // SAFETY: the processor has the instruction, and the shapes are those of its palette.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
        Self {
            thread: PhantomData,
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the constructor found the instruction.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Requires live [`Tiles`].
///
/// # Panics
///
/// When the processor has no AMX.
pub(super) fn multiply(rows: &[Block], columns: &[Block], sums: &mut Sums) {
    assert!(is_there() && !rows.is_empty(), "AMX, and at least one term");
    assert_eq!(rows.len(), columns.len());
    const { assert!(size_of::<Block>() == 2048 && SIDE == 32) };
    // SAFETY: the registers are configured by the caller, else the first instruction faults; each
    // factor has as many blocks as are counted, of tiles of 16 rows of 64 bytes one after the
    // other, and sums are 32 rows of 128 bytes.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{rows} + {row}*1]",
            "tileloadd tmm5, [{rows} + {row}*1 + 1024]",
            "tileloadd tmm6, [{columns} + {row}*1]",
            "tileloadd tmm7, [{columns} + {row}*1 + 1024]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {rows}, 2048",
            "add {columns}, 2048",
            "dec {blocks}",
            "jnz 2b",
            "tilestored [{sums} + {row}*2], tmm0",
            "tilestored [{sums} + {row}*2 + 64], tmm1",
            "tilestored [{sums} + {row}*2 + 2048], tmm2",
            "tilestored [{sums} + {row}*2 + 2112], tmm3",
            rows = inout(reg) rows.as_ptr() => _,
            columns = inout(reg) columns.as_ptr() => _,
            blocks = inout(reg) rows.len() => _,
            sums = in(reg) &raw mut sums.0,
            row = in(reg) 64usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
