//! f32 and bf16 weights on NEON: the shared kernels' steps, with activations taken from lanes.
//!
//! A multiply-add takes one factor from a lane of a vector, so four values of K of every row are loaded at once. The shared kernels
//! load each value into all lanes instead, which costs a vector instruction per value and row.

use std::arch::aarch64::*;

use super::simd::Neon;
use crate::simd::Simd;
use crate::table::{PANEL, SUM_BLOCK, Tile};
use crate::tiles::{Pace, store};

/// f32 weights, or bf16 ones widened, with f32 activations: one fused step per k.
///
/// # Safety
/// As the tile kernels.
#[inline(always)]
pub(crate) unsafe fn tile<const BF16: bool, const MR: usize, const NV: usize>(t: &Tile) {
    let parts = PANEL / (Neon::LANES * NV);
    let bytes_of_four = if BF16 { 2 * PANEL * 4 } else { 4 * PANEL * 4 };
    let mut pace = Pace::new(t, parts);
    for part in 0..parts {
        // SAFETY: the panel holds k rows of PANEL values or k/2 of pairs, activations k values (Tile's contract).
        unsafe {
            let panel = t.panel.add(part * NV * 16);
            let mut acc = [[Neon::zero(); NV]; MR];
            for block in 0..t.k / SUM_BLOCK {
                pace.step::<Neon>();
                for four in block * (SUM_BLOCK / 4)..(block + 1) * (SUM_BLOCK / 4) {
                    let mut a = [Neon::zero(); MR];
                    for row in 0..MR {
                        a[row] = Neon::load(t.a.add(row * t.a_stride + four * 16).cast());
                    }
                    let from = panel.add(four * bytes_of_four);
                    one_k::<0, BF16, MR, NV>(from, &a, &mut acc);
                    one_k::<1, BF16, MR, NV>(from, &a, &mut acc);
                    one_k::<2, BF16, MR, NV>(from, &a, &mut acc);
                    one_k::<3, BF16, MR, NV>(from, &a, &mut acc);
                }
            }
            store::<Neon, MR, NV>(t, part, &acc);
        }
    }
}

/// The value of K that lane `LANE` of `a` holds; `from` points to where `a`'s begin.
#[inline(always)]
unsafe fn one_k<const LANE: i32, const BF16: bool, const MR: usize, const NV: usize>(
    from: *const u8,
    a: &[float32x4_t; MR],
    acc: &mut [[float32x4_t; NV]; MR],
) {
    let line = if BF16 { LANE / 2 } else { LANE } as usize;
    for v in 0..NV {
        // SAFETY: as in `tile`.
        unsafe {
            let from = from.add(line * PANEL * 4 + v * 16);
            let w = match (BF16, LANE % 2) {
                (false, _) => Neon::load(from.cast()),
                (true, 0) => Neon::bf16_low(Neon::load_i(from)),
                (true, _) => Neon::bf16_high(Neon::load_i(from)),
            };
            for row in 0..MR {
                acc[row][v] = vfmaq_laneq_f32::<LANE>(acc[row][v], w, a[row]);
            }
        }
    }
}
