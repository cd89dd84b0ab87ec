//! Codes on AVX2, without a byte dot product.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::simd::Avx2;
use crate::simd::Simd;
use crate::table::{PANEL, SUM_BLOCK, Tile};
use crate::tiles::{Codes, Pace, act, start_values};

/// `acc + w * a` for pairs of 16-bit numbers.
///
/// Both steps are written out because the compiler would otherwise regroup the integer sums of several steps, which takes
/// more registers than there are.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn pair_step(mut acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
    // SAFETY: touches only the registers named; the caller has AVX2.
    unsafe {
        asm!(
            "vpmaddwd {t}, {w}, {a}",
            "vpaddd {acc}, {acc}, {t}",
            t = out(ymm_reg) _, acc = inout(ymm_reg) acc, w = in(ymm_reg) w, a = in(ymm_reg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// `acc + w * a` for pairs of unsigned and signed bytes, in 16 bits; `w * a` alone if `first`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn byte_step(mut acc: __m256i, w: __m256i, a: __m256i, first: bool) -> __m256i {
    if first {
        return _mm256_maddubs_epi16(w, a);
    }
    // SAFETY: as above.
    unsafe {
        asm!(
            "vpmaddubsw {t}, {w}, {a}",
            "vpaddw {acc}, {acc}, {t}",
            t = out(ymm_reg) _, acc = inout(ymm_reg) acc, w = in(ymm_reg) w, a = in(ymm_reg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

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
                        if NV > MR {
                            let mut a = [_mm256_setzero_si256(); MR];
                            for row in 0..MR {
                                a[row] = Avx2::splat_i(act(t, row, t.a_wide + 8 * step + 4 * odd));
                            }
                            for v in 0..NV {
                                let bytes = Avx2::load_i(from.add(v * 32));
                                let w = if odd == 0 {
                                    _mm256_and_si256(bytes, even)
                                } else {
                                    _mm256_srli_epi16::<8>(bytes)
                                };
                                for row in 0..MR {
                                    acc[row][v] = pair_step(acc[row][v], w, a[row]);
                                }
                            }
                            continue;
                        }
                        let mut w = [_mm256_setzero_si256(); NV];
                        for v in 0..NV {
                            let bytes = Avx2::load_i(from.add(v * 32));
                            w[v] = if odd == 0 { _mm256_and_si256(bytes, even) } else { _mm256_srli_epi16::<8>(bytes) };
                        }
                        for row in 0..MR {
                            let a = Avx2::splat_i(act(t, row, t.a_wide + 8 * step + 4 * odd));
                            for v in 0..NV {
                                acc[row][v] = pair_step(acc[row][v], w[v], a);
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
            *dots = start_values::<Avx2, MR, NV>(t, start, end, offset);
            let ones = _mm256_set1_epi16(1);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<Avx2>();
                let mut acc = [[_mm256_setzero_si256(); NV]; MR];
                let step = block * (SUM_BLOCK / 8);
                eight_k::<MR, NV, true>(t, panel, step, &mut acc);
                eight_k::<MR, NV, false>(t, panel, step + 1, &mut acc);
                eight_k::<MR, NV, false>(t, panel, step + 2, &mut acc);
                eight_k::<MR, NV, false>(t, panel, step + 3, &mut acc);
                // In memory on purpose: the 16-bit sums need the registers.
                let total = black_box(&mut *dots);
                for row in 0..MR {
                    for v in 0..NV {
                        total[row][v] = _mm256_add_epi32(total[row][v], _mm256_madd_epi16(acc[row][v], ones));
                    }
                }
            }
        }
    }
}

/// Eight values of K; the `FIRST` of a block overwrites the sums.
#[inline(always)]
unsafe fn eight_k<const MR: usize, const NV: usize, const FIRST: bool>(
    t: &Tile,
    panel: *const u8,
    step: usize,
    acc: &mut [[__m256i; NV]; MR],
) {
    // SAFETY: as in `stretch`.
    unsafe {
        let from = panel.add(step * PANEL * 4);
        for high in 0..2 {
            let first = FIRST && high == 0;
            if NV > MR {
                let mut a = [_mm256_setzero_si256(); MR];
                for row in 0..MR {
                    a[row] = Avx2::splat_i(act(t, row, 8 * step + 4 * high));
                }
                for v in 0..NV {
                    let bytes = Avx2::load_i(from.add(v * 32));
                    let w = if high == 0 { Avx2::nibbles_low(bytes) } else { Avx2::nibbles_high(bytes) };
                    for row in 0..MR {
                        acc[row][v] = byte_step(acc[row][v], w, a[row], first);
                    }
                }
                continue;
            }
            let mut w = [_mm256_setzero_si256(); NV];
            for v in 0..NV {
                let bytes = Avx2::load_i(from.add(v * 32));
                w[v] = if high == 0 { Avx2::nibbles_low(bytes) } else { Avx2::nibbles_high(bytes) };
            }
            for row in 0..MR {
                let a = Avx2::splat_i(act(t, row, 8 * step + 4 * high));
                for v in 0..NV {
                    acc[row][v] = byte_step(acc[row][v], w[v], a, first);
                }
            }
        }
    }
}
