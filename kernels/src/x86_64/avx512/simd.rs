//! 512-bit vectors.

use std::arch::x86_64::*;

use crate::simd::{Bf16Dot, ByteDot, Simd};

/// AVX-512 F/BW/VL/DQ with VNNI.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// `Avx512` with bf16 dot products.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16;

macro_rules! simd_512 {
    ($level:ty) => {
        // SAFETY (of every block): the trait's contract gives the instructions and valid pointers.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Simd for $level {
            const LANES: usize = 16;
            type F = __m512;
            type I = __m512i;

            #[inline(always)]
            unsafe fn zero() -> __m512 {
                unsafe { _mm512_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn splat(value: f32) -> __m512 {
                unsafe { _mm512_set1_ps(value) }
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> __m512 {
                unsafe { _mm512_loadu_ps(from) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut f32, value: __m512) {
                unsafe { _mm512_storeu_ps(to, value) }
            }
            #[inline(always)]
            unsafe fn mul(a: __m512, b: __m512) -> __m512 {
                unsafe { _mm512_mul_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
                unsafe { _mm512_fmadd_ps(a, b, c) }
            }
            #[inline(always)]
            unsafe fn load_f16(from: *const u16) -> __m512 {
                unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
            }
            #[inline(always)]
            unsafe fn to_f32(value: __m512i) -> __m512 {
                unsafe { _mm512_cvtepi32_ps(value) }
            }
            #[inline(always)]
            unsafe fn load_i(from: *const u8) -> __m512i {
                unsafe { _mm512_loadu_si512(from.cast()) }
            }
            #[inline(always)]
            unsafe fn splat_i(value: i32) -> __m512i {
                unsafe { _mm512_set1_epi32(value) }
            }
            #[inline(always)]
            unsafe fn bf16_low(pairs: __m512i) -> __m512 {
                unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)) }
            }
            #[inline(always)]
            unsafe fn bf16_high(pairs: __m512i) -> __m512 {
                unsafe { _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536))) }
            }
            #[inline(always)]
            unsafe fn nibbles_low(bytes: __m512i) -> __m512i {
                unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(15)) }
            }
            #[inline(always)]
            unsafe fn nibbles_high(bytes: __m512i) -> __m512i {
                unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(15)) }
            }
            #[inline(always)]
            unsafe fn prefetch(from: *const u8) {
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast()) }
            }
        }

        // SAFETY (of the block): the trait's contract.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl ByteDot for $level {
            #[inline(always)]
            unsafe fn dot(acc: __m512i, w: __m512i, a: __m512i) -> __m512i {
                unsafe { _mm512_dpbusd_epi32(acc, w, a) }
            }
        }
    };
}

simd_512!(Avx512);
simd_512!(Avx512Bf16);

// SAFETY (of the block): the trait's contract; __m512bh and __m512i are both 64 plain bytes.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bf16Dot for Avx512Bf16 {
    #[inline(always)]
    unsafe fn dot_bf16(acc: __m512, w: __m512i, a: __m512i) -> __m512 {
        unsafe {
            let (w, a) = (std::mem::transmute::<__m512i, __m512bh>(w), std::mem::transmute::<__m512i, __m512bh>(a));
            _mm512_dpbf16_ps(acc, w, a)
        }
    }
}
