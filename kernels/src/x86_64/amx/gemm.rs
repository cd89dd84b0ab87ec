//! GEMM kernels of the AMX level: up to 32 rows by one panel of 32 columns, four sums of 16x16.
//!
//! bf16 always goes through the tile unit, for one row as for many. 8-bit codes may take either way: integer sums are exact,
//! and what is done with them afterwards is the same sequence of operations, so both ways have the portable level's bits.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::{TileShapes, configure, release};
use crate::isa::Isa;
use crate::simd::Simd;
use crate::table::{Around, FinishFn, KernelTable, PANEL, PeakKernels, SUM_BLOCK, Tile, TileFn, TileKernels};
use crate::tiles::Pace;
use crate::x86_64::avx512::gemm::AVX512_BF16;
use crate::x86_64::avx512::simd::Avx512Bf16;

/// Rows of one tile register.
const TILE_ROWS: usize = 16;
/// Rows of the largest tile: two registers.
const ROWS_MAX: usize = 2 * TILE_ROWS;
/// Bytes of a row of a panel: 32 columns of four bytes.
const PANEL_ROW: usize = 4 * PANEL;
/// Activations of a block: they stay in the 2 MiB of L2 that CPUs with AMX have (from 1 MiB on they were measured not to).
const BLOCK_BYTES: usize = 800 << 10;
/// Rows of the tile before that are ended in a step, while the tile unit works for 64 cycles (2 and 8 were measured slower).
const ROWS_A_STEP: usize = 4;
/// Up to so many rows vector dot products are as fast where sums are scaled every few values of K.
const VECTOR_ROWS: usize = 4;

const BF16: [TileFn; ROWS_MAX] = [bf16; ROWS_MAX];
const BYTES: [TileFn; ROWS_MAX] = [codes::<8>; ROWS_MAX];
const NIBBLES: [TileFn; ROWS_MAX] = [codes::<4>; ROWS_MAX];

pub(crate) static AMX: KernelTable = KernelTable {
    isa: Isa::Amx,
    bf16: tiles(&BF16, 512, enter_bf16, finished),
    i8_row: tiles(&BYTES, 1024, enter_codes, finish_by_row),
    i8_group: tiles(&BYTES, 1024, enter_codes, finish_by_row),
    i4: tiles(&NIBBLES, 1024, enter_codes, finished),
    peaks: PeakKernels { bf16: peak_bf16, int8: peak_int8, int4: peak_int8, ..AVX512_BF16.peaks },
    ..AVX512_BF16
};

const fn tiles(
    by_rows: &'static [TileFn],
    k_chunk: usize,
    enter: unsafe fn(usize, usize),
    finish: FinishFn,
) -> TileKernels {
    TileKernels {
        by_rows,
        split_from: usize::MAX,
        row_step: TILE_ROWS,
        prefetch_from: 1,
        block_bytes: BLOCK_BYTES,
        k_chunk,
        finish: Some(finish),
        around: Some(Around { enter, leave: release }),
    }
}

// Tiles of a block have all its rows, or 16: those behind the last row are then computed for nothing.

unsafe fn enter_bf16(rows: usize, _: usize) {
    // SAFETY: the level is available.
    unsafe { configure(TileShapes { rows: rows.min(TILE_ROWS), depth: 64 }) };
}

unsafe fn enter_codes(rows: usize, stretch: usize) {
    // SAFETY: the level is available.
    unsafe { configure(TileShapes { rows: rows.min(TILE_ROWS), depth: depth_of(stretch) }) };
}

/// Bytes of K in a step of codes.
fn depth_of(stretch: usize) -> usize {
    if stretch == 32 { 32 } else { 64 }
}

/// How two operands are multiplied.
trait Product {
    /// `sums[i][j] += first[i] x second[j]` for the tiles of the given rows. The operand that is not needed again soon is read
    /// past L1, where the other one stays: activations with `AGAIN` (a part of a panel meets many rows), else the panel.
    ///
    /// # Safety
    /// Tiles are configured; `a` has the rows, `b` a panel row per four bytes of a step.
    unsafe fn step<const TWO: bool, const AGAIN: bool>(a: *const u8, a_stride: usize, b: *const u8);
}

