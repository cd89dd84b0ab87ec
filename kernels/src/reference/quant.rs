//! Quantising weights: codes and scales of one row, chosen for the least squared error.
//!
//! Runs at load time, in the same order of operations on every level, so that a model quantised anywhere has the same
//! codes.

use crate::matrix::WeightKind;

/// Scale of one group, and for kinds with zero points what is subtracted: `w = scale * code - offset`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct GroupScale {
    pub(crate) scale: f32,
    pub(crate) offset: f32,
}

/// Values worked on at once; groups are multiples of it.
const LANES: usize = 16;
/// Adding and subtracting it rounds to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// Shrink factors of the absolute maximum that 8-bit scales try: clipping a lone outlier can pay.
const INT8_FACTORS: [f32; 5] = [1.0, 0.97, 0.94, 0.9, 0.85];
/// Steps of the 4-bit searches, and how far they go from the plain scale.
const INT4_STEPS: u8 = 15;
const INT4_REACH: f32 = 0.3;

/// The power of two that brings the largest scale near 1024: f16 then holds scales over a range of 2^25 at full precision.
pub(crate) fn unit(groups: &[GroupScale]) -> f32 {
    let largest = groups.iter().fold(0f32, |max, group| max.max(group.scale.abs()).max(group.offset.abs() / 16.0));
    if largest == 0.0 {
        return 1.0;
    }
    // The exponent alone, ten below; clamped to normal numbers.
    let exponent = (largest.to_bits() >> 23).saturating_sub(10).max(1);
    f32::from_bits(exponent << 23)
}

/// The codes of a kind, for those who round one value at a time with a scale that stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    low: f32,
    high: f32,
    /// What codes are above the signed number.
    bias: f32,
    /// Whether scales are stored in 16 bits.
    half_scales: bool,
}

impl Grid {
    pub(crate) fn of(kind: WeightKind) -> Grid {
        match kind {
            WeightKind::Int4 { zero_point: true, .. } => Grid { low: 0.0, high: 15.0, bias: 0.0, half_scales: true },
            WeightKind::Int4 { .. } => Grid { low: -8.0, high: 7.0, bias: 8.0, half_scales: true },
            WeightKind::Int8Group { .. } => Grid { low: -127.0, high: 127.0, bias: 128.0, half_scales: true },
            _ => Grid { low: -127.0, high: 127.0, bias: 128.0, half_scales: false },
        }
    }

    /// The scale as it will be read back: f16 keeps ten bits behind the first.
    pub(crate) fn storable(self, group: GroupScale) -> GroupScale {
        let half = |x: f32| f32::from_bits((x.to_bits() + 0x1000) & !0x1fff);
        if self.half_scales { GroupScale { scale: half(group.scale), offset: half(group.offset) } } else { group }
    }

    /// The nearest code, and the value that it stands for.
    #[inline(always)]
    pub(crate) fn round(self, target: f32, group: GroupScale) -> (u8, f32) {
        let exact = if group.scale == 0.0 { 0.0 } else { (target + group.offset) / group.scale };
        let exact = if exact > self.low { exact } else { self.low };
        let exact = if exact < self.high { exact } else { self.high };
        let code = (exact + ROUND) - ROUND;
        ((code + self.bias) as u8, code * group.scale - group.offset)
    }
}

/// Quantises one row of finite values: unsigned codes, one entry of `groups` per group. With `importance`, squared errors
/// count by that of their column.
pub(crate) fn quantize_row(
    kind: WeightKind,
    row: &[f32],
    importance: Option<&[f32]>,
    codes: &mut [u8],
    groups: &mut [GroupScale],
) {
    let group = kind.group(row.len());
    let even = [1.0; 128];
    for (at, ((values, codes), out)) in row.chunks(group).zip(codes.chunks_mut(group)).zip(groups).enumerate() {
        let given = importance.map(|all| &all[at * group..at * group + values.len()]);
        let long;
        let weights = match given {
            Some(given) => given,
            None if values.len() <= even.len() => &even[..values.len()],
            None => {
                long = vec![1.0; values.len()];
                &long[..]
            }
        };
        *out = match kind {
            WeightKind::Int4 { zero_point: true, .. } => with_offset(values, weights, codes),
            WeightKind::Int4 { .. } => symmetric::<8, 7>(values, weights, codes, &int4_candidates(values)),
            _ => symmetric::<128, 127>(values, weights, codes, &int8_candidates(values)),
        };
    }
}

fn int8_candidates(values: &[f32]) -> [f32; INT8_FACTORS.len()] {
    let max = values.iter().fold(0f32, |max, value| max.max(value.abs()));
    INT8_FACTORS.map(|factor| max * factor / 127.0)
}

