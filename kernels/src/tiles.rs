//! The tile kernels, written once for all vector levels.
//!
//! `MR` rows by `NV` vectors of columns stay in registers over the whole of K; a panel that is wider than `NV` vectors is
//! walked once per part. Whichever operand takes fewer registers is held, the other streams through. The order of every sum depends on K and the groups only, never on MR or NV.

use crate::simd::{Bf16Dot, ByteDot, Simd};
use crate::table::{PANEL, SUM_BLOCK, Tile};

/// Spreads a tile's prefetching evenly over its steps of `SUM_BLOCK` values of K.
pub(crate) struct Pace {
    next: *const u8,
    lines_left: usize,
    lines_per_step: usize,
}

impl Pace {
    #[inline(always)]
    pub(crate) fn new(t: &Tile, parts: usize) -> Pace {
        let lines = t.prefetch_bytes / 64;
        Pace {
            next: t.prefetch,
            lines_left: lines,
            lines_per_step: lines.div_ceil((t.k_to - t.k_from) / SUM_BLOCK * parts),
        }
    }

    /// # Safety
    /// As `Simd`'s methods; the addresses are hints and need not be valid.
    #[inline(always)]
    pub(crate) unsafe fn step<S: Simd>(&mut self) {
        if self.lines_left != 0 {
            let lines = self.lines_per_step.min(self.lines_left);
            for line in 0..lines {
                // SAFETY: a prefetch never faults.
                unsafe { S::prefetch(self.next.wrapping_add(64 * line)) };
            }
            self.next = self.next.wrapping_add(64 * lines);
            self.lines_left -= lines;
        }
    }
}

/// Row `row` of the activations at byte `at`.
#[inline(always)]
pub(crate) unsafe fn act<T: Copy>(t: &Tile, row: usize, at: usize) -> T {
    // SAFETY: the caller stays inside the row; activations are aligned to their elements.
    unsafe { t.a.add(row * t.a_stride + at).cast::<T>().read() }
}

/// f32 weights and activations: one fused step per k.
#[inline(always)]
pub(crate) unsafe fn f32_tile<S: Simd, const MR: usize, const NV: usize>(t: &Tile) {
    let parts = PANEL / (S::LANES * NV);
    let mut pace = Pace::new(t, parts);
    for part in 0..parts {
        // SAFETY: the panel holds k rows of PANEL values, activations k values (Tile's contract).
        unsafe {
            let panel = t.panel.cast::<f32>().add(part * NV * S::LANES);
            let mut acc = [[S::zero(); NV]; MR];
            for block in 0..t.k / SUM_BLOCK {
                pace.step::<S>();
                for k in block * SUM_BLOCK..(block + 1) * SUM_BLOCK {
                    if NV > MR {
                        let mut a = [S::zero(); MR];
                        for row in 0..MR {
                            a[row] = S::splat(act(t, row, 4 * k));
                        }
                        for v in 0..NV {
                            let w = S::load(panel.add(k * PANEL + v * S::LANES));
                            for row in 0..MR {
                                acc[row][v] = S::fma(a[row], w, acc[row][v]);
                            }
                        }
                        continue;
                    }
                    let mut w = [S::zero(); NV];
                    for v in 0..NV {
                        w[v] = S::load(panel.add(k * PANEL + v * S::LANES));
                    }
                    for row in 0..MR {
                        let a = S::splat(act(t, row, 4 * k));
                        for v in 0..NV {
                            acc[row][v] = S::fma(a, w[v], acc[row][v]);
                        }
                    }
                }
            }
            store::<S, MR, NV>(t, part, &acc);
        }
    }
}

