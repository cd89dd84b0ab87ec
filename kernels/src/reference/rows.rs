//! Row operations in plain code: norm, conversions, SiLU, maximum.

use half::bf16;

use crate::table::{PANEL, SEGMENT, SUM_BLOCK};

/// Independent partial sums of a row reduction: the order every level keeps.
const LANES: usize = 16;

/// Sums `LANES` partial sums pairwise: lane i with lane i + 8, then 4, 2, 1.
#[inline(always)]
pub(crate) fn reduce_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub(crate) fn rmsnorm(src: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut lanes = [0f32; LANES];
    let chunks = src.chunks_exact(LANES);
    for (lane, &value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = value * value;
    }
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = value.mul_add(value, *lane);
        }
    }
    let scale = norm_scale(reduce_lanes(lanes), src.len(), eps);
    for ((out, &value), &weight) in out.iter_mut().zip(src).zip(weight) {
        *out = value * scale * weight;
    }
}

/// `1 / sqrt(sum / count + eps)`.
#[inline(always)]
pub(crate) fn norm_scale(sum: f32, count: usize, eps: f32) -> f32 {
    1.0 / (sum / count as f32 + eps).sqrt()
}

#[inline(always)]
pub(crate) fn to_bf16(src: &[f32], out: &mut [u16]) {
    for (out, &value) in out.iter_mut().zip(src) {
        *out = bf16::from_f32(value).to_bits();
    }
}

pub(crate) const ABS_MASK: u32 = 0x7fff_ffff;
pub(crate) const INFINITY_BITS: u32 = 0x7f80_0000;
/// A group whose largest value is below this becomes zero: its reciprocal would overflow.
const SMALLEST_MAXIMUM: f32 = 1e-30;

/// (scale, factor to multiply with before rounding) of a group whose largest magnitude has these bits. Bits order
/// magnitudes and put NaN above infinity, so one comparison finds both; such a group gets the scale NaN.
#[inline(always)]
pub(crate) fn act_scale(max_bits: u32) -> (f32, f32) {
    if max_bits >= INFINITY_BITS {
        return (f32::NAN, 0.0);
    }
    let max = f32::from_bits(max_bits);
    if max < SMALLEST_MAXIMUM { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) }
}

#[inline(always)]
pub(crate) fn to_i8(
    src: &[f32],
    group: usize,
    codes: &mut [i8],
    wide: &mut [i16],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    for ((src, codes), scale) in src.chunks(group).zip(codes.chunks_mut(group)).zip(scales) {
        let max_bits = src.iter().fold(0u32, |max, value| max.max(value.to_bits() & ABS_MASK));
        let factor;
        (*scale, factor) = act_scale(max_bits);
        if factor == 0.0 {
            codes.fill(0);
            continue;
        }
        for (code, &value) in codes.iter_mut().zip(src) {
            // Rounds to the nearest integer, ties to even, and leaves it in the low bits.
            *code = (value * factor + exp_constants::ROUND).to_bits() as i8;
        }
    }
    finish_i8(codes, wide, sums);
}

/// Running sums and the i16 copy of a quantised row.
#[inline(always)]
pub(crate) fn finish_i8(codes: &[i8], wide: &mut [i16], sums: &mut [i32]) {
    let mut sum = 0i32;
    sums[0] = 0;
    for (block, out) in codes.chunks(SUM_BLOCK).zip(&mut sums[1..]) {
        sum += block.iter().map(|&code| i32::from(code)).sum::<i32>();
        *out = sum;
    }
    for (wide, codes) in wide.chunks_exact_mut(4).zip(codes.chunks_exact(4)) {
        wide[0] = i16::from(codes[0]);
        wide[1] = i16::from(codes[2]);
        wide[2] = i16::from(codes[1]);
        wide[3] = i16::from(codes[3]);
    }
}

/// Constants of the exponential that every level shares; see `exp`.
pub(crate) mod exp_constants {
    pub(crate) const MIN: f32 = -87.0;
    pub(crate) const MAX: f32 = 88.0;
    pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
    /// 1.5 * 2^23: adding and subtracting it rounds to an integer, and leaves that integer in the low bits.
    pub(crate) const ROUND: f32 = 12_582_912.0;
    /// ln 2, split so that `x - n * HI` is exact.
    pub(crate) const LN2_HI: f32 = 0.693_359_4;
    pub(crate) const LN2_LO: f32 = -2.121_944_4e-4;
    /// Taylor coefficients from the highest: the reduced argument is at most ln 2 / 2.
    pub(crate) const C: [f32; 6] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
}

/// e^x within 2 units in the last place, clamped to the range of normal numbers. NaN gives a finite value: callers keep NaN
/// by other means.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    use exp_constants::*;
    // In this order `x` NaN gives MIN, like the vector instructions.
    let x = if x > MIN { x } else { MIN };
    let x = if x < MAX { x } else { MAX };
    let rounded = x.mul_add(LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    let mut p = C[0];
    for c in &C[1..] {
        p = p.mul_add(r, *c);
    }
    p = p.mul_add(r, 1.0);
    // The integer n lies in the low bits of `rounded`; shifting it left by 23 adds n to the exponent.
    let bits = p.to_bits().wrapping_add(rounded.to_bits() << 23);
    f32::from_bits(bits)
}

