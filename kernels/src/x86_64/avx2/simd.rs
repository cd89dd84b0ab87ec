//! 256-bit vectors.

use std::arch::x86_64::*;

use crate::simd::{ByteDot, Simd};

/// AVX2, FMA, F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// `Avx2` with AVX-VNNI.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni;

macro_rules! simd_256 {
    ($level:ty) => {
        // SAFETY (of every block): the trait's contract gives the instructions and valid pointers.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Simd for $level {
            const LANES: usize = 8;
            type F = __m256;
            type I = __m256i;

            #[inline(always)]
            unsafe fn zero() -> __m256 {
                unsafe { _mm256_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn splat(value: f32) -> __m256 {
                unsafe { _mm256_set1_ps(value) }
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> __m256 {
                unsafe { _mm256_loadu_ps(from) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut f32, value: __m256) {
                unsafe { _mm256_storeu_ps(to, value) }
            }
            #[inline(always)]
            unsafe fn mul(a: __m256, b: __m256) -> __m256 {
                unsafe { _mm256_mul_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
                unsafe { _mm256_fmadd_ps(a, b, c) }
            }
            #[inline(always)]
            unsafe fn load_f16(from: *const u16) -> __m256 {
                unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
            }
            #[inline(always)]
            unsafe fn to_f32(value: __m256i) -> __m256 {
                unsafe { _mm256_cvtepi32_ps(value) }
            }
            #[inline(always)]
            unsafe fn load_i(from: *const u8) -> __m256i {
                unsafe { _mm256_loadu_si256(from.cast()) }
            }
            #[inline(always)]
            unsafe fn splat_i(value: i32) -> __m256i {
                unsafe { _mm256_set1_epi32(value) }
            }
            #[inline(always)]
            unsafe fn bf16_low(pairs: __m256i) -> __m256 {
                unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)) }
            }
            #[inline(always)]
            unsafe fn bf16_high(pairs: __m256i) -> __m256 {
                unsafe { _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536))) }
            }
            #[inline(always)]
            unsafe fn nibbles_low(bytes: __m256i) -> __m256i {
                unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(15)) }
            }
            #[inline(always)]
            unsafe fn nibbles_high(bytes: __m256i) -> __m256i {
                unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), _mm256_set1_epi8(15)) }
            }
            #[inline(always)]
            unsafe fn prefetch(from: *const u8) {
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
            }
        }
    };
}

simd_256!(Avx2);
simd_256!(AvxVnni);

// SAFETY (of the block): the trait's contract.
#[allow(clippy::undocumented_unsafe_blocks)]
impl ByteDot for AvxVnni {
    #[inline(always)]
    unsafe fn dot(acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(acc, w, a) }
    }
}