/// bf16 weights widened to f32, f32 activations: one fused step per k.
#[inline(always)]
pub(crate) unsafe fn bf16_tile<S: Simd, const MR: usize, const NV: usize>(t: &Tile) {
    let parts = PANEL / (S::LANES * NV);
    let mut pace = Pace::new(t, parts);
    for part in 0..parts {
        // SAFETY: the panel holds k/2 rows of PANEL pairs, activations k values (Tile's contract).
        unsafe {
            let panel = t.panel.add(part * NV * S::LANES * 4);
            let mut acc = [[S::zero(); NV]; MR];
            for block in 0..t.k / SUM_BLOCK {
                pace.step::<S>();
                for pair in block * (SUM_BLOCK / 2)..(block + 1) * (SUM_BLOCK / 2) {
                    let from = panel.add(pair * PANEL * 4);
                    for half in 0..2 {
                        if NV > MR {
                            let mut a = [S::zero(); MR];
                            for row in 0..MR {
                                a[row] = S::splat(act(t, row, 4 * (2 * pair + half)));
                            }
                            for v in 0..NV {
                                let pairs = S::load_i(from.add(v * S::LANES * 4));
                                let w = if half == 0 { S::bf16_low(pairs) } else { S::bf16_high(pairs) };
                                for row in 0..MR {
                                    acc[row][v] = S::fma(a[row], w, acc[row][v]);
                                }
                            }
                            continue;
                        }
                        let mut w = [S::zero(); NV];
                        for v in 0..NV {
                            let pairs = S::load_i(from.add(v * S::LANES * 4));
                            w[v] = if half == 0 { S::bf16_low(pairs) } else { S::bf16_high(pairs) };
                        }
                        for row in 0..MR {
                            let a = S::splat(act(t, row, 4 * (2 * pair + half)));
                            for v in 0..NV {
                                acc[row][v] = S::fma(a, w[v], acc[row][v]);
                            }
                        }
                    }
                }
            }
            store::<S, MR, NV>(t, part, &acc);
        }
    }
}

/// bf16 weights and activations on levels that multiply bf16: one dot product per two k.
#[inline(always)]
pub(crate) unsafe fn bf16_dot_tile<S: Bf16Dot, const MR: usize, const NV: usize>(t: &Tile) {
    let parts = PANEL / (S::LANES * NV);
    let mut pace = Pace::new(t, parts);
    for part in 0..parts {
        // SAFETY: the panel holds k/2 rows of PANEL pairs, activations k values of two bytes (Tile's contract).
        unsafe {
            let panel = t.panel.add(part * NV * S::LANES * 4);
            let mut acc = [[S::zero(); NV]; MR];
            for block in 0..t.k / SUM_BLOCK {
                pace.step::<S>();
                for pair in block * (SUM_BLOCK / 2)..(block + 1) * (SUM_BLOCK / 2) {
                    let mut w = [S::splat_i(0); NV];
                    for v in 0..NV {
                        w[v] = S::load_i(panel.add(pair * PANEL * 4 + v * S::LANES * 4));
                    }
                    for row in 0..MR {
                        let a = S::splat_i(act(t, row, 4 * pair));
                        for v in 0..NV {
                            acc[row][v] = S::dot_bf16(acc[row][v], w[v], a);
                        }
                    }
                }
            }
            store::<S, MR, NV>(t, part, &acc);
        }
    }
}

/// Writes a part of the tile.
///
/// # Safety
/// As `Simd`'s methods; the tile's output is valid.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd, const MR: usize, const NV: usize>(t: &Tile, part: usize, acc: &[[S::F; NV]; MR]) {
    for row in 0..MR {
        for v in 0..NV {
            // SAFETY: the output holds MR rows of PANEL values.
            unsafe { S::store(t.out.add(row * PANEL + (part * NV + v) * S::LANES), acc[row][v]) };
        }
    }
}

/// Sum of row `row`'s codes from `start` to `end`, both multiples of `SUM_BLOCK`.
#[inline(always)]
pub(crate) unsafe fn act_sum(t: &Tile, row: usize, start: usize, end: usize) -> i32 {
    // SAFETY: running sums exist for every multiple of SUM_BLOCK up to k.
    unsafe {
        let sums = t.act_sums.add(row * t.act_sum_stride);
        sums.add(end / SUM_BLOCK).read() - sums.add(start / SUM_BLOCK).read()
    }
}

