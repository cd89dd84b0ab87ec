//! Codes on AVX2, without a byte dot product.

use std::arch::x86_64::*;

use super::simd::Avx2;
use crate::simd::Simd;
use crate::table::{PANEL, SUM_BLOCK, Tile};
use crate::tiles::{Codes, Pace, act, start_values};

/// 8-bit codes as pairs of 16-bit numbers: bytes 0 and 2 of each four, then 1 and 3. Activations come as i16 in that order.
pub(crate) struct PairI8;

impl<const MR: usize, const NV: usize> Codes<Avx2, MR, NV> for PairI8 {
    #[inline(always)]
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[__m256i; NV]; MR],
    ) {
        // SAFETY: k stays below t.k, columns inside the panel; the caller has AVX2.
        unsafe {
            let mut acc = start_values::<Avx2, MR, NV>(t, start, end, offset);
            let even = _mm256_set1_epi16(0xff);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Avx2>();
                for step in block * (SUM_BLOCK / 4)..(block + 1) * (SUM_BLOCK / 4) {
                    let from = panel.add(step * PANEL * 4);
                    for odd in 0..2 {
                        let mut w = [_mm256_setzero_si256(); NV];
                        for v in 0..NV {
                            let bytes = Avx2::load_i(from.add(v * 32));
                            w[v] = if odd == 0 { _mm256_and_si256(bytes, even) } else { _mm256_srli_epi16::<8>(bytes) };
                        }
                        for row in 0..MR {
                            let a = Avx2::splat_i(act(t, row, t.a_wide + 8 * step + 4 * odd));
                            for v in 0..NV {
                                acc[row][v] = _mm256_add_epi32(acc[row][v], _mm256_madd_epi16(w[v], a));
                            }
                        }
                    }
                }
            }
            *dots = acc;
        }
    }
}

/// 4-bit codes by byte products summed in 16 bits: at most 8 * 2 * 15 * 127 = 30480 over 32 values of K.
pub(crate) struct WideI4;

impl<const MR: usize, const NV: usize> Codes<Avx2, MR, NV> for WideI4 {
    #[inline(always)]
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[__m256i; NV]; MR],
    ) {
        // SAFETY: k stays below t.k, columns inside the panel; the caller has AVX2.
        unsafe {
            let mut total = start_values::<Avx2, MR, NV>(t, start, end, offset);
            let ones = _mm256_set1_epi16(1);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Avx2>();
                let mut acc = [[_mm256_setzero_si256(); NV]; MR];
                for step in block * (SUM_BLOCK / 8)..(block + 1) * (SUM_BLOCK / 8) {
                    let from = panel.add(step * PANEL * 4);
                    for high in 0..2 {
                        let mut w = [_mm256_setzero_si256(); NV];
                        for v in 0..NV {
                            let bytes = Avx2::load_i(from.add(v * 32));
                            w[v] = if high == 0 { Avx2::nibbles_low(bytes) } else { Avx2::nibbles_high(bytes) };
                        }
                        for row in 0..MR {
                            let a = Avx2::splat_i(act(t, row, 8 * step + 4 * high));
                            for v in 0..NV {
                                acc[row][v] = _mm256_add_epi16(acc[row][v], _mm256_maddubs_epi16(w[v], a));
                            }
                        }
                    }
                }
                for row in 0..MR {
                    for v in 0..NV {
                        total[row][v] = _mm256_add_epi32(total[row][v], _mm256_madd_epi16(acc[row][v], ones));
                    }
                }
            }
            *dots = total;
        }
    }
}
