//! Comparisons and reductions of 512-bit vectors.

use std::arch::x86_64::*;

use super::simd::{Avx512, Avx512Bf16};
use crate::lanes::{Lanes, exp2_polynomial};

/// Bits of the first `count` lanes.
#[inline(always)]
fn first_mask(count: usize) -> u16 {
    (1_u32.unbounded_shl(count as u32) - 1) as u16
}

/// Both levels share everything but the rounding to bf16.
macro_rules! lanes_512 {
    ($level:ty, $store_bf16:ident) => {
        // SAFETY (of every block): the trait's contract gives the instructions and valid pointers.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Lanes for $level {
            #[inline(always)]
            unsafe fn add(a: __m512, b: __m512) -> __m512 {
                unsafe { _mm512_add_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn sub(a: __m512, b: __m512) -> __m512 {
                unsafe { _mm512_sub_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn max(a: __m512, b: __m512) -> __m512 {
                unsafe { _mm512_max_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn first(count: usize, a: __m512, b: __m512) -> __m512 {
                unsafe { _mm512_mask_blend_ps(first_mask(count), b, a) }
            }
            #[inline(always)]
            unsafe fn load_first(count: usize, from: *const f32) -> __m512 {
                unsafe { _mm512_maskz_loadu_ps(first_mask(count), from) }
            }
            #[inline(always)]
            unsafe fn at_least(a: __m512, b: __m512) -> u32 {
                unsafe { u32::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(a, b)) }
            }
            #[inline(always)]
            unsafe fn reduce_max(a: __m512) -> f32 {
                unsafe {
                    let x = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
                    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
                    _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
                }
            }
            #[inline(always)]
            unsafe fn reduce_add(a: __m512) -> f32 {
                unsafe {
                    let x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
                    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
                    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
                }
            }
            #[inline(always)]
            unsafe fn power_of_two(shifted: __m512) -> __m512 {
                unsafe {
                    let exponent = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
                }
            }
            #[inline(always)]
            unsafe fn store_bf16(to: *mut u16, a: __m512) {
                unsafe { $store_bf16(to, a) }
            }
            #[inline(always)]
            unsafe fn butterfly<const DISTANCE: usize>(a: __m512) -> __m512 {
                unsafe {
                    let (other, second) = match DISTANCE {
                        1 => (_mm512_permute_ps::<0b1011_0001>(a), 0xaaaa),
                        2 => (_mm512_permute_ps::<0b0100_1110>(a), 0xcccc),
                        4 => (_mm512_shuffle_f32x4::<0b1011_0001>(a, a), 0xf0f0),
                        8 => (_mm512_shuffle_f32x4::<0b0100_1110>(a, a), 0xff00),
                        _ => unreachable!(),
                    };
                    _mm512_mask_sub_ps(_mm512_add_ps(a, other), second, other, a)
                }
            }
            #[inline(always)]
            unsafe fn rotate(pairs: __m512, cos_sin: __m512) -> __m512 {
                unsafe {
                    let (cos, sin) = (_mm512_moveldup_ps(cos_sin), _mm512_movehdup_ps(cos_sin));
                    let swapped = _mm512_permute_ps::<0b1011_0001>(pairs);
                    _mm512_fmaddsub_ps(pairs, cos, _mm512_mul_ps(swapped, sin))
                }
            }
            #[inline(always)]
            unsafe fn exp2(x: __m512) -> __m512 {
                unsafe {
                    // Rounded to whole numbers; scalef multiplies by a power of two of any size, down to 0.
                    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
                    // Far below, f must stay a small number: -1e30 - n is 0, but -inf would give NaN.
                    let x = _mm512_max_ps(_mm512_set1_ps(-1e30), x);
                    let n = _mm512_max_ps(_mm512_set1_ps(-1e30), n);
                    _mm512_scalef_ps(exp2_polynomial::<Self>(_mm512_sub_ps(x, n)), n)
                }
            }
        }
    };
}

/// Rounds with the instruction for it.
#[inline(always)]
unsafe fn store_by_instruction(to: *mut u16, a: __m512) {
    // SAFETY: the trait's contract; both types are 32 plain bytes.
    unsafe { _mm256_storeu_si256(to.cast(), std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(a))) }
}

/// Rounds by adding half of what is cut off.
#[inline(always)]
unsafe fn store_by_adding(to: *mut u16, a: __m512) {
    // SAFETY: the trait's contract.
    unsafe {
        let bits = _mm512_castps_si512(a);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
        let high = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(high));
    }
}

lanes_512!(Avx512, store_by_adding);
lanes_512!(Avx512Bf16, store_by_instruction);
