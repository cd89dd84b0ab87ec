//! Codes on NEON without a byte dot product.
//!
//! Products of signed bytes go into 16 bits. Two of 8-bit codes fit there, and eight of 4-bit codes: then pairs are added into 32.

use std::arch::aarch64::*;

use super::simd::Neon;
use crate::simd::Simd;
use crate::table::{PANEL, SUM_BLOCK, Tile};
use crate::tiles::{Codes, Pace, act, start_values};

/// Four values of K of `row` in every lane.
#[inline(always)]
unsafe fn act_bytes(t: &Tile, row: usize, k: usize) -> int8x16_t {
    // SAFETY: the caller stays inside the row.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(act(t, row, k))) }
}

/// 8-bit codes less 128: two products are at most 2 * 128 * 127 = 32512.
pub(crate) struct PairI8;

impl<const MR: usize, const NV: usize> Codes<Neon, MR, NV> for PairI8 {
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
        // SAFETY: k stays below t.k, columns inside the panel.
        unsafe {
            let mut acc = start_values::<Neon, MR, NV>(t, start, end, offset - 128);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Neon>();
                for step in block * (SUM_BLOCK / 4)..(block + 1) * (SUM_BLOCK / 4) {
                    let mut a = [vdupq_n_s8(0); MR];
                    for row in 0..MR {
                        a[row] = act_bytes(t, row, 4 * step);
                    }
                    for v in 0..NV {
                        let w = signed(panel.add(step * PANEL * 4 + v * 16));
                        for row in 0..MR {
                            let low = vmull_s8(vget_low_s8(w), vget_low_s8(a[row]));
                            let high = vmull_high_s8(w, a[row]);
                            acc[row][v] = vpadalq_s16(acc[row][v], vpaddq_s16(low, high));
                        }
                    }
                }
            }
            *dots = acc;
        }
    }
}

/// Sixteen 8-bit codes less 128.
///
/// # Safety
/// `from` points to as many bytes.
#[inline(always)]
pub(super) unsafe fn signed(from: *const u8) -> int8x16_t {
    // SAFETY: the caller's contract.
    unsafe { vreinterpretq_s8_u8(veorq_u8(vld1q_u8(from), vdupq_n_u8(0x80))) }
}

/// 4-bit codes: 16 products are at most 16 * 15 * 127 = 30480 over 32 values of K.
pub(crate) struct WideI4;

impl<const MR: usize, const NV: usize> Codes<Neon, MR, NV> for WideI4 {
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
        // SAFETY: k stays below t.k, columns inside the panel.
        unsafe {
            *dots = start_values::<Neon, MR, NV>(t, start, end, offset);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Neon>();
                let mut low = [[vdupq_n_s16(0); NV]; MR];
                let mut high = [[vdupq_n_s16(0); NV]; MR];
                for step in block * (SUM_BLOCK / 8)..(block + 1) * (SUM_BLOCK / 8) {
                    for half in 0..2 {
                        let mut a = [vdupq_n_s8(0); MR];
                        for row in 0..MR {
                            a[row] = act_bytes(t, row, 8 * step + 4 * half);
                        }
                        for v in 0..NV {
                            let bytes = Neon::load_i(panel.add(step * PANEL * 4 + v * 16));
                            let w = if half == 0 { Neon::nibbles_low(bytes) } else { Neon::nibbles_high(bytes) };
                            let w = vreinterpretq_s8_s32(w);
                            for row in 0..MR {
                                low[row][v] = vmlal_s8(low[row][v], vget_low_s8(w), vget_low_s8(a[row]));
                                high[row][v] = vmlal_high_s8(high[row][v], w, a[row]);
                            }
                        }
                    }
                }
                for row in 0..MR {
                    for v in 0..NV {
                        dots[row][v] = vpadalq_s16(dots[row][v], vpaddq_s16(low[row][v], high[row][v]));
                    }
                }
            }
        }
    }
}
