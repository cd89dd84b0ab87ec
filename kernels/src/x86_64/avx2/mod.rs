//! The AVX2 level, and AVX-VNNI, which differs from it by its byte dot product.
//!
//! AVX2 has no exact byte dot product. 8-bit codes are widened to 16 bits and multiplied in pairs (`vpmaddwd` can not
//! overflow there); 4-bit codes are small enough that eight byte products fit into 16 bits.

pub(crate) mod attention;
mod integer;
mod lanes;
mod peaks;
pub(crate) mod scan;
pub(crate) mod simd;

use crate::isa::Isa;
use crate::reference::rows;
use crate::rotation::{Rotation, turn_row};
use crate::table::{Form, KernelTable, PANEL, RowKernels, Tile, TileFn, TileKernels};
use crate::tiles::{self, DotI4, DotI8};
use integer::{PairI8, WideI4};
use simd::{Avx2, AvxVnni};

/// Few rows take the whole panel at once, for longer independent chains; more rows take half of it. Integer steps need a
/// register for the product and some for unpacking, so their tiles are smaller.
macro_rules! by_rows {
    ($name:ident, $split:expr, four) => {{
        const TABLE: [TileFn; 4] = [$name::<1, 4>, $name::<2, 4>, $name::<3, 2>, $name::<4, 2>];
        TileKernels::vectors(&TABLE, $split)
    }};
    ($name:ident, $split:expr) => {{
        const TABLE: [TileFn; 6] =
            [$name::<1, 4>, $name::<2, 4>, $name::<3, 4>, $name::<4, 2>, $name::<5, 2>, $name::<6, 2>];
        TileKernels::vectors(&TABLE, $split)
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

    wrap!("avx2,fma,f16c", f32, t, tiles::f32_tile::<Avx2, MR, NV>(t));
    wrap!("avx2,fma,f16c", bf16, t, tiles::bf16_tile::<Avx2, MR, NV>(t));
    wrap!("avx2,fma,f16c", i8_row, t, tiles::integer_tile::<Avx2, PairI8, MR, NV, false, false>(t, 128));
    wrap!("avx2,fma,f16c", i8_group, t, tiles::grouped_tile::<Avx2, PairI8, MR, NV>(t, 128));
    wrap!("avx2,fma,f16c", i4, t, tiles::grouped_tile::<Avx2, WideI4, MR, NV>(t, 8));
    wrap!("avx2,fma,f16c,avxvnni", vnni_i8_row, t, tiles::integer_tile::<AvxVnni, DotI8, MR, NV, false, false>(t, 128));
    wrap!("avx2,fma,f16c,avxvnni", vnni_i8_group, t, tiles::grouped_tile::<AvxVnni, DotI8, MR, NV>(t, 128));
    wrap!("avx2,fma,f16c,avxvnni", vnni_i4, t, tiles::grouped_tile::<AvxVnni, DotI4, MR, NV>(t, 8));
}
use kernels::*;

pub(crate) static AVX2: KernelTable = KernelTable {
    isa: Isa::Avx2,
    bf16_form: Form::F32,
    i8_form: Form::I8I16,
    f32: by_rows!(f32, usize::MAX),
    bf16: by_rows!(bf16, usize::MAX),
    i8_row: by_rows!(i8_row, usize::MAX, four),
    i8_group: by_rows!(i8_group, usize::MAX, four),
    i4: by_rows!(i4, usize::MAX, four),
    rows: ROWS,
    peaks: peaks::AVX2,
};

pub(crate) static AVX_VNNI: KernelTable = KernelTable {
    isa: Isa::AvxVnni,
    bf16_form: Form::F32,
    i8_form: Form::I8,
    f32: by_rows!(f32, usize::MAX),
    bf16: by_rows!(bf16, usize::MAX),
    i8_row: by_rows!(vnni_i8_row, usize::MAX),
    i8_group: by_rows!(vnni_i8_group, usize::MAX),
    i4: by_rows!(vnni_i4, usize::MAX),
    rows: ROWS,
    peaks: peaks::AVX_VNNI,
};

/// The portable row operations, compiled for 256-bit vectors: the same bits, vectorised.
const ROWS: RowKernels =
    RowKernels { rmsnorm, turn, to_bf16, to_i8, silu_f32, silu_bf16, store, add, row_max, add_scaled };

#[target_feature(enable = "avx2,fma")]
unsafe fn rmsnorm(src: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rows::rmsnorm(src, weight, eps, out);
}

#[target_feature(enable = "avx2,fma")]
unsafe fn turn(rotation: &Rotation, row: &mut [f32]) {
    // SAFETY: the level is available.
    unsafe { turn_row::<Avx2>(rotation, row) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn to_bf16(src: &[f32], out: &mut [u16]) {
    rows::to_bf16(src, out);
}

#[target_feature(enable = "avx2,fma")]
unsafe fn to_i8(src: &[f32], group: usize, codes: &mut [i8], wide: &mut [i16], scales: &mut [f32], sums: &mut [i32]) {
    rows::to_i8(src, group, codes, wide, scales, sums);
}

#[target_feature(enable = "avx2,fma")]
unsafe fn silu_f32(tile: &[[f32; PANEL]], len: usize, out: *mut f32, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::silu_f32(tile, len, out, stride) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn silu_bf16(tile: &[[f32; PANEL]], len: usize, out: *mut u16, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::silu_bf16(tile, len, out, stride) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn store(tile: &[[f32; PANEL]], out: *mut f32, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::store(tile, out, stride) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn add(tile: &[[f32; PANEL]], out: *mut f32, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::add(tile, out, stride) }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn row_max(row: &[f32; PANEL]) -> (f32, bool) {
    rows::row_max(row)
}

#[target_feature(enable = "avx2,fma")]
unsafe fn add_scaled(x: &mut [f32], weight: f32, y: &[f32]) {
    rows::add_scaled(x, weight, y);
}
