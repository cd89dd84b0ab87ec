//! Arithmetic peaks of the 256-bit levels, from registers.

use std::arch::x86_64::*;
use std::hint::black_box;

use super::simd::{Avx2, AvxVnni};
use crate::simd::{ByteDot, Simd};
use crate::table::PeakKernels;

pub(crate) const AVX2: PeakKernels = PeakKernels { f32: fma, bf16: fma, int8: madd, int4: maddubs };
pub(crate) const AVX_VNNI: PeakKernels = PeakKernels { f32: fma, bf16: fma, int8: dot, int4: dot };

/// Independent chains: more than latency times units.
const CHAINS: usize = 12;
const STEPS: u32 = 60_000;

macro_rules! peak {
    ($(#[$text:meta])* $name:ident, $features:literal, $operations:expr, $acc:ident, $a:ident, $start:expr, $step:expr) => {
        $(#[$text])*
        #[target_feature(enable = $features)]
        unsafe fn $name() -> f64 {
            // SAFETY: the caller has the level's instructions; only registers are used.
            unsafe {
                let mut acc = [$start; CHAINS];
                let $a = black_box($start);
                for _ in 0..STEPS {
                    for $acc in &mut acc {
                        *$acc = $step;
                    }
                }
                black_box(acc);
            }
            f64::from(STEPS) * CHAINS as f64 * $operations
        }
    };
}

peak!(fma, "avx2,fma", 16.0, acc, a, Avx2::splat(0.0), Avx2::fma(*acc, a, a));
peak!(
    /// One pair product and one sum per 16 codes.
    madd,
    "avx2,fma",
    32.0,
    acc,
    a,
    Avx2::splat_i(0),
    _mm256_add_epi32(*acc, _mm256_madd_epi16(*acc, a))
);
/// One byte product and one 16-bit sum per 32 codes, and every eighth time the sum into 32 bits.
#[target_feature(enable = "avx2")]
unsafe fn maddubs() -> f64 {
    let a = black_box(_mm256_setzero_si256());
    let mut acc = black_box([a; CHAINS]);
    let mut total = a;
    for _ in 0..STEPS / 8 {
        for _ in 0..8 {
            for acc in &mut acc {
                *acc = _mm256_add_epi16(*acc, _mm256_maddubs_epi16(a, *acc));
            }
        }
        for acc in acc {
            total = _mm256_add_epi32(total, _mm256_madd_epi16(acc, a));
        }
    }
    black_box(total);
    f64::from(STEPS) * CHAINS as f64 * 64.0
}

peak!(dot, "avx2,fma,avxvnni", 64.0, acc, a, Avx2::splat_i(0), AvxVnni::dot(*acc, a, a));
