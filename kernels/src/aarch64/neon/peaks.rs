//! Arithmetic peaks of the NEON levels, from registers.

use std::arch::aarch64::*;
use std::hint::black_box;

use super::dot::dot;
use crate::table::PeakKernels;

pub(crate) const NEON: PeakKernels = PeakKernels { f32: fma, bf16: fma, int8: pairs, int4: wide };
pub(crate) const NEON_DOT: PeakKernels = PeakKernels { int8: dots, int4: dots, ..NEON };

/// Independent chains: more than latency times units.
const CHAINS: usize = 20;
const STEPS: u32 = 60_000;

macro_rules! peak {
    ($(#[$text:meta])* $name:ident, $features:literal, $operations:expr, $acc:ident, $a:ident = $other:expr, $start:expr, $step:expr) => {
        $(#[$text])*
        #[target_feature(enable = $features)]
        unsafe fn $name() -> f64 {
            let mut acc = black_box([$start; CHAINS]);
            let $a = black_box($other);
            for _ in 0..STEPS {
                for $acc in &mut acc {
                    *$acc = $step;
                }
            }
            black_box(acc);
            f64::from(STEPS) * CHAINS as f64 * $operations
        }
    };
}

peak!(fma, "neon", 8.0, acc, a = vdupq_n_f32(0.0), vdupq_n_f32(0.0), vfmaq_f32(*acc, a, a));
peak!(
    /// Two products of eight codes, the sums of their pairs, and those into 32 bits.
    pairs,
    "neon",
    32.0,
    acc,
    a = vdupq_n_s8(0),
    vdupq_n_s32(0),
    {
        let b = vreinterpretq_s8_s32(*acc);
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        vpadalq_s16(*acc, vpaddq_s16(low, vmull_high_s8(a, b)))
    }
);
peak!(
    /// Products of eight codes added up in 16 bits.
    wide,
    "neon",
    16.0,
    acc,
    a = vdup_n_s8(0),
    vdupq_n_s16(0),
    vmlal_s8(*acc, a, vget_low_s8(vreinterpretq_s8_s16(*acc)))
);
peak!(dots, "neon,dotprod", 32.0, acc, a = vdupq_n_s8(0), vdupq_n_s32(0), {
    // SAFETY: the caller has the instruction.
    unsafe { dot::<0>(*acc, a, a) }
});
