//! Arithmetic peaks of the AVX-512 levels, from registers.

use std::hint::black_box;

use super::simd::{Avx512, Avx512Bf16};
use crate::simd::{Bf16Dot, ByteDot, Simd};
use crate::table::PeakKernels;

pub(crate) const AVX512: PeakKernels = PeakKernels { f32: fma, bf16: fma, int8: dot, int4: dot };
pub(crate) const AVX512_BF16: PeakKernels = PeakKernels { bf16: dot_bf16, ..AVX512 };

/// Independent chains: more than latency times units.
const CHAINS: usize = 16;
const STEPS: u32 = 60_000;

macro_rules! peak {
    ($name:ident, $features:literal, $operations:expr, $acc:ident, $a:ident = $other:expr, $start:expr, $step:expr) => {
        #[target_feature(enable = $features)]
        unsafe fn $name() -> f64 {
            // SAFETY: the caller has the level's instructions; only registers are used.
            unsafe {
                let mut acc = black_box([$start; CHAINS]);
                let $a = black_box($other);
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

peak!(fma, "avx512f", 32.0, acc, a = Avx512::zero(), Avx512::zero(), Avx512::fma(*acc, a, a));
peak!(dot, "avx512f,avx512vnni", 128.0, acc, a = Avx512::splat_i(0), Avx512::splat_i(0), Avx512::dot(*acc, a, a));
peak!(
    dot_bf16,
    "avx512f,avx512bf16",
    64.0,
    acc,
    a = Avx512::splat_i(0),
    Avx512::zero(),
    Avx512Bf16::dot_bf16(*acc, a, a)
);
