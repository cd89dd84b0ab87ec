//! Codes on NEON with dot products of four signed bytes.
//!
//! The instruction takes the activations from one lane of a vector, so 16 values of K of every row are loaded at once. All
//! codes are signed: 4-bit ones as they are, 8-bit ones less 128.

use std::arch::aarch64::*;
use std::arch::asm;

use super::integer::signed;
use super::simd::Neon;
use crate::simd::Simd;
use crate::table::{PANEL, SUM_BLOCK, Tile};
use crate::tiles::{Codes, Pace, start_values};

/// Values of K in one vector of activations.
const VECTOR_K: usize = 16;

/// `acc + the four products` of `w` in each lane and lane `LANE` of `a`, exact.
///
/// # Safety
/// The CPU has dot products of bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn dot<const LANE: usize>(mut acc: int32x4_t, w: int8x16_t, a: int8x16_t) -> int32x4_t {
    // Written out: the intrinsic is not in every compiler that builds this.
    // SAFETY: touches only the registers named.
    unsafe {
        asm!(
            "sdot {acc:v}.4s, {w:v}.16b, {a:v}.4b[{lane}]",
            acc = inout(vreg) acc, w = in(vreg) w, a = in(vreg) a, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// `VECTOR_K` values of K of all rows from `k` on.
#[inline(always)]
unsafe fn acts<const MR: usize>(t: &Tile, k: usize) -> [int8x16_t; MR] {
    // SAFETY: the caller stays inside the rows.
    unsafe {
        let mut a = [vdupq_n_s8(0); MR];
        for row in 0..MR {
            a[row] = vld1q_s8(t.a.add(row * t.a_stride + k).cast());
        }
        a
    }
}

/// 8-bit codes.
pub(crate) struct SignedI8;

impl<const MR: usize, const NV: usize> Codes<Neon, MR, NV> for SignedI8 {
    #[inline(always)]
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[int32x4_t; NV]; MR],
    ) {
        // SAFETY: k stays below t.k, columns inside the panel; the caller has dot products.
        unsafe {
            let mut acc = start_values::<Neon, MR, NV>(t, start, end, offset - 128);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Neon>();
                for k in [block * SUM_BLOCK, block * SUM_BLOCK + VECTOR_K] {
                    let a = acts::<MR>(t, k);
                    let from = panel.add(k * PANEL);
                    four_k::<0, MR, NV>(from, &a, &mut acc);
                    four_k::<1, MR, NV>(from, &a, &mut acc);
                    four_k::<2, MR, NV>(from, &a, &mut acc);
                    four_k::<3, MR, NV>(from, &a, &mut acc);
                }
            }
            *dots = acc;
        }
    }
}

/// The four values of K that lane `LANE` of `a` holds; `from` points to where `a`'s begin.
#[inline(always)]
unsafe fn four_k<const LANE: usize, const MR: usize, const NV: usize>(
    from: *const u8,
    a: &[int8x16_t; MR],
    acc: &mut [[int32x4_t; NV]; MR],
) {
    for v in 0..NV {
        // SAFETY: as in `stretch`.
        unsafe {
            let w = signed(from.add(LANE * PANEL * 4 + v * 16));
            for row in 0..MR {
                acc[row][v] = dot::<LANE>(acc[row][v], w, a[row]);
            }
        }
    }
}

/// 4-bit codes.
pub(crate) struct SignedI4;

impl<const MR: usize, const NV: usize> Codes<Neon, MR, NV> for SignedI4 {
    #[inline(always)]
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[int32x4_t; NV]; MR],
    ) {
        // SAFETY: as above.
        unsafe {
            let mut acc = start_values::<Neon, MR, NV>(t, start, end, offset);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Neon>();
                for k in [block * SUM_BLOCK, block * SUM_BLOCK + VECTOR_K] {
                    let a = acts::<MR>(t, k);
                    let from = panel.add(k * PANEL / 2);
                    eight_k::<0, 1, MR, NV>(from, &a, &mut acc);
                    eight_k::<2, 3, MR, NV>(from.add(PANEL * 4), &a, &mut acc);
                }
            }
            *dots = acc;
        }
    }
}

/// The eight values of K that lanes `LOW` and `HIGH` of `a` hold: low and high halves of the bytes at `from`.
#[inline(always)]
unsafe fn eight_k<const LOW: usize, const HIGH: usize, const MR: usize, const NV: usize>(
    from: *const u8,
    a: &[int8x16_t; MR],
    acc: &mut [[int32x4_t; NV]; MR],
) {
    for v in 0..NV {
        // SAFETY: as in `stretch`.
        unsafe {
            let bytes = Neon::load_i(from.add(v * 16));
            let low = vreinterpretq_s8_s32(Neon::nibbles_low(bytes));
            let high = vreinterpretq_s8_s32(Neon::nibbles_high(bytes));
            for row in 0..MR {
                acc[row][v] = dot::<HIGH>(dot::<LOW>(acc[row][v], low, a[row]), high, a[row]);
            }
        }
    }
}
