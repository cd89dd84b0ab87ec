//! The AMX level: 16x16 tiles of products, for bf16 and for 8-bit codes (Sapphire Rapids and later).
//!
//! The packed panels and KV blocks are laid out in rows of 64 bytes that hold pairs of bf16 or quads of codes per column: that
//! is the form in which the tile unit takes its second operand, so nothing is packed anew. Intrinsics are unstable, the
//! instructions are not: they are written as inline assembly, one step of K at a time.
//!
//! A tile register keeps its sum in f32 (or i32) from the first step to the last. Every element is computed from its own row
//! and column only, in steps of 32 (64) values of K in ascending order, whatever the other rows hold: a row's bits do not
//! depend on its company.

pub(crate) mod attention;
pub(crate) mod gemm;

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// What `ldtilecfg` reads: the shape of each tile register.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

/// The tile registers' shapes for one block of rows. Tiles 0..4 are sums (rows x 16 columns), 4 and 5 the first operand, 6 and
/// 7 the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileShapes {
    /// Rows of sums and of the first operand, up to 16.
    pub(crate) rows: usize,
    /// Bytes of K in a step: 64, or 32 for groups of 32 codes.
    pub(crate) depth: usize,
}

/// Sets the tile registers up; they stay so until `release`, on this thread only.
///
/// # Safety
/// [`available`] has said yes.
#[inline]
pub(crate) unsafe fn configure(shapes: TileShapes) {
    let rows = shapes.rows as u8;
    let mut config = Shapes { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row: [0; 16], rows: [0; 16] };
    for tile in 0..8 {
        config.bytes_per_row[tile] = 64;
        config.rows[tile] = rows;
    }
    for first in 4..6 {
        config.bytes_per_row[first] = shapes.depth as u16;
    }
    for second in 6..8 {
        config.rows[second] = (shapes.depth / 4) as u8;
    }
    // SAFETY: the instruction reads 64 bytes; the shapes are within palette 1 (16 rows of 64 bytes).
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags, readonly)) };
}

/// Gives the tile registers back: the kernel saves 8 KiB less when it switches threads.
///
/// # Safety
/// As [`configure`].
#[inline]
pub(crate) unsafe fn release() {
    // SAFETY: the caller's contract.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
}

/// Whether this CPU has AMX for bf16 and bytes and the kernel lets this process use it: it asks for that once.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| cpu_has_tiles() && system_saves_tiles() && permitted())
}

/// CPUID leaf 7: AMX-BF16, AMX-TILE, AMX-INT8.
fn cpu_has_tiles() -> bool {
    const NEEDED: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    let highest = __cpuid_count(0, 0).eax;
    highest >= 7 && __cpuid_count(7, 0).edx & NEEDED == NEEDED
}

/// XCR0 bits 17 and 18: tile shapes and tile data are part of a thread's saved state.
fn system_saves_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const TILES: u64 = 0b11 << 17;
    if __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
        return false;
    }
    // SAFETY: CPUID says that the instruction is enabled.
    unsafe { xcr0() & TILES == TILES }
}

#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller's contract.
    unsafe { _xgetbv(0) }
}

/// Linux grants tile data to a process that asks (`Documentation/arch/x86/xstate.rst`); all its threads have it then.
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing but the process's permissions.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}
