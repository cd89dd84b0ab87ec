//! GEMM tables of the AVX-512 levels.

use super::peaks;
use super::simd::Avx512;
use crate::isa::Isa;
use crate::reference::rows;
use crate::rotation::{Rotation, turn_row};
use crate::table::{Form, KernelTable, PANEL, RowKernels};

mod plain {
    use super::super::simd::Avx512;
    crate::wide::wide_kernels!(
        Avx512,
        [1 2 3 4 5 6 7 8 9 10 11 12],
        [1 2 3 4 5 6],
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")]
    );
}

mod with_bf16 {
    use super::super::simd::Avx512Bf16;
    use crate::table::{Tile, TileFn, TileKernels};
    use crate::tiles;
    crate::wide::wide_kernels!(
        bf16 Avx512Bf16,
        [1 2 3 4 5 6 7 8 9 10 11 12],
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")]
    );
}

pub(crate) static AVX512: KernelTable = KernelTable {
    isa: Isa::Avx512,
    bf16_form: Form::F32,
    i8_form: Form::I8,
    f32: plain::F32,
    bf16: plain::BF16,
    i8_row: plain::I8_ROW,
    i8_group: plain::I8_GROUP,
    i4: plain::I4,
    rows: ROWS,
    peaks: peaks::AVX512,
};

pub(crate) static AVX512_BF16: KernelTable = KernelTable {
    isa: Isa::Avx512Bf16,
    bf16_form: Form::Bf16,
    bf16: with_bf16::BF16_DOT,
    peaks: peaks::AVX512_BF16,
    ..AVX512
};

/// The portable row operations, compiled for 512-bit vectors: the same bits, vectorised.
const ROWS: RowKernels =
    RowKernels { rmsnorm, turn, to_bf16, to_i8, silu_f32, silu_bf16, store, add, row_max, add_scaled };

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn rmsnorm(src: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rows::rmsnorm(src, weight, eps, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn turn(rotation: &Rotation, row: &mut [f32]) {
    // SAFETY: the level is available.
    unsafe { turn_row::<Avx512>(rotation, row) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn to_bf16(src: &[f32], out: &mut [u16]) {
    rows::to_bf16(src, out);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn to_i8(src: &[f32], group: usize, codes: &mut [i8], wide: &mut [i16], scales: &mut [f32], sums: &mut [i32]) {
    rows::to_i8(src, group, codes, wide, scales, sums);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn silu_f32(tile: &[[f32; PANEL]], len: usize, out: *mut f32, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::silu_f32(tile, len, out, stride) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn silu_bf16(tile: &[[f32; PANEL]], len: usize, out: *mut u16, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::silu_bf16(tile, len, out, stride) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn store(tile: &[[f32; PANEL]], out: *mut f32, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::store(tile, out, stride) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn add(tile: &[[f32; PANEL]], out: *mut f32, stride: usize) {
    // SAFETY: handed on.
    unsafe { rows::add(tile, out, stride) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn row_max(row: &[f32; PANEL]) -> (f32, bool) {
    rows::row_max(row)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn add_scaled(x: &mut [f32], weight: f32, y: &[f32]) {
    rows::add_scaled(x, weight, y);
}
