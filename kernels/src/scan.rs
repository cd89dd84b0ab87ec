//! The table of kernels that walk long rows of f32: the router's dot products and the sampler's scans of logits.
//!
//! Each has one order of operations per level; `reference/scan.rs` is the definition.

pub(crate) mod vector;

use crate::isa::Isa;

/// Tokens that [`ScanKernels::dots`] takes at once.
pub(crate) const DOT_TOKENS: usize = 4;

/// What one pass over a row finds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowMax {
    /// Lowest index of the largest value; 0 when there is no number in the row.
    pub(crate) index: usize,
    pub(crate) value: f32,
    pub(crate) finite: bool,
}

/// `(row, start, threshold, ids, values) -> (stopped, written)`; see [`ScanKernels::collect`].
pub(crate) type Collect = unsafe fn(&[f32], usize, f32, &mut [u32], &mut [f32]) -> (usize, usize);

/// Kernels of one level.
///
/// # Safety
/// Calling any of them needs a CPU of that level; [`ScanKernels::get`] checks.
#[derive(Debug)]
pub(crate) struct ScanKernels {
    /// Largest value of a row that is not empty.
    pub(crate) row_max: unsafe fn(row: &[f32]) -> RowMax,
    /// `sum exp((x - max) * scale)`.
    pub(crate) sum_exp: unsafe fn(row: &[f32], max: f32, scale: f32) -> f32,
    /// Cuts the row into as many groups as `out` has places and writes each group's largest value (NaN ignored). Which
    /// values form a group is the level's business; every value is in one. `out.len()` is a multiple of 16.
    pub(crate) group_maxima: unsafe fn(row: &[f32], out: &mut [f32]),
    /// Appends (index, value) of every value `>= threshold` from `start` on, in ascending order, until the row ends or `ids`
    /// has no room for what comes next (64 places); returns (where it stopped, how many were written).
    pub(crate) collect: Collect,
    /// `out[t * out_stride + e] = x[t] . w[e]` for up to [`DOT_TOKENS`] rows of x and any number of rows of w, all `k` long.
    pub(crate) dots: unsafe fn(x: &[f32], w: &[f32], k: usize, out: *mut f32, out_stride: usize),
}

impl ScanKernels {
    /// The kernels of `isa`.
    ///
    /// # Panics
    /// If this CPU lacks the level.
    pub(crate) fn get(isa: Isa) -> &'static ScanKernels {
        assert!(isa.available(), "this CPU lacks the level {isa}");
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => &crate::x86_64::avx2::scan::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => &crate::x86_64::avx512::scan::KERNELS,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot => &crate::aarch64::neon::scan::KERNELS,
            _ => &crate::reference::scan::KERNELS,
        }
    }
}
