//! The scans, written once for all vector levels.

// Plain index loops: closures inside iterator adapters do not inherit a function's target features.
#![allow(clippy::needless_range_loop)]

use super::{DOT_TOKENS, RowMax};
use crate::lanes::Lanes;
use crate::reference::scan::SUM_BLOCK;

/// Vectors of a row after which the running maximum is looked at.
const LOOK: usize = 16;

/// [`ScanKernels::row_max`](super::ScanKernels::row_max).
///
/// # Safety
/// Inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn row_max<S: Lanes>(row: &[f32]) -> RowMax {
    let block = LOOK * S::LANES;
    let whole = row.len() / block * block;
    let mut best = f32::NEG_INFINITY;
    let mut best_block = 0;
    let mut finite = true;
    // SAFETY: loads stay below `whole`.
    unsafe {
        // 0 * x is NaN for every x that is not finite, and stays in the sum.
        let mut checks = [S::zero(); 2];
        let mut start = 0;
        while start < whole {
            let mut maxima = [S::splat(f32::NEG_INFINITY); 2];
            for v in 0..LOOK {
                let x = S::load(row.as_ptr().add(start + v * S::LANES));
                maxima[v % 2] = S::max(x, maxima[v % 2]);
                checks[v % 2] = S::fma(x, S::zero(), checks[v % 2]);
            }
            let largest = S::max(maxima[0], maxima[1]);
            if S::at_least(S::splat(best), largest).count_ones() as usize != S::LANES {
                best = S::reduce_max(largest);
                best_block = start;
            }
            start += block;
        }
        finite &= S::reduce_add(S::add(checks[0], checks[1])) == 0.0;
    }
    let mut found = RowMax { index: best_block, value: best, finite };
    if best > f32::NEG_INFINITY {
        let block = &row[best_block..whole.min(best_block + block)];
        found.index += block.iter().position(|&x| x == best).unwrap_or(0);
    }
    for (index, &value) in row.iter().enumerate().skip(whole) {
        found.finite &= value.is_finite();
        if value > found.value {
            (found.index, found.value) = (index, value);
        }
    }
    found
}

/// [`ScanKernels::sum_exp`](super::ScanKernels::sum_exp).
///
/// # Safety
/// Inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn sum_exp<S: Lanes>(row: &[f32], max: f32, scale: f32) -> f32 {
    let mut total = 0f64;
    let mut start = 0;
    while start < row.len() {
        let end = row.len().min(start + SUM_BLOCK);
        // SAFETY: loads stay inside start..end.
        unsafe {
            let max = S::splat(max);
            let scale = S::splat(scale * std::f32::consts::LOG2_E);
            let mut sums = [S::zero(); 4];
            let whole = (end - start) / S::LANES;
            let from = row.as_ptr().add(start);
            for v in 0..whole / 4 {
                for i in 0..4 {
                    let x = S::load(from.add((4 * v + i) * S::LANES));
                    sums[i] = S::add(sums[i], S::exp2(S::mul(S::sub(x, max), scale)));
                }
            }
            for v in whole / 4 * 4..whole {
                let x = S::load(from.add(v * S::LANES));
                sums[v % 4] = S::add(sums[v % 4], S::exp2(S::mul(S::sub(x, max), scale)));
            }
            let rest = (end - start) % S::LANES;
            if rest > 0 {
                let x = S::load_first(rest, from.add(whole * S::LANES));
                let x = S::exp2(S::mul(S::sub(x, max), scale));
                sums[whole % 4] = S::add(sums[whole % 4], S::first(rest, x, S::zero()));
            }
            let sum = S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
            total += f64::from(S::reduce_add(sum));
        }
        start = end;
    }
    total as f32
}

/// [`ScanKernels::group_maxima`](super::ScanKernels::group_maxima): lane i of a run of vectors is a group.
///
/// # Safety
/// Inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn group_maxima<S: Lanes>(row: &[f32], out: &mut [f32]) {
    let runs = out.len() / S::LANES;
    let vectors = row.len() / out.len();
    // SAFETY: runs * vectors * LANES <= row.len(); runs * LANES = out.len().
    unsafe {
        for run in 0..runs {
            let from = row.as_ptr().add(run * vectors * S::LANES);
            let mut maxima = [S::splat(f32::NEG_INFINITY); 4];
            for v in 0..vectors {
                maxima[v % 4] = S::max(S::load(from.add(v * S::LANES)), maxima[v % 4]);
            }
            let largest = S::max(S::max(maxima[0], maxima[1]), S::max(maxima[2], maxima[3]));
            S::store(out.as_mut_ptr().add(run * S::LANES), largest);
        }
    }
    for (out, x) in out.iter_mut().zip(&row[vectors * runs * S::LANES..]) {
        *out = out.max(*x);
    }
}

