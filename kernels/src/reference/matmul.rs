//! Tiles in plain loops, straight from the packed panels: the definition of each kind's arithmetic.

use half::f16;

use crate::table::{PANEL, SUM_BLOCK, Tile, TileFn, TileKernels};

/// Rows of the largest tile: a few, so that a panel is read from cache.
const ROWS: usize = 4;

macro_rules! by_rows {
    ($name:ident) => {{
        const TABLE: [TileFn; ROWS] = [$name::<1>, $name::<2>, $name::<3>, $name::<4>];
        TileKernels::vectors(&TABLE, usize::MAX)
    }};
}

pub(crate) const F32: TileKernels = by_rows!(f32_tile);
pub(crate) const BF16: TileKernels = by_rows!(bf16_tile);
pub(crate) const I8: TileKernels = by_rows!(i8_tile);
pub(crate) const I4: TileKernels = by_rows!(i4_tile);

/// One running sum per column in ascending k, each step fused.
unsafe fn f32_tile<const MR: usize>(t: &Tile) {
    // SAFETY: the panel holds k * PANEL values, each row k values (Tile's contract).
    let panel = unsafe { std::slice::from_raw_parts(t.panel.cast::<f32>(), t.k * PANEL) };
    for row in 0..MR {
        // SAFETY: as above.
        let a = unsafe { std::slice::from_raw_parts(t.a.add(row * t.a_stride).cast::<f32>(), t.k) };
        let mut sums = [0f32; PANEL];
        for (w, &a) in panel.chunks_exact(PANEL).zip(a) {
            for (sum, &w) in sums.iter_mut().zip(w) {
                *sum = a.mul_add(w, *sum);
            }
        }
        // SAFETY: the output holds MR rows of PANEL values.
        unsafe { t.out.add(row * PANEL).cast::<[f32; PANEL]>().write(sums) };
    }
}

/// As `f32_tile`, the weights widened; activations are f32.
unsafe fn bf16_tile<const MR: usize>(t: &Tile) {
    // SAFETY: the panel holds k * PANEL values, each row k values (Tile's contract).
    let panel = unsafe { std::slice::from_raw_parts(t.panel.cast::<u16>(), t.k * PANEL) };
    for row in 0..MR {
        // SAFETY: as above.
        let a = unsafe { std::slice::from_raw_parts(t.a.add(row * t.a_stride).cast::<f32>(), t.k) };
        let mut sums = [0f32; PANEL];
        for (w, a) in panel.chunks_exact(2 * PANEL).zip(a.chunks_exact(2)) {
            for half in 0..2 {
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum = a[half].mul_add(widen(w[2 * column + half]), *sum);
                }
            }
        }
        // SAFETY: the output holds MR rows of PANEL values.
        unsafe { t.out.add(row * PANEL).cast::<[f32; PANEL]>().write(sums) };
    }
}

pub(crate) fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

unsafe fn i8_tile<const MR: usize>(t: &Tile) {
    // SAFETY: passed on.
    unsafe { integer_tile::<MR>(t, 128, &|panel, k, column| i32::from(panel[(k / 4 * PANEL + column) * 4 + k % 4])) }
}

unsafe fn i4_tile<const MR: usize>(t: &Tile) {
    let code = |panel: &[u8], k: usize, column: usize| {
        let byte = panel[(k / 8 * PANEL + column) * 4 + k % 4];
        i32::from(if k % 8 < 4 { byte & 15 } else { byte >> 4 })
    };
    // SAFETY: passed on.
    unsafe { integer_tile::<MR>(t, 8, &code) }
}

/// Exact integer sums over each stretch of K that has one scale on both sides, added up in f32 in ascending order.
///
/// `offset` is what the unsigned codes are above the signed weights; with zero points the codes count from 0 and
/// `zeros * sum of activations` is taken off.
unsafe fn integer_tile<const MR: usize>(t: &Tile, offset: i32, code: &dyn Fn(&[u8], usize, usize) -> i32) {
    let bytes = if offset == 8 { t.k * PANEL / 2 } else { t.k * PANEL };
    let groups = t.k.div_ceil(t.group);
    let weights_grouped = !t.group_scales.is_null();
    let acts_grouped = t.act_group < t.k;
    let (offset, zeros) = if t.group_zeros.is_null() {
        (offset, &[][..])
    } else {
        // SAFETY: one per group and column.
        (0, unsafe { std::slice::from_raw_parts(t.group_zeros, groups * PANEL) })
    };
    // SAFETY: lengths are Tile's contract.
    let (panel, scales, column_scales) = unsafe {
        (
            std::slice::from_raw_parts(t.panel, bytes),
            if weights_grouped { std::slice::from_raw_parts(t.group_scales, groups * PANEL) } else { &[] },
            if weights_grouped { &[] } else { std::slice::from_raw_parts(t.column_scales, PANEL) },
        )
    };
    let stretch = t.group.min(t.act_group);
    for row in 0..MR {
        // SAFETY: lengths are Tile's contract.
        let (a, act_scales, sums, out) = unsafe {
            (
                std::slice::from_raw_parts(t.a.add(row * t.a_stride).cast::<i8>(), t.k),
                std::slice::from_raw_parts(t.act_scales.add(row * t.act_scale_stride), t.k.div_ceil(t.act_group)),
                std::slice::from_raw_parts(t.act_sums.add(row * t.act_sum_stride), t.k / SUM_BLOCK + 1),
                &mut *t.out.add(row * PANEL).cast::<[f32; PANEL]>(),
            )
        };
        for (column, out) in out.iter_mut().enumerate() {
            let mut total = 0f32;
            let mut start = 0;
            while start < t.k {
                let end = (start + stretch).min(t.k);
                let act_sum = sums[end / SUM_BLOCK] - sums[start / SUM_BLOCK];
                let mut dot = -offset * act_sum;
                for (k, &a) in a.iter().enumerate().take(end).skip(start) {
                    dot += code(panel, k, column) * i32::from(a);
                }
                let dot = dot as f32;
                let act_scale = act_scales[start / t.act_group];
                let at = start / t.group * PANEL + column;
                total = match (weights_grouped, acts_grouped) {
                    (false, false) => dot,
                    (false, true) => dot.mul_add(act_scale, total),
                    (true, false) => dot.mul_add(widen_f16(scales[at]), total),
                    (true, true) => dot.mul_add(widen_f16(scales[at]) * act_scale, total),
                };
                if let Some(&zero) = zeros.get(at) {
                    let sum = -(act_sum as f32);
                    let sum = if acts_grouped { sum * act_scale } else { sum };
                    total = widen_f16(zero).mul_add(sum, total);
                }
                start = end;
            }
            *out = match (weights_grouped, acts_grouped) {
                (false, false) => total * column_scales[column] * act_scales[0],
                (false, true) => total * column_scales[column],
                (true, false) => total * (act_scales[0] * t.unit),
                (true, true) => total * t.unit,
            };
        }
    }
}

fn widen_f16(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}
