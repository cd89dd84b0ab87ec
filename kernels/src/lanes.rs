//! What softmax, rotation and the scans need beyond [`Simd`]: comparisons, reductions, exponentials.

use crate::simd::Simd;

/// Coefficients of `x^1 .. x^5` of a polynomial for `2^x` on [-0.5, 0.5] whose constant term is 1: relative error 1.1e-7.
// 0.693147 is a fitted coefficient, near ln 2 and not it.
#[allow(clippy::approx_constant)]
pub(crate) const EXP2: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];

/// More operations on a level's vectors.
///
/// # Safety
/// As for [`Simd`].
pub(crate) trait Lanes: Simd {
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// The larger of each lane; a NaN of `b` stays, one of `a` need not.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The first `count` lanes of `a`, the others of `b`.
    unsafe fn first(count: usize, a: Self::F, b: Self::F) -> Self::F;
    /// The first `count <= LANES` floats, zeros behind them; reads nothing else.
    unsafe fn load_first(count: usize, from: *const f32) -> Self::F;
    /// Bit i: lane i of `a` is at least that of `b`.
    unsafe fn at_least(a: Self::F, b: Self::F) -> u32;
    /// The largest lane, if none is NaN.
    unsafe fn reduce_max(a: Self::F) -> f32;
    /// The lanes' sum, in a tree: i + (i + LANES/2) first.
    unsafe fn reduce_add(a: Self::F) -> f32;
    /// `2^n` for `shifted = n + 1.5 * 2^23` with whole n in -127..=127; n = -127 gives 0.
    unsafe fn power_of_two(shifted: Self::F) -> Self::F;
    /// Rounds to bf16, to nearest even, and stores `LANES` of them.
    unsafe fn store_bf16(to: *mut u16, a: Self::F);
    /// The sum and the difference of lanes `DISTANCE` apart, at the place of the first and of the second; a power of two below
    /// `LANES`.
    unsafe fn butterfly<const DISTANCE: usize>(a: Self::F) -> Self::F;
    /// Pairs (x, y) turned by pairs (cos, sin): `(x cos - y sin, y cos + x sin)`.
    unsafe fn rotate(pairs: Self::F, cos_sin: Self::F) -> Self::F;

    /// `2^x` for x <= 127; exactly 1 for 0, and 0 from -127 on. NaN stays.
    #[inline(always)]
    unsafe fn exp2(x: Self::F) -> Self::F {
        // SAFETY: the caller's contract.
        unsafe {
            let x = Self::max(Self::splat(-127.0), x);
            // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
            let magic = Self::splat(12_582_912.0);
            let shifted = Self::add(x, magic);
            let f = Self::sub(x, Self::sub(shifted, magic));
            Self::mul(exp2_polynomial::<Self>(f), Self::power_of_two(shifted))
        }
    }
}

/// `2^f` for f in [-0.5, 0.5].
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn exp2_polynomial<S: Lanes>(f: S::F) -> S::F {
    // SAFETY: the caller's contract.
    unsafe {
        let p = S::fma(S::splat(EXP2[4]), f, S::splat(EXP2[3]));
        let p = S::fma(p, f, S::splat(EXP2[2]));
        let p = S::fma(p, f, S::splat(EXP2[1]));
        let p = S::fma(p, f, S::splat(EXP2[0]));
        S::fma(p, f, S::splat(1.0))
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod emulated;

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use super::Lanes;

    /// A level's exponential of 16 values.
    #[inline(always)]
    unsafe fn exp2<S: Lanes>(x: &[f32; 16]) -> [f32; 16] {
        let mut out = [0.0; 16];
        // SAFETY: the caller's contract.
        unsafe {
            for at in (0..16).step_by(S::LANES) {
                S::store(out.as_mut_ptr().add(at), S::exp2(S::load(x.as_ptr().add(at))));
            }
        }
        out
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn exp2_avx2(x: &[f32; 16]) -> [f32; 16] {
        // SAFETY: the features are here.
        unsafe { exp2::<crate::x86_64::avx2::simd::Avx2>(x) }
    }

    #[cfg(target_arch = "aarch64")]
    unsafe fn exp2_neon(x: &[f32; 16]) -> [f32; 16] {
        // SAFETY: NEON is part of the architecture.
        unsafe { exp2::<crate::aarch64::neon::simd::Neon>(x) }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn exp2_emulated(x: &[f32; 16]) -> [f32; 16] {
        // SAFETY: plain code.
        unsafe { exp2::<crate::emulated::Wide>(x) }
    }

    #[test]
    fn the_exponential_is_exact_at_zero_within_rounding_elsewhere_and_zero_far_below() {
        type Exp2 = unsafe fn(&[f32; 16]) -> [f32; 16];
        #[cfg(target_arch = "aarch64")]
        let levels: Vec<Exp2> = vec![exp2_neon];
        #[cfg(target_arch = "x86_64")]
        let mut levels: Vec<Exp2> = vec![exp2_emulated];
        #[cfg(target_arch = "x86_64")]
        if crate::isa::Isa::Avx2.available() {
            levels.push(exp2_avx2);
        }
        for exp2 in levels {
            for i in 0..4000 {
                let x = std::array::from_fn(|lane| -(i * 16 + lane as i32) as f32 / 512.0);
                // SAFETY: the level is available.
                for (x, got) in x.into_iter().zip(unsafe { exp2(&x) }) {
                    let want = f64::from(x).exp2();
                    assert!((f64::from(got) - want).abs() <= 2e-7 * want + 1e-38, "2^{x} = {got}");
                }
            }
            let odd =
                [0.0, -1e30, f32::NEG_INFINITY, f32::NAN, -127.0, -126.0, -1.0, -0.0, 0., 0., 0., 0., 0., 0., 0., 0.];
            // SAFETY: the level is available.
            let got = unsafe { exp2(&odd) };
            assert_eq!(got[..3], [1.0, 0.0, 0.0]);
            assert!(got[3].is_nan());
            assert_eq!(got[4..8], [0.0, f32::MIN_POSITIVE, 0.5, 1.0]);
        }
    }
}