/// Adds the exact sums of one stretch of K, `dots`, to the f32 totals: every integer kernel's way from codes to numbers.
///
/// `WG`: weight scales per group. `AG`: activation scales per group. Neither: a single stretch, scaled in `finish`.
#[inline(always)]
pub(crate) unsafe fn accumulate<S: Simd, const MR: usize, const NV: usize, const WG: bool, const AG: bool>(
    t: &Tile,
    part: usize,
    start: usize,
    end: usize,
    dots: &[[S::I; NV]; MR],
    totals: &mut [[S::F; NV]; MR],
) {
    // SAFETY: scales exist for every group of K and every column of the panel (Tile's contract).
    unsafe {
        let at = start / t.group * PANEL + part * NV * S::LANES;
        for v in 0..NV {
            let scale = if WG { S::load_f16(t.group_scales.add(at + v * S::LANES)) } else { S::zero() };
            for row in 0..MR {
                let dot = S::to_f32(dots[row][v]);
                totals[row][v] = match (WG, AG) {
                    (false, false) => dot,
                    (true, false) => S::fma(dot, scale, totals[row][v]),
                    (false, true) => S::fma(dot, S::splat(act_scale(t, row, start)), totals[row][v]),
                    (true, true) => S::fma(dot, S::mul(scale, S::splat(act_scale(t, row, start))), totals[row][v]),
                };
            }
        }
        if WG && !t.group_zeros.is_null() {
            for v in 0..NV {
                let zero = S::load_f16(t.group_zeros.add(at + v * S::LANES));
                for row in 0..MR {
                    let sum = -(act_sum(t, row, start, end) as f32);
                    let sum = if AG { sum * act_scale(t, row, start) } else { sum };
                    totals[row][v] = S::fma(zero, S::splat(sum), totals[row][v]);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn act_scale(t: &Tile, row: usize, at: usize) -> f32 {
    // SAFETY: one scale per act_group of K in every row.
    unsafe { t.act_scales.add(row * t.act_scale_stride + at / t.act_group).read() }
}

/// Applies the scales that hold for the whole of K and stores.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd, const MR: usize, const NV: usize, const WG: bool, const AG: bool>(
    t: &Tile,
    part: usize,
    totals: &mut [[S::F; NV]; MR],
) {
    // SAFETY: one column scale per column unless grouped (Tile's contract).
    unsafe {
        for v in 0..NV {
            let column = if WG { S::zero() } else { S::load(t.column_scales.add((part * NV + v) * S::LANES)) };
            for row in 0..MR {
                let total = totals[row][v];
                totals[row][v] = match (WG, AG) {
                    (false, false) => S::mul(S::mul(total, column), S::splat(act_scale(t, row, 0))),
                    (false, true) => S::mul(total, column),
                    (true, false) => S::mul(total, S::splat(act_scale(t, row, 0) * t.unit)),
                    (true, true) => S::mul(total, S::splat(t.unit)),
                };
            }
        }
        store::<S, MR, NV>(t, part, totals);
    }
}

/// How one level multiplies codes: the inner loop over a stretch of K with one scale on both sides.
pub(crate) trait Codes<S: Simd, const MR: usize, const NV: usize> {
    /// `dots[row][v] = sum over start..end of (code - offset) * a`, exact. `panel` points to the part's first column.
    ///
    /// # Safety
    /// As the tile kernels: the pointers of `t` are valid, the level is available; start and end are multiples of
    /// `SUM_BLOCK`.
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[S::I; NV]; MR],
    );
}

/// The walk over all stretches of K, for 8- and 4-bit codes.
#[inline(always)]
pub(crate) unsafe fn integer_tile<
    S: Simd,
    C: Codes<S, MR, NV>,
    const MR: usize,
    const NV: usize,
    const WG: bool,
    const AG: bool,
>(
    t: &Tile,
    offset: i32,
) {
    let parts = PANEL / (S::LANES * NV);
    let mut pace = Pace::new(t, parts);
    let offset = if WG && !t.group_zeros.is_null() { 0 } else { offset };
    let stretch = if WG || AG { t.group.min(t.act_group) } else { t.k };
    for part in 0..parts {
        // SAFETY: passed on.
        unsafe {
            let panel = t.panel.add(part * NV * S::LANES * 4);
            let mut totals = [[S::zero(); NV]; MR];
            let mut start = 0;
            while start < t.k {
                let end = (start + stretch).min(t.k);
                let mut dots = [[S::splat_i(0); NV]; MR];
                C::stretch(t, panel, start, end, offset, &mut pace, &mut dots);
                accumulate::<S, MR, NV, WG, AG>(t, part, start, end, &dots, &mut totals);
                start = end;
            }
            finish::<S, MR, NV, WG, AG>(t, part, &mut totals);
        }
    }
}

/// Grouped kernels find out here which sides are grouped; the choice is the same for every tile of a matrix.
#[inline(always)]
pub(crate) unsafe fn grouped_tile<S: Simd, C: Codes<S, MR, NV>, const MR: usize, const NV: usize>(
    t: &Tile,
    offset: i32,
) {
    // SAFETY: passed on.
    unsafe {
        match (!t.group_scales.is_null(), t.act_group < t.k) {
            (true, false) => integer_tile::<S, C, MR, NV, true, false>(t, offset),
            (true, true) => integer_tile::<S, C, MR, NV, true, true>(t, offset),
            (false, true) => integer_tile::<S, C, MR, NV, false, true>(t, offset),
            (false, false) => integer_tile::<S, C, MR, NV, false, false>(t, offset),
        }
    }
}

/// 8-bit codes by byte dot products.
pub(crate) struct DotI8;

impl<S: ByteDot, const MR: usize, const NV: usize> Codes<S, MR, NV> for DotI8 {
    #[inline(always)]
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[S::I; NV]; MR],
    ) {
        // SAFETY: k stays below t.k, columns inside the panel.
        unsafe {
            let mut acc = start_values::<S, MR, NV>(t, start, end, offset);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<S>();
                for step in block * (SUM_BLOCK / 4)..(block + 1) * (SUM_BLOCK / 4) {
                    let mut w = [S::splat_i(0); NV];
                    for v in 0..NV {
                        w[v] = S::load_i(panel.add(step * PANEL * 4 + v * S::LANES * 4));
                    }
                    for row in 0..MR {
                        let a = S::splat_i(act(t, row, 4 * step));
                        for v in 0..NV {
                            acc[row][v] = S::dot(acc[row][v], w[v], a);
                        }
                    }
                }
            }
            *dots = acc;
        }
    }
}

