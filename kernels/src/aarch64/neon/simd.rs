//! 128-bit vectors.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::simd::Simd;

/// Advanced SIMD as every 64-bit Arm has it.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

// SAFETY (of every block): the trait's contract gives the instructions and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Neon {
    const LANES: usize = 4;
    type F = float32x4_t;
    type I = int32x4_t;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: float32x4_t) {
        unsafe { vst1q_f32(to, value) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> float32x4_t {
        // Written out: the intrinsic's half-float type is not in every compiler that builds this.
        let out: float32x4_t;
        unsafe {
            asm!(
                "fcvtl {out:v}.4s, {half:v}.4h",
                out = lateout(vreg) out, half = in(vreg) vld1_u16(from),
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        out
    }
    #[inline(always)]
    unsafe fn to_f32(value: int32x4_t) -> float32x4_t {
        unsafe { vcvtq_f32_s32(value) }
    }
    #[inline(always)]
    unsafe fn load_i(from: *const u8) -> int32x4_t {
        unsafe { vreinterpretq_s32_u8(vld1q_u8(from)) }
    }
    #[inline(always)]
    unsafe fn splat_i(value: i32) -> int32x4_t {
        unsafe { vdupq_n_s32(value) }
    }
    #[inline(always)]
    unsafe fn bf16_low(pairs: int32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<16>(pairs)) }
    }
    #[inline(always)]
    unsafe fn bf16_high(pairs: int32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(vandq_s32(pairs, vdupq_n_s32(-65536))) }
    }
    #[inline(always)]
    unsafe fn nibbles_low(bytes: int32x4_t) -> int32x4_t {
        unsafe { vandq_s32(bytes, vdupq_n_s32(0x0f0f_0f0f)) }
    }
    #[inline(always)]
    unsafe fn nibbles_high(bytes: int32x4_t) -> int32x4_t {
        unsafe { vreinterpretq_s32_u8(vshrq_n_u8::<4>(vreinterpretq_u8_s32(bytes))) }
    }
    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        super::prefetch(from);
    }
}