/// Scales around `extreme / -8` (the value furthest from zero gets the code -8, which its mirror image lacks), of either sign.
fn int4_candidates(values: &[f32]) -> [f32; 2 * INT4_STEPS as usize] {
    let extreme = values.iter().fold(0f32, |extreme, &value| if value.abs() > extreme.abs() { value } else { extreme });
    let mut out = [0.0; 2 * INT4_STEPS as usize];
    for step in 0..INT4_STEPS {
        let factor = 1.0 - INT4_REACH + 1.5 * INT4_REACH * f32::from(step) / f32::from(INT4_STEPS - 1);
        out[2 * usize::from(step)] = extreme * factor / -8.0;
        out[2 * usize::from(step) + 1] = extreme * factor / 7.5;
    }
    out
}

/// Tries each candidate scale, refits it to its own codes by least squares, and keeps the best. Codes are offset by `LOW`.
fn symmetric<const LOW: i32, const HIGH: i32>(
    values: &[f32],
    weights: &[f32],
    codes: &mut [u8],
    candidates: &[f32],
) -> GroupScale {
    let mut best = (f32::INFINITY, 0f32, 0f32);
    for &scale in candidates {
        if scale == 0.0 || !(1.0 / scale).is_finite() {
            continue;
        }
        let inverse = 1.0 / scale;
        let mut dot = [0f32; LANES];
        let mut square = [0f32; LANES];
        for (chunk, weights) in values.as_chunks::<LANES>().0.iter().zip(weights.as_chunks::<LANES>().0) {
            for i in 0..LANES {
                let q = round_to::<LOW, HIGH>(chunk[i] * inverse);
                dot[i] += weights[i] * q * chunk[i];
                square[i] += weights[i] * q * q;
            }
        }
        let (dot, square) = (sum(dot), sum(square));
        // |w - s q|^2 = |w|^2 - (w.q)^2 / |q|^2 at the best s; |w|^2 is the same for all.
        if square > 0.0 && -dot * dot / square < best.0 {
            best = (-dot * dot / square, scale, dot / square);
        }
    }
    let (_, scale, fitted) = best;
    if scale == 0.0 {
        codes.fill(LOW as u8);
        return GroupScale::default();
    }
    let inverse = 1.0 / scale;
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = (round_to::<LOW, HIGH>(value * inverse) as i32 + LOW) as u8;
    }
    GroupScale { scale: fitted, offset: 0.0 }
}

#[inline(always)]
fn round_to<const LOW: i32, const HIGH: i32>(x: f32) -> f32 {
    // Symmetric for 8 bits, where one code less costs nothing and keeps |code| <= 127.
    let low = if LOW == 128 { -127.0 } else { -(LOW as f32) };
    let x = if x > low { x } else { low };
    let x = if x < HIGH as f32 { x } else { HIGH as f32 };
    (x + ROUND) - ROUND
}

fn sum(lanes: [f32; LANES]) -> f32 {
    super::rows::reduce_lanes(lanes)
}

