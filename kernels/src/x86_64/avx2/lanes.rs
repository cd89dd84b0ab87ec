//! Comparisons and reductions of 256-bit vectors.

use std::arch::x86_64::*;

use super::simd::Avx2;
use crate::lanes::Lanes;

/// All ones in the first `count` lanes.
#[inline(always)]
unsafe fn first_mask(count: usize) -> __m256i {
    // SAFETY: the level's instructions are there by the trait's contract.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

// SAFETY (of every block): the trait's contract gives the instructions and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx2 {
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn first(count: usize, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first_mask(count))) }
    }
    #[inline(always)]
    unsafe fn load_first(count: usize, from: *const f32) -> __m256 {
        unsafe { _mm256_maskload_ps(from, first_mask(count)) }
    }
    #[inline(always)]
    unsafe fn at_least(a: __m256, b: __m256) -> u32 {
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(a, b)) as u32 }
    }
    #[inline(always)]
    unsafe fn reduce_max(a: __m256) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(a: __m256) -> f32 {
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn power_of_two(shifted: __m256) -> __m256 {
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, a: __m256) {
        unsafe {
            let bits = _mm256_castps_si256(a);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn butterfly<const DISTANCE: usize>(a: __m256) -> __m256 {
        unsafe {
            let other = match DISTANCE {
                1 => _mm256_permute_ps::<0b1011_0001>(a),
                2 => _mm256_permute_ps::<0b0100_1110>(a),
                4 => _mm256_permute2f128_ps::<0x01>(a, a),
                _ => unreachable!(),
            };
            let (sum, difference) = (_mm256_add_ps(a, other), _mm256_sub_ps(other, a));
            match DISTANCE {
                1 => _mm256_blend_ps::<0b1010_1010>(sum, difference),
                2 => _mm256_blend_ps::<0b1100_1100>(sum, difference),
                _ => _mm256_blend_ps::<0b1111_0000>(sum, difference),
            }
        }
    }
    #[inline(always)]
    unsafe fn rotate(pairs: __m256, cos_sin: __m256) -> __m256 {
        unsafe {
            let (cos, sin) = (_mm256_moveldup_ps(cos_sin), _mm256_movehdup_ps(cos_sin));
            let swapped = _mm256_permute_ps::<0b1011_0001>(pairs);
            _mm256_fmaddsub_ps(pairs, cos, _mm256_mul_ps(swapped, sin))
        }
    }
}
