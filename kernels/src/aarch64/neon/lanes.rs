//! Comparisons and reductions of 128-bit vectors.

use std::arch::aarch64::*;

use super::simd::Neon;
use crate::lanes::Lanes;

/// Lane i holds `values[i]`.
#[inline(always)]
fn lanes(values: [u32; 4]) -> uint32x4_t {
    // SAFETY: the array is one vector long; NEON is part of the architecture.
    unsafe { vld1q_u32(values.as_ptr()) }
}

// SAFETY (of every block): the trait's contract gives the instructions and valid pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Neon {
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe {
            // Not fmax: it keeps a NaN of either side, and the scans skip those of `a`.
            vbslq_f32(vcgtq_f32(a, b), a, b)
        }
    }
    #[inline(always)]
    unsafe fn first(count: usize, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vbslq_f32(vcltq_u32(lanes([0, 1, 2, 3]), vdupq_n_u32(count as u32)), a, b) }
    }
    #[inline(always)]
    unsafe fn load_first(count: usize, from: *const f32) -> float32x4_t {
        let mut values = [0f32; 4];
        unsafe {
            for i in 0..count {
                values[i] = from.add(i).read();
            }
            vld1q_f32(values.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn at_least(a: float32x4_t, b: float32x4_t) -> u32 {
        unsafe { vaddvq_u32(vandq_u32(vcgeq_f32(a, b), lanes([1, 2, 4, 8]))) }
    }
    #[inline(always)]
    unsafe fn reduce_max(a: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(a) }
    }
    #[inline(always)]
    unsafe fn reduce_add(a: float32x4_t) -> f32 {
        unsafe { vaddv_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))) }
    }
    #[inline(always)]
    unsafe fn power_of_two(shifted: float32x4_t) -> float32x4_t {
        unsafe {
            let exponent = vaddq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(to: *mut u16, a: float32x4_t) {
        unsafe {
            let bits = vreinterpretq_u32_f32(a);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
            let number = vceqq_f32(a, a);
            vst1_u16(to, vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet)));
        }
    }
    #[inline(always)]
    unsafe fn butterfly<const DISTANCE: usize>(a: float32x4_t) -> float32x4_t {
        unsafe {
            let (other, second) = match DISTANCE {
                1 => (vrev64q_f32(a), lanes([0, u32::MAX, 0, u32::MAX])),
                2 => (vextq_f32::<2>(a, a), lanes([0, 0, u32::MAX, u32::MAX])),
                _ => unreachable!(),
            };
            vbslq_f32(second, vsubq_f32(other, a), vaddq_f32(a, other))
        }
    }
    #[inline(always)]
    unsafe fn rotate(pairs: float32x4_t, cos_sin: float32x4_t) -> float32x4_t {
        unsafe {
            let (cos, sin) = (vtrn1q_f32(cos_sin, cos_sin), vtrn2q_f32(cos_sin, cos_sin));
            let turned = vreinterpretq_u32_f32(vmulq_f32(vrev64q_f32(pairs), sin));
            let turned = veorq_u32(turned, lanes([1 << 31, 0, 1 << 31, 0]));
            vfmaq_f32(vreinterpretq_f32_u32(turned), pairs, cos)
        }
    }
}