macro_rules! product {
    ($name:ident, $instruction:literal) => {
        struct $name;

        impl Product for $name {
            #[inline(always)]
            unsafe fn step<const TWO: bool, const AGAIN: bool>(a: *const u8, a_stride: usize, b: *const u8) {
                // SAFETY: the caller's contract.
                unsafe {
                    match (TWO, AGAIN) {
                        (true, true) => product!(@two $instruction, "tileloaddt1", "tileloadd", a, a_stride, b),
                        (true, false) => product!(@two $instruction, "tileloadd", "tileloaddt1", a, a_stride, b),
                        (false, true) => product!(@one $instruction, "tileloaddt1", "tileloadd", a, a_stride, b),
                        (false, false) => product!(@one $instruction, "tileloadd", "tileloaddt1", a, a_stride, b),
                    }
                }
            }
        }
    };
    // Only tile registers change, which nothing else uses.
    (@two $instruction:literal, $load_a:literal, $load_b:literal, $a:expr, $a_stride:expr, $b:expr) => {
        asm!(
            concat!($load_a, " tmm4, [{a} + {a_stride}*1]"),
            concat!($load_b, " tmm6, [{b} + {b_stride}*1]"),
            concat!($instruction, " tmm0, tmm4, tmm6"),
            concat!($load_b, " tmm7, [{b} + {b_stride}*1 + 64]"),
            concat!($instruction, " tmm1, tmm4, tmm7"),
            concat!($load_a, " tmm5, [{a2} + {a_stride}*1]"),
            concat!($instruction, " tmm2, tmm5, tmm6"),
            concat!($instruction, " tmm3, tmm5, tmm7"),
            a = in(reg) $a,
            a2 = in(reg) $a.wrapping_add(TILE_ROWS * $a_stride),
            a_stride = in(reg) $a_stride,
            b = in(reg) $b,
            b_stride = in(reg) PANEL_ROW,
            options(nostack, preserves_flags, readonly)
        )
    };
    (@one $instruction:literal, $load_a:literal, $load_b:literal, $a:expr, $a_stride:expr, $b:expr) => {
        asm!(
            concat!($load_a, " tmm4, [{a} + {a_stride}*1]"),
            concat!($load_b, " tmm6, [{b} + {b_stride}*1]"),
            concat!($instruction, " tmm0, tmm4, tmm6"),
            concat!($load_b, " tmm7, [{b} + {b_stride}*1 + 64]"),
            concat!($instruction, " tmm1, tmm4, tmm7"),
            a = in(reg) $a,
            a_stride = in(reg) $a_stride,
            b = in(reg) $b,
            b_stride = in(reg) PANEL_ROW,
            options(nostack, preserves_flags, readonly)
        )
    };
}

product!(Brain, "tdpbf16ps");
// Activations are signed, codes are not.
product!(Codes, "tdpbsud");

/// Sets the sums to zero.
#[inline(always)]
unsafe fn zero() {
    // SAFETY: tiles are configured.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, nomem, preserves_flags)
        );
    }
}

