//! The NEON level, and NEON with dot products of bytes, which differs from it by its integer products.
//!
//! Compiled and tested under emulation only: no figure about these levels exists.

pub(crate) mod attention;
mod dot;
mod float;
mod integer;
mod lanes;
mod peaks;
pub(crate) mod scan;
pub(crate) mod simd;

use std::arch::asm;

use crate::isa::Isa;
use crate::reference;
use crate::rotation::{Rotation, turn_row};
use crate::table::{Form, KernelTable, RowKernels, Tile, TileFn, TileKernels};
use crate::tiles;
use dot::{SignedI4, SignedI8};
use integer::{PairI8, WideI4};
use simd::Neon;

/// Tiles for 32 registers of four lanes, where a panel is eight vectors wide. Few rows take the whole panel, for more
/// independent chains; more rows take a part of it, at most 24 accumulators.
macro_rules! by_rows {
    // A vector of activations per row is held; the more rows each vector of weights meets, the cheaper is its unpacking.
    (lanes $name:ident) => {
        by_rows!(@ [
            $name::<1, 8>, $name::<2, 8>, $name::<3, 8>, $name::<4, 4>, $name::<5, 4>, $name::<6, 2>, $name::<7, 2>,
            $name::<8, 2>
        ])
    };
    // As above, with two products on the way.
    (pairs $name:ident) => {
        by_rows!(@ [$name::<1, 8>, $name::<2, 8>, $name::<3, 4>, $name::<4, 2>, $name::<5, 2>, $name::<6, 2>])
    };
    // Two 16-bit sums and a 32-bit one for each accumulator.
    (wide $name:ident) => {
        by_rows!(@ [$name::<1, 4>, $name::<2, 4>, $name::<3, 2>, $name::<4, 2>])
    };
    (@ [$($kernel:expr),*]) => {{
        const TABLE: &[TileFn] = &[$($kernel),*];
        TileKernels::vectors(TABLE, usize::MAX)
    }};
}

/// The shared kernels, compiled with the level's instructions.
mod kernels {
    use super::*;

    macro_rules! wrap {
        ($features:literal, $name:ident, $t:ident, $body:expr) => {
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name<const MR: usize, const NV: usize>($t: &Tile) {
                // SAFETY: the caller's contract is the kernel's.
                unsafe { $body }
            }
        };
    }

    wrap!("neon", f32, t, float::tile::<false, MR, NV>(t));
    wrap!("neon", bf16, t, float::tile::<true, MR, NV>(t));
    wrap!("neon", i8_row, t, tiles::integer_tile::<Neon, PairI8, MR, NV, false, false>(t, 128));
    wrap!("neon", i8_group, t, tiles::grouped_tile::<Neon, PairI8, MR, NV>(t, 128));
    wrap!("neon", i4, t, tiles::grouped_tile::<Neon, WideI4, MR, NV>(t, 8));
    wrap!("neon,dotprod", dot_i8_row, t, tiles::integer_tile::<Neon, SignedI8, MR, NV, false, false>(t, 128));
    wrap!("neon,dotprod", dot_i8_group, t, tiles::grouped_tile::<Neon, SignedI8, MR, NV>(t, 128));
    wrap!("neon,dotprod", dot_i4, t, tiles::grouped_tile::<Neon, SignedI4, MR, NV>(t, 8));
}
use kernels::*;

pub(crate) static NEON: KernelTable = KernelTable {
    isa: Isa::Neon,
    bf16_form: Form::F32,
    i8_form: Form::I8,
    f32: by_rows!(lanes f32),
    bf16: by_rows!(lanes bf16),
    i8_row: by_rows!(pairs i8_row),
    i8_group: by_rows!(pairs i8_group),
    i4: by_rows!(wide i4),
    // NEON is part of the architecture: the compiler vectorises the portable ones already.
    rows: RowKernels { turn, ..reference::TABLE.rows },
    peaks: peaks::NEON,
};

pub(crate) static NEON_DOT: KernelTable = KernelTable {
    isa: Isa::NeonDot,
    i8_row: by_rows!(lanes dot_i8_row),
    i8_group: by_rows!(lanes dot_i8_group),
    i4: by_rows!(lanes dot_i4),
    peaks: peaks::NEON_DOT,
    ..NEON
};

unsafe fn turn(rotation: &Rotation, row: &mut [f32]) {
    // SAFETY: NEON is part of the architecture.
    unsafe { turn_row::<Neon>(rotation, row) }
}

/// Brings one line into L2.
#[inline(always)]
pub(crate) fn prefetch(from: *const u8) {
    // SAFETY: a prefetch reads nothing and never faults, wherever it points.
    unsafe { asm!("prfm pldl2keep, [{from}]", from = in(reg) from.addr(), options(nomem, nostack, preserves_flags)) };
}