/// [`ScanKernels::collect`](super::ScanKernels::collect).
///
/// # Safety
/// Inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn collect<S: Lanes>(
    row: &[f32],
    start: usize,
    threshold: f32,
    ids: &mut [u32],
    values: &mut [f32],
) -> (usize, usize) {
    const STEP: usize = 4;
    let mut found = 0;
    let mut at = start;
    // SAFETY: loads stay inside the row.
    unsafe {
        let limit = S::splat(threshold);
        let lowest = S::splat(f32::NEG_INFINITY);
        while at + STEP * S::LANES <= row.len() {
            let mut x = [limit; STEP];
            for v in 0..STEP {
                x[v] = S::load(row.as_ptr().add(at + v * S::LANES));
            }
            // The second operand is a number each time: a NaN would hide what its neighbours have.
            let largest = S::max(S::max(x[0], S::max(x[1], lowest)), S::max(x[2], S::max(x[3], lowest)));
            if S::at_least(largest, limit) == 0 {
                at += STEP * S::LANES;
                continue;
            }
            if found + STEP * S::LANES > ids.len() {
                return (at, found);
            }
            for v in 0..STEP {
                let mut hits = S::at_least(x[v], limit);
                while hits != 0 {
                    let index = at + v * S::LANES + hits.trailing_zeros() as usize;
                    (ids[found], values[found]) = (index as u32, row[index]);
                    found += 1;
                    hits &= hits - 1;
                }
            }
            at += STEP * S::LANES;
        }
    }
    while at < row.len() {
        if found == ids.len() {
            return (at, found);
        }
        if row[at] >= threshold {
            (ids[found], values[found]) = (at as u32, row[at]);
            found += 1;
        }
        at += 1;
    }
    (at, found)
}

/// [`ScanKernels::dots`](super::ScanKernels::dots).
///
/// # Safety
/// As there, inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn dots<S: Lanes>(x: &[f32], w: &[f32], k: usize, out: *mut f32, out_stride: usize) {
    debug_assert!(x.len() <= DOT_TOKENS * k);
    // SAFETY: handed on.
    unsafe {
        match x.len() / k {
            0 => {}
            1 => dots_tokens::<S, 1, 8>(x, w, k, out, out_stride),
            2 => dots_tokens::<S, 2, 4>(x, w, k, out, out_stride),
            3 => dots_tokens::<S, 3, 2>(x, w, k, out, out_stride),
            _ => dots_tokens::<S, 4, 2>(x, w, k, out, out_stride),
        }
    }
}

#[inline(always)]
unsafe fn dots_tokens<S: Lanes, const T: usize, const E: usize>(
    x: &[f32],
    w: &[f32],
    k: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let experts = w.len() / k;
    let mut expert = 0;
    // SAFETY: experts below `experts`, T rows of x.
    unsafe {
        while expert + E <= experts {
            dots_tile::<S, T, E>(x.as_ptr(), w.as_ptr().add(expert * k), k, out.add(expert), out_stride);
            expert += E;
        }
        while expert < experts {
            dots_tile::<S, T, 1>(x.as_ptr(), w.as_ptr().add(expert * k), k, out.add(expert), out_stride);
            expert += 1;
        }
    }
}

#[inline(always)]
unsafe fn dots_tile<S: Lanes, const T: usize, const E: usize>(
    x: *const f32,
    w: *const f32,
    k: usize,
    out: *mut f32,
    out_stride: usize,
) {
    // SAFETY: T rows of x and E rows of w of k values; out has their places.
    unsafe {
        let mut sums = [[S::zero(); E]; T];
        let whole = k / S::LANES * S::LANES;
        let mut at = 0;
        while at < whole {
            let mut a = [S::zero(); T];
            for t in 0..T {
                a[t] = S::load(x.add(t * k + at));
            }
            for e in 0..E {
                let b = S::load(w.add(e * k + at));
                for t in 0..T {
                    sums[t][e] = S::fma(a[t], b, sums[t][e]);
                }
            }
            at += S::LANES;
        }
        if whole < k {
            for e in 0..E {
                let b = S::load_first(k - whole, w.add(e * k + whole));
                for t in 0..T {
                    let a = S::load_first(k - whole, x.add(t * k + whole));
                    sums[t][e] = S::fma(a, b, sums[t][e]);
                }
            }
        }
        for t in 0..T {
            for e in 0..E {
                out.add(t * out_stride + e).write(S::reduce_add(sums[t][e]));
            }
        }
    }
}

/// The static table of one level: the scans over `$simd`, compiled with `$features`.
macro_rules! scan_level {
    ($table:ident, $features:literal, $simd:ty) => {
        pub(crate) static $table: $crate::scan::ScanKernels = {
            use $crate::scan::{RowMax, ScanKernels, vector};

            #[target_feature(enable = $features)]
            unsafe fn row_max(row: &[f32]) -> RowMax {
                // SAFETY: handed on; the features are here.
                unsafe { vector::row_max::<$simd>(row) }
            }

            #[target_feature(enable = $features)]
            unsafe fn sum_exp(row: &[f32], max: f32, scale: f32) -> f32 {
                // SAFETY: handed on; the features are here.
                unsafe { vector::sum_exp::<$simd>(row, max, scale) }
            }

            #[target_feature(enable = $features)]
            unsafe fn group_maxima(row: &[f32], out: &mut [f32]) {
                // SAFETY: handed on; the features are here.
                unsafe { vector::group_maxima::<$simd>(row, out) }
            }

            #[target_feature(enable = $features)]
            unsafe fn collect(
                row: &[f32],
                start: usize,
                threshold: f32,
                ids: &mut [u32],
                values: &mut [f32],
            ) -> (usize, usize) {
                // SAFETY: handed on; the features are here.
                unsafe { vector::collect::<$simd>(row, start, threshold, ids, values) }
            }

            #[target_feature(enable = $features)]
            unsafe fn dots(x: &[f32], w: &[f32], k: usize, out: *mut f32, out_stride: usize) {
                // SAFETY: handed on; the features are here.
                unsafe { vector::dots::<$simd>(x, w, k, out, out_stride) }
            }

            ScanKernels { row_max, sum_exp, group_maxima, collect, dots }
        };
    };
}
pub(crate) use scan_level;