/// 4-bit codes by byte dot products.
pub(crate) struct DotI4;

impl<S: ByteDot, const MR: usize, const NV: usize> Codes<S, MR, NV> for DotI4 {
    #[inline(always)]
    unsafe fn stretch(
        t: &Tile,
        panel: *const u8,
        start: usize,
        end: usize,
        offset: i32,
        pace: &mut Pace,
        dots: &mut [[S::I; NV]; MR],
    ) {
        // SAFETY: k stays below t.k, columns inside the panel.
        unsafe {
            let mut acc = start_values::<S, MR, NV>(t, start, end, offset);
            for block in start / SUM_BLOCK..end / SUM_BLOCK {
                pace.step::<S>();
                for step in block * (SUM_BLOCK / 8)..(block + 1) * (SUM_BLOCK / 8) {
                    let mut low = [S::splat_i(0); NV];
                    let mut high = [S::splat_i(0); NV];
                    for v in 0..NV {
                        let bytes = S::load_i(panel.add(step * PANEL * 4 + v * S::LANES * 4));
                        low[v] = S::nibbles_low(bytes);
                        high[v] = S::nibbles_high(bytes);
                    }
                    for row in 0..MR {
                        let a = S::splat_i(act(t, row, 8 * step));
                        let b = S::splat_i(act(t, row, 8 * step + 4));
                        for v in 0..NV {
                            acc[row][v] = S::dot(S::dot(acc[row][v], low[v], a), high[v], b);
                        }
                    }
                }
            }
            *dots = acc;
        }
    }
}

/// Unsigned codes are `offset` too large: `-offset * sum(a)` up front makes up for it.
#[inline(always)]
pub(crate) unsafe fn start_values<S: Simd, const MR: usize, const NV: usize>(
    t: &Tile,
    start: usize,
    end: usize,
    offset: i32,
) -> [[S::I; NV]; MR] {
    // SAFETY: passed on.
    unsafe {
        let mut acc = [[S::splat_i(0); NV]; MR];
        for row in 0..MR {
            acc[row] = [S::splat_i(-offset * act_sum(t, row, start, end)); NV];
        }
        acc
    }
}