/// Writes the sums to `[16 or 32][PANEL]` four-byte values.
#[inline(always)]
unsafe fn store<const TWO: bool>(to: *mut u8) {
    // SAFETY: the caller has room for all rows of the tiles.
    unsafe {
        asm!(
            "tilestored [{to} + {stride}*1], tmm0",
            "tilestored [{to} + {stride}*1 + 64], tmm1",
            to = in(reg) to,
            stride = in(reg) PANEL_ROW,
            options(nostack, preserves_flags)
        );
        if TWO {
            asm!(
                "tilestored [{to} + {stride}*1], tmm2",
                "tilestored [{to} + {stride}*1 + 64], tmm3",
                to = in(reg) to.add(TILE_ROWS * PANEL_ROW),
                stride = in(reg) PANEL_ROW,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// Adds the products of `steps` steps of K.
#[inline(always)]
unsafe fn walk<P: Product, const TWO: bool>(
    t: &Tile,
    a: *const u8,
    b: *const u8,
    steps: usize,
    depth: usize,
    pace: &mut Pace,
    paces: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if t.panel_again {
            walk_by::<P, TWO, true>(t, a, b, steps, depth, pace, paces);
        } else {
            walk_by::<P, TWO, false>(t, a, b, steps, depth, pace, paces);
        }
    }
}

#[inline(always)]
unsafe fn walk_by<P: Product, const TWO: bool, const AGAIN: bool>(
    t: &Tile,
    mut a: *const u8,
    mut b: *const u8,
    steps: usize,
    depth: usize,
    pace: &mut Pace,
    paces: usize,
) {
    for _ in 0..steps {
        // SAFETY: the caller's contract.
        unsafe {
            for _ in 0..paces {
                pace.step::<Avx512Bf16>();
            }
            P::step::<TWO, AGAIN>(a, t.a_stride, b);
            if let Some(meanwhile) = t.meanwhile {
                (meanwhile.end_rows)(meanwhile.state, ROWS_A_STEP);
            }
        }
        a = a.wrapping_add(depth);
        b = b.wrapping_add(depth / 4 * PANEL_ROW);
    }
}

/// Reads sums back from where `store` put them.
#[inline(always)]
unsafe fn load<const TWO: bool>(from: *const u8) {
    // SAFETY: the caller stored all rows of the tiles there.
    unsafe {
        asm!(
            "tileloadd tmm0, [{from} + {stride}*1]",
            "tileloadd tmm1, [{from} + {stride}*1 + 64]",
            from = in(reg) from,
            stride = in(reg) PANEL_ROW,
            options(nostack, preserves_flags, readonly)
        );
        if TWO {
            asm!(
                "tileloadd tmm2, [{from} + {stride}*1]",
                "tileloadd tmm3, [{from} + {stride}*1 + 64]",
                from = in(reg) from.add(TILE_ROWS * PANEL_ROW),
                stride = in(reg) PANEL_ROW,
                options(nostack, preserves_flags, readonly)
            );
        }
    }
}

/// The products of `t`'s part of K, added to those of the parts before it: `depth` bytes of activations a step.
#[inline(always)]
unsafe fn part<P: Product, const TWO: bool>(t: &Tile, value_bytes: usize) {
    let mut pace = Pace::new(t, 1);
    let a = t.a.wrapping_add(t.k_from * value_bytes);
    let b = t.panel.wrapping_add(t.k_from * value_bytes / 4 * PANEL_ROW);
    let steps = (t.k_to - t.k_from) * value_bytes / 64;
    // SAFETY: the caller's contract.
    unsafe {
        if t.k_from == 0 {
            zero();
        } else {
            load::<TWO>(t.out.cast());
        }
        walk::<P, TWO>(t, a, b, steps, 64, &mut pace, 64 / value_bytes / SUM_BLOCK);
        store::<TWO>(t.out.cast());
    }
}

/// bf16 weights and activations.
unsafe fn bf16(t: &Tile) {
    // SAFETY: the panel holds k/2 rows of PANEL pairs, activations k values of two bytes, behind them rows that may be read
    // (`Acts`); the output has room for 32 rows.
    unsafe {
        if t.rows > TILE_ROWS {
            part::<Brain, true>(t, 2);
        } else {
            part::<Brain, false>(t, 2);
        }
    }
}

#[repr(align(64))]
#[allow(dead_code)] // used through pointers
struct Sums([[i32; PANEL]; ROWS_MAX]);

/// Unpacked 4-bit codes of one stretch: at most 128 values of K.
#[repr(align(64))]
#[allow(dead_code)] // used through pointers
struct Unpacked([u8; STRETCH_MAX * PANEL]);

const STRETCH_MAX: usize = 128;

/// Codes of `BITS` bits with scales per column or group, activations with scales per row or group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,fma")]
unsafe fn codes<const BITS: usize>(t: &Tile) {
    let stretch = t.group.min(t.act_group);
    let grouped = grouped(t);
    // SAFETY: the caller's contract is the kernel's.
    unsafe {
        // Steps do not fit, or there are so few rows that scaling the sums is what takes time.
        let steps_fit = steps_of_64_fit(t) || (grouped && stretch == 32);
        if !steps_fit || (grouped && t.rows <= VECTOR_ROWS) {
            return by_vectors::<BITS>(t, grouped);
        }
        match (!t.group_scales.is_null(), t.act_group < t.k) {
            (false, false) if t.rows > TILE_ROWS => part::<Codes, true>(t, 1),
            (false, false) => part::<Codes, false>(t, 1),
            (false, true) => scaled::<BITS, false, true, false>(t),
            (true, false) if t.group_zeros.is_null() => scaled::<BITS, true, false, false>(t),
            (true, true) if t.group_zeros.is_null() => scaled::<BITS, true, true, false>(t),
            (true, false) => scaled::<BITS, true, false, true>(t),
            (true, true) => scaled::<BITS, true, true, true>(t),
        }
    }
}

/// The same by vector dot products, a few rows at a time.
unsafe fn by_vectors<const BITS: usize>(t: &Tile, grouped: bool) {
    if t.k_to < t.k {
        // Vector kernels walk all of K at once.
        return;
    }
    let kernels = match (BITS, grouped) {
        (4, _) => &AVX512_BF16.i4,
        (_, true) => &AVX512_BF16.i8_group,
        (_, false) => &AVX512_BF16.i8_row,
    };
    let mut row = 0;
    while row < t.rows {
        let rows = (t.rows - row).min(kernels.by_rows.len());
        // SAFETY: rows of this tile.
        unsafe {
            kernels.by_rows[rows - 1](&Tile {
                rows,
                k_from: 0,
                a: t.a.add(row * t.a_stride),
                act_scales: t.act_scales.add(row * t.act_scale_stride),
                act_sums: t.act_sums.add(row * t.act_sum_stride),
                out: t.out.add(row * PANEL),
                ..*t
            });
        }
        row += rows;
    }
}

/// Whether scales change along K on either side.
fn grouped(t: &Tile) -> bool {
    !t.group_scales.is_null() || t.act_group < t.k
}

/// Whether all of K can be walked in the steps of whole tiles.
fn steps_of_64_fit(t: &Tile) -> bool {
    t.k.is_multiple_of(64)
}

/// The kernel has done it all.
unsafe fn finished(_: &Tile, _: Range<usize>) {}

/// Scales sums of 8-bit codes with one scale per column and per row.
#[target_feature(enable = "avx512f")]
unsafe fn finish_by_row(t: &Tile, rows: Range<usize>) {
    if grouped(t) || !steps_of_64_fit(t) {
        // Groups are scaled on the way; and the vector kernels, which were asked then, scale themselves.
        return;
    }
    // SAFETY: the caller's contract; scales and sums exist for every row and column.
    unsafe {
        let columns = [_mm512_loadu_ps(t.column_scales), _mm512_loadu_ps(t.column_scales.add(16))];
        for row in rows {
            let act_sum = *t.act_sums.add(row * t.act_sum_stride + t.k / SUM_BLOCK);
            let correction = _mm512_set1_epi32(-128 * act_sum);
            let act_scales = _mm512_set1_ps(*t.act_scales.add(row * t.act_scale_stride));
            for v in 0..2 {
                let out = t.out.add(row * PANEL + 16 * v);
                let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(out.cast()), correction));
                _mm512_store_ps(out, _mm512_mul_ps(_mm512_mul_ps(dot, columns[v]), act_scales));
            }
        }
    }
}

/// Groups on the weights' side (`WG`), the activations' (`AG`) or both. While the sums of one stretch of K are scaled, the tile
/// unit works on the next: that is why there are two sets of sums.
#[inline(always)]
unsafe fn scaled<const BITS: usize, const WG: bool, const AG: bool, const ZEROS: bool>(t: &Tile) {
    let stretch = t.group.min(t.act_group);
    let depth = depth_of(stretch);
    let mut pace = Pace::new(t, 1);
    let mut sums = [const { MaybeUninit::<Sums>::uninit() }; 2];
    let mut unpacked = MaybeUninit::<Unpacked>::uninit();
    let unpacked = unpacked.as_mut_ptr().cast::<u8>();
    let mut start = t.k_from;
    let mut turn = 0;
    let mut before = None;
    // SAFETY: as for `bf16`; codes have a byte (half a byte) per value, scales and sums exist for every group (Tile's contract).
    unsafe {
        if start == 0 {
            t.out.write_bytes(0, t.rows * PANEL);
        }
        while start < t.k_to {
            let end = (start + stretch).min(t.k);
            let b = if BITS == 4 {
                unpack(t.panel.add(start / 8 * PANEL_ROW), (end - start) / 8, unpacked);
                unpacked.cast_const()
            } else {
                t.panel.add(start / 4 * PANEL_ROW)
            };
            let (a, steps, paces) = (t.a.add(start), (end - start) / depth, depth / SUM_BLOCK);
            let to = sums[turn].as_mut_ptr().cast::<i32>();
            zero();
            if t.rows > TILE_ROWS {
                walk::<Codes, true>(t, a, b, steps, depth, &mut pace, paces);
                store::<true>(to.cast());
            } else {
                walk::<Codes, false>(t, a, b, steps, depth, &mut pace, paces);
                store::<false>(to.cast());
            }
            if let Some((start, end, sums)) = before {
                scale::<BITS, WG, AG, ZEROS>(t, start, end, sums);
            }
            before = Some((start, end, to.cast_const()));
            (start, turn) = (end, 1 - turn);
        }
        if let Some((start, end, sums)) = before {
            scale::<BITS, WG, AG, ZEROS>(t, start, end, sums);
        }
        if t.k_to == t.k {
            finish::<WG, AG>(t);
        }
    }
}

/// Adds the exact sums of one stretch to the totals in `t.out`; the arithmetic is that of `tiles::accumulate`.
#[inline(always)]
unsafe fn scale<const BITS: usize, const WG: bool, const AG: bool, const ZEROS: bool>(
    t: &Tile,
    start: usize,
    end: usize,
    sums: *const i32,
) {
    let offset = match (ZEROS, BITS) {
        (true, _) => 0,
        (false, 4) => 8,
        (false, _) => 128,
    };
    let at = start / t.group * PANEL;
    // SAFETY: the caller's contract.
    unsafe {
        let mut scales = [_mm512_set1_ps(0.0); 2];
        let mut zero_points = scales;
        for v in 0..2 {
            if WG {
                scales[v] = Avx512Bf16::load_f16(t.group_scales.add(at + 16 * v));
            }
            if ZEROS {
                zero_points[v] = Avx512Bf16::load_f16(t.group_zeros.add(at + 16 * v));
            }
        }
        let mut sum_before = t.act_sums.add(start / SUM_BLOCK);
        let mut sum_after = t.act_sums.add(end / SUM_BLOCK);
        let mut act_scale = t.act_scales.add(start / t.act_group);
        let (mut dots, mut out) = (sums, t.out);
        for _ in 0..t.rows {
            let act_sum = *sum_after - *sum_before;
            let correction = _mm512_set1_epi32(-offset * act_sum);
            let act_scales = _mm512_set1_ps(*act_scale);
            for v in 0..2 {
                let mut dot = _mm512_load_si512(dots.add(16 * v).cast());
                if offset != 0 {
                    dot = _mm512_add_epi32(dot, correction);
                }
                let factor = match (WG, AG) {
                    (true, true) => _mm512_mul_ps(scales[v], act_scales),
                    (true, false) => scales[v],
                    (false, _) => act_scales,
                };
                let mut total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), factor, _mm512_load_ps(out.add(16 * v)));
                if ZEROS {
                    let negative = -(act_sum as f32);
                    let zero_sum = _mm512_set1_ps(if AG { negative * *act_scale } else { negative });
                    total = _mm512_fmadd_ps(zero_points[v], zero_sum, total);
                }
                _mm512_store_ps(out.add(16 * v), total);
            }
            sum_before = sum_before.add(t.act_sum_stride);
            sum_after = sum_after.add(t.act_sum_stride);
            act_scale = act_scale.add(t.act_scale_stride);
            (dots, out) = (dots.add(PANEL), out.add(PANEL));
        }
    }
}