/// Codes 0..15 with scale and offset: tries ranges around [min, max], refits both by least squares, keeps the best.
fn with_offset(values: &[f32], weights: &[f32], codes: &mut [u8]) -> GroupScale {
    let (min, max) = values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &v| (min.min(v), max.max(v)));
    let count = weights.iter().sum::<f32>();
    let mean = values.iter().zip(weights).map(|(value, weight)| value * weight).sum::<f32>() / count;
    let mut best: Option<(f32, f32, f32, GroupScale)> = None;
    for step in 0..INT4_STEPS {
        let factor = 1.0 - INT4_REACH + 1.2 * INT4_REACH * f32::from(step) / f32::from(INT4_STEPS - 1);
        let middle = 0.5 * (min + max);
        let low = middle - 0.5 * (max - min) * factor;
        let scale = (max - min) * factor / 15.0;
        if scale <= 0.0 || !(1.0 / scale).is_finite() {
            continue;
        }
        let inverse = 1.0 / scale;
        let (mut s_q, mut s_qq, mut s_qw, mut s_ww) = ([0f32; LANES], [0f32; LANES], [0f32; LANES], [0f32; LANES]);
        for (chunk, weights) in values.as_chunks::<LANES>().0.iter().zip(weights.as_chunks::<LANES>().0) {
            for i in 0..LANES {
                let q = round_to::<0, 15>((chunk[i] - low) * inverse);
                let w = chunk[i] - mean;
                s_q[i] += weights[i] * q;
                s_qq[i] += weights[i] * q * q;
                s_qw[i] += weights[i] * q * w;
                s_ww[i] += weights[i] * w * w;
            }
        }
        let (s_q, s_qq, s_qw, s_ww) = (sum(s_q), sum(s_qq), sum(s_qw), sum(s_ww));
        // The w are centred, so their sum is (nearly) zero.
        let spread = s_qq - s_q * s_q / count;
        if spread <= 0.0 {
            continue;
        }
        let slope = s_qw / spread;
        let error = s_ww - slope * s_qw;
        if best.is_none_or(|(least, ..)| error < least) {
            let offset = slope * s_q / count - mean;
            best = Some((error, low, inverse, GroupScale { scale: slope, offset }));
        }
    }
    let Some((_, low, inverse, found)) = best else {
        // All values equal: code 0 and the offset alone.
        codes.fill(0);
        return GroupScale { scale: 0.0, offset: -mean };
    };
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = round_to::<0, 15>((value - low) * inverse) as u8;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};

    fn normal_rows(seed: u64, len: usize) -> Vec<f32> {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        (0..len)
            .map(|_| {
                let (u, v): (f32, f32) = (rng.random_range(1e-7..1.0), rng.random_range(0.0..std::f32::consts::TAU));
                (-2.0 * u.ln()).sqrt() * v.cos() * 0.02
            })
            .collect()
    }

    /// Relative RMS error of a row quantised and read back.
    fn error(kind: WeightKind, row: &[f32]) -> f32 {
        let mut codes = vec![0u8; row.len()];
        let group = kind.group(row.len());
        let mut groups = vec![GroupScale::default(); row.len().div_ceil(group)];
        quantize_row(kind, row, None, &mut codes, &mut groups);
        let offset = match kind {
            WeightKind::Int4 { zero_point: true, .. } => 0.0,
            WeightKind::Int4 { .. } => 8.0,
            _ => 128.0,
        };
        let (mut wrong, mut total) = (0f32, 0f32);
        for (i, (&w, &code)) in row.iter().zip(&codes).enumerate() {
            let g = groups[i / group];
            wrong += (w - (g.scale * (f32::from(code) - offset) - g.offset)).powi(2);
            total += w * w;
        }
        (wrong / total).sqrt()
    }

    #[test]
    fn the_search_beats_the_plain_scale_on_normal_weights() {
        let row = normal_rows(7, 4096);
        let sym = |group| WeightKind::Int4 { group, zero_point: false };
        let zp = |group| WeightKind::Int4 { group, zero_point: true };
        // Plain absmax / 7.5 gives 9.4e-2, 1.02e-1, 1.08e-1; min/max with a zero point 7.9e-2 and 9.9e-2 (kernels.md).
        let found = [
            error(sym(32), &row),
            error(sym(64), &row),
            error(sym(128), &row),
            error(zp(32), &row),
            error(zp(128), &row),
        ];
        println!("int4 errors {found:?}");
        assert!(found[0] < 0.083 && found[1] < 0.093 && found[2] < 0.103, "{found:?}");
        assert!(found[3] < 0.074 && found[4] < 0.096, "{found:?}");
        let eight = [error(WeightKind::Int8, &row[..1024]), error(WeightKind::Int8Group { group: 128 }, &row)];
        println!("int8 errors {eight:?}");
        assert!(eight[0] < 0.0085 && eight[1] < 0.0067, "{eight:?}");
    }

    #[test]
    fn constant_and_zero_groups_come_back_exactly() {
        for kind in [
            WeightKind::Int8,
            WeightKind::Int8Group { group: 32 },
            WeightKind::Int4 { group: 32, zero_point: false },
            WeightKind::Int4 { group: 32, zero_point: true },
        ] {
            assert!(error(kind, &[0.5; 64]) < 1e-6, "{kind:?}");
            let mut codes = [9u8; 64];
            let mut groups = [GroupScale { scale: 9.0, offset: 9.0 }; 2];
            quantize_row(kind, &[0.0; 64], None, &mut codes, &mut groups);
            assert_eq!(groups[0].offset, 0.0);
            assert!(groups[0].scale == 0.0, "{kind:?}");
        }
    }

    #[test]
    fn the_unit_keeps_tiny_and_huge_scales_inside_half_floats() {
        for scale in [1e-30f32, 1e-9, 0.003, 1.0, 1e6] {
            let unit = unit(&[GroupScale { scale, offset: 0.0 }]);
            let scaled = scale / unit;
            assert!((512.0..4096.0).contains(&scaled), "{scale} / {unit} = {scaled}");
        }
    }
}
