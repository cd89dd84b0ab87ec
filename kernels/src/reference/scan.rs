//! Scans of rows in plain loops.

use crate::scan::{RowMax, ScanKernels};

pub(crate) static KERNELS: ScanKernels = ScanKernels { row_max, sum_exp, group_maxima, collect, dots };

/// Partial sums that a row is folded into; a row's sums are added in a tree at the end.
const LANES: usize = 16;
/// Values of a row that are summed in f32; their sums are added in f64.
pub(crate) const SUM_BLOCK: usize = 2048;

pub(crate) unsafe fn row_max(row: &[f32]) -> RowMax {
    let mut best = RowMax { index: 0, value: f32::NEG_INFINITY, finite: true };
    for (index, &value) in row.iter().enumerate() {
        best.finite &= value.is_finite();
        if value > best.value {
            (best.index, best.value) = (index, value);
        }
    }
    best
}

pub(crate) unsafe fn sum_exp(row: &[f32], max: f32, scale: f32) -> f32 {
    let mut total = 0f64;
    for block in row.chunks(SUM_BLOCK) {
        let mut sums = [0f32; LANES];
        for part in block.chunks(LANES) {
            for (sum, x) in sums.iter_mut().zip(part) {
                *sum += ((x - max) * scale).exp();
            }
        }
        total += f64::from(tree(sums));
    }
    total as f32
}

/// Halves until one is left: the order that the vector levels have too.
fn tree(mut sums: [f32; LANES]) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}

pub(crate) unsafe fn group_maxima(row: &[f32], out: &mut [f32]) {
    out.fill(f32::NEG_INFINITY);
    let groups = out.len();
    for part in row.chunks(groups) {
        for (out, x) in out.iter_mut().zip(part) {
            *out = out.max(*x);
        }
    }
}

pub(crate) unsafe fn collect(
    row: &[f32],
    start: usize,
    threshold: f32,
    ids: &mut [u32],
    values: &mut [f32],
) -> (usize, usize) {
    let mut found = 0;
    for (index, &value) in row.iter().enumerate().skip(start) {
        if found + 16 > ids.len() {
            return (index, found);
        }
        if value >= threshold {
            (ids[found], values[found]) = (index as u32, value);
            found += 1;
        }
    }
    (row.len(), found)
}

pub(crate) unsafe fn dots(x: &[f32], w: &[f32], k: usize, out: *mut f32, out_stride: usize) {
    for (token, x) in x.chunks_exact(k).enumerate() {
        for (expert, w) in w.chunks_exact(k).enumerate() {
            let mut sums = [0f32; LANES];
            for (x, w) in x.chunks(LANES).zip(w.chunks(LANES)) {
                for (sum, (x, w)) in sums.iter_mut().zip(x.iter().zip(w)) {
                    *sum += x * w;
                }
            }
            // SAFETY: the caller's out has a place for every token and expert.
            unsafe { out.add(token * out_stride + expert).write(tree(sums)) };
        }
    }
}