/// x * sigmoid(x).
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `silu(gate) * up` of one row of a gate/up tile.
#[inline(always)]
fn silu_row(row: &[f32; PANEL]) -> [f32; SEGMENT] {
    let mut out = [0f32; SEGMENT];
    for i in 0..SEGMENT {
        out[i] = silu(row[i]) * row[SEGMENT + i];
    }
    out
}

/// # Safety
/// See `RowKernels::silu_f32`.
#[inline(always)]
pub(crate) unsafe fn silu_f32(tile: &[[f32; PANEL]], len: usize, out: *mut f32, stride: usize) {
    for (row, values) in tile.iter().enumerate() {
        let product = silu_row(values);
        // SAFETY: the caller's contract.
        unsafe {
            let to = out.add(row * stride);
            if len == SEGMENT {
                to.cast::<[f32; SEGMENT]>().write_unaligned(product);
            } else {
                to.copy_from_nonoverlapping(product.as_ptr(), len);
            }
        }
    }
}

/// # Safety
/// See `RowKernels::silu_bf16`.
#[inline(always)]
pub(crate) unsafe fn silu_bf16(tile: &[[f32; PANEL]], len: usize, out: *mut u16, stride: usize) {
    for (row, values) in tile.iter().enumerate() {
        let product = silu_row(values);
        let mut bits = [0u16; SEGMENT];
        to_bf16(&product, &mut bits);
        // SAFETY: the caller's contract.
        unsafe {
            let to = out.add(row * stride);
            if len == SEGMENT {
                to.cast::<[u16; SEGMENT]>().write_unaligned(bits);
            } else {
                to.copy_from_nonoverlapping(bits.as_ptr(), len);
            }
        }
    }
}

/// # Safety
/// See `RowKernels::store`.
#[inline(always)]
pub(crate) unsafe fn store(tile: &[[f32; PANEL]], out: *mut f32, stride: usize) {
    for (row, values) in tile.iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe { out.add(row * stride).cast::<[f32; PANEL]>().write_unaligned(*values) };
    }
}

/// # Safety
/// See `RowKernels::add`.
#[inline(always)]
pub(crate) unsafe fn add(tile: &[[f32; PANEL]], out: *mut f32, stride: usize) {
    for (row, values) in tile.iter().enumerate() {
        // SAFETY: the caller's contract.
        let out = unsafe { &mut *out.add(row * stride).cast::<[f32; PANEL]>() };
        for i in 0..PANEL {
            out[i] += values[i];
        }
    }
}

#[inline(always)]
pub(crate) fn row_max(row: &[f32; PANEL]) -> (f32, bool) {
    let mut max = f32::NEG_INFINITY;
    let mut bits = 0u32;
    for &value in row {
        max = if value > max { value } else { max };
        bits = bits.max(value.to_bits() & ABS_MASK);
    }
    (max, bits < INFINITY_BITS)
}

#[inline(always)]
pub(crate) fn add_scaled(x: &mut [f32], weight: f32, y: &[f32]) {
    for (x, &y) in x.iter_mut().zip(y) {
        *x = weight.mul_add(y, *x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_exact_to_two_units_in_the_last_place() {
        let mut worst = 0f64;
        let mut x = -86.9f32;
        while x < 87.9 {
            let exact = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
            x += 0.000_91;
        }
        assert!(worst < 2.4e-7, "relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn silu_keeps_what_is_not_finite() {
        assert!(silu(f32::NAN).is_nan());
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert!(!silu(f32::NEG_INFINITY).is_finite());
        assert_eq!(silu(0.0), 0.0);
        assert!(silu(-100.0).abs() < 1e-30);
    }

    #[test]
    fn a_quantised_row_is_within_half_a_step_and_its_sums_add_up() {
        let src: Vec<f32> = (0..320u16).map(|i| (f32::from(i) * 0.37).sin() * f32::from(i / 100 + 1)).collect();
        let mut codes = vec![0i8; 320];
        let mut wide = vec![0i16; 320];
        let mut scales = vec![0f32; 3];
        let mut sums = vec![0i32; 11];
        to_i8(&src, 128, &mut codes, &mut wide, &mut scales, &mut sums);
        for (i, (&code, &value)) in codes.iter().zip(&src).enumerate() {
            assert!((f32::from(code) * scales[i / 128] - value).abs() <= scales[i / 128] * 0.5001);
        }
        for block in 0..10 {
            let sum: i32 = codes[block * 32..block * 32 + 32].iter().map(|&c| i32::from(c)).sum();
            assert_eq!(sums[block + 1] - sums[block], sum);
        }
        assert_eq!([wide[0], wide[1], wide[2], wide[3]], [0, 2, 1, 3].map(|i| i16::from(codes[i])));
    }

    #[test]
    fn rows_that_are_zero_or_not_finite_get_scales_that_say_so() {
        let mut codes = [1i8; 64];
        let mut scales = [9f32; 1];
        let mut sums = [9i32; 3];
        to_i8(&[0.0; 64], 64, &mut codes, &mut [], &mut scales, &mut sums);
        assert_eq!((scales[0], codes[5], sums[2]), (0.0, 0, 0));
        let mut row = [1.0f32; 64];
        row[7] = f32::NEG_INFINITY;
        to_i8(&row, 64, &mut codes, &mut [], &mut scales, &mut sums);
        assert!(scales[0].is_nan());
    }
}