/// Applies the scales that hold for the whole of K, as `tiles::finish` does.
#[inline(always)]
unsafe fn finish<const WG: bool, const AG: bool>(t: &Tile) {
    // SAFETY: the caller's contract.
    unsafe {
        for row in 0..t.rows {
            let factor = match (WG, AG) {
                (true, true) => t.unit,
                _ => *t.act_scales.add(row * t.act_scale_stride) * t.unit,
            };
            for v in 0..2 {
                let out = t.out.add(row * PANEL + 16 * v);
                let factor = if WG { _mm512_set1_ps(factor) } else { _mm512_loadu_ps(t.column_scales.add(16 * v)) };
                _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), factor));
            }
        }
    }
}

/// Makes bytes of 4-bit codes: a row of a panel holds values k..k+4 in its low and k+4..k+8 in its high nibbles.
#[inline(always)]
unsafe fn unpack(from: *const u8, rows: usize, to: *mut u8) {
    // SAFETY: `rows` rows of the panel, twice as many of the output.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        for row in 0..rows {
            for v in 0..2 {
                let bytes = _mm512_loadu_si512(from.add(row * PANEL_ROW + 64 * v).cast());
                let to = to.add(2 * row * PANEL_ROW + 64 * v);
                _mm512_store_si512(to.cast(), _mm512_and_si512(bytes, mask));
                _mm512_store_si512(to.add(PANEL_ROW).cast(), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask));
            }
        }
    }
}

/// Products of the four sums from registers.
macro_rules! peak {
    ($name:ident, $instruction:literal, $operations:expr) => {
        unsafe fn $name() -> f64 {
            const STEPS: u32 = 60_000;
            // SAFETY: the level is available.
            unsafe {
                configure(TileShapes { rows: TILE_ROWS, depth: 64 });
                zero();
                for _ in 0..STEPS {
                    asm!(
                        concat!($instruction, " tmm0, tmm4, tmm6"),
                        concat!($instruction, " tmm1, tmm4, tmm7"),
                        concat!($instruction, " tmm2, tmm5, tmm6"),
                        concat!($instruction, " tmm3, tmm5, tmm7"),
                        options(nostack, nomem, preserves_flags)
                    );
                }
                release();
            }
            f64::from(STEPS) * 4.0 * $operations
        }
    };
}

peak!(peak_bf16, "tdpbf16ps", 16384.0);
peak!(peak_int8, "tdpbsud", 32768.0);
