//! Attention with AVX2 and FMA: bf16 K and V are widened to f32 in registers, q and P stay f32.
//!
//! A register tile is up to [`ROWS`] rows times 16 keys (or 16 columns of V): two vectors a row. Every sum is one chain of fused
//! multiply-adds in ascending order of d (or of keys), whatever the number of rows.

use core::arch::x86_64::*;

use crate::attention::kernels::{AttentionKernels, Blocks, CHUNK, NO_SCORE, Operand, SoftmaxRows};
use crate::kv::BLOCK_TOKENS;
use crate::reference::attention::{pack_block_bf16, pack_block_f32};

pub(crate) static F32: AttentionKernels = AttentionKernels {
    operand: Operand::F32,
    scores: scores::<false>,
    softmax,
    values: values::<false>,
    rotate,
    append_block: append_block_f32,
};

pub(crate) static BF16: AttentionKernels = AttentionKernels {
    operand: Operand::F32,
    scores: scores::<true>,
    softmax,
    values: values::<true>,
    rotate,
    append_block: append_block_bf16,
};

/// Rows of a register tile: 12 accumulators, two operands and a broadcast fill the 16 registers.
const ROWS: usize = 6;
const LINE: usize = 64;

/// Adds `steps` lines of B, each times one f32 of A (two when the line holds bf16 pairs), to the tile.
///
/// # Safety
/// A has R rows of `steps` (or twice as many) floats, `a_stride` apart; B has `steps` lines, `b_stride` bytes apart. `ahead` is
/// only prefetched.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn accumulate<const R: usize, const BF16: bool, const AHEAD: bool>(
    tile: &mut [[__m256; 2]; R],
    a: *const f32,
    a_stride: usize,
    b: *const u8,
    b_stride: usize,
    steps: usize,
    ahead: *const u8,
) {
    for step in 0..steps {
        // SAFETY: as the caller promises.
        unsafe {
            let line = b.add(step * b_stride);
            if AHEAD {
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(step * b_stride).cast());
            }
            if BF16 {
                let raw = [_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(32).cast())];
                let even = raw.map(|raw| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw)));
                for (r, tile) in tile.iter_mut().enumerate() {
                    let x = _mm256_broadcast_ss(&*a.add(r * a_stride + 2 * step));
                    tile[0] = _mm256_fmadd_ps(x, even[0], tile[0]);
                    tile[1] = _mm256_fmadd_ps(x, even[1], tile[1]);
                }
                let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
                let odd = raw.map(|raw| _mm256_castsi256_ps(_mm256_and_si256(raw, high)));
                for (r, tile) in tile.iter_mut().enumerate() {
                    let x = _mm256_broadcast_ss(&*a.add(r * a_stride + 2 * step + 1));
                    tile[0] = _mm256_fmadd_ps(x, odd[0], tile[0]);
                    tile[1] = _mm256_fmadd_ps(x, odd[1], tile[1]);
                }
            } else {
                let b = [_mm256_loadu_ps(line.cast()), _mm256_loadu_ps(line.add(32).cast())];
                for (r, tile) in tile.iter_mut().enumerate() {
                    let x = _mm256_broadcast_ss(&*a.add(r * a_stride + step));
                    tile[0] = _mm256_fmadd_ps(x, b[0], tile[0]);
                    tile[1] = _mm256_fmadd_ps(x, b[1], tile[1]);
                }
            }
        }
    }
}

/// Calls a function with the number of rows as a constant.
macro_rules! with_rows {
    ($rows:expr, $f:ident::<$($g:tt),*>($($arg:expr),* $(,)?)) => {
        match $rows {
            1 => $f::<1, $($g),*>($($arg),*),
            2 => $f::<2, $($g),*>($($arg),*),
            3 => $f::<3, $($g),*>($($arg),*),
            4 => $f::<4, $($g),*>($($arg),*),
            5 => $f::<5, $($g),*>($($arg),*),
            _ => $f::<6, $($g),*>($($arg),*),
        }
    };
}

#[target_feature(enable = "avx2,fma")]
unsafe fn scores<const BF16: bool>(rows: usize, q: *const u8, blocks: &Blocks, s: *mut f32) {
    let tiles = rows.div_ceil(ROWS);
    for block in 0..blocks.count {
        let (k, ahead) = (blocks.at[block], blocks.ahead[block]);
        for tile in 0..tiles {
            let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
            // SAFETY: rows from..to of q and s.
            unsafe {
                let q = q.cast::<f32>().add(from * blocks.head_dim);
                let s = s.add(from * CHUNK + block * BLOCK_TOKENS);
                // The first tile's pace is the pace at which the next data is fetched.
                if tile == 0 && !ahead.is_null() {
                    with_rows!(to - from, scores_tile::<BF16, true>(q, blocks.head_dim, k, ahead, s));
                } else {
                    with_rows!(to - from, scores_tile::<BF16, false>(q, blocks.head_dim, k, ahead, s));
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn scores_tile<const R: usize, const BF16: bool, const AHEAD: bool>(
    q: *const f32,
    head_dim: usize,
    k: *const u8,
    ahead: *const u8,
    s: *mut f32,
) {
    let mut tile = [[_mm256_setzero_ps(); 2]; R];
    let steps = if BF16 { head_dim / 2 } else { head_dim };
    // SAFETY: R rows of q and s; a block has `steps` lines.
    unsafe {
        accumulate::<R, BF16, AHEAD>(&mut tile, q, head_dim, k, LINE, steps, ahead);
        for (r, tile) in tile.iter().enumerate() {
            _mm256_storeu_ps(s.add(r * CHUNK), tile[0]);
            _mm256_storeu_ps(s.add(r * CHUNK + 8), tile[1]);
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn values<const BF16: bool>(rows: usize, p: *const u8, blocks: &Blocks, correction: *const f32, o: *mut f32) {
    let tiles = rows.div_ceil(ROWS);
    for column in (0..blocks.head_dim).step_by(16) {
        for tile in 0..tiles {
            let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
            // SAFETY: rows from..to of p, o and the corrections.
            unsafe {
                let p = p.cast::<f32>().add(from * CHUNK);
                let o = o.add(from * blocks.head_dim + column);
                let correction = correction.add(from);
                if tile == 0 && !blocks.ahead[0].is_null() {
                    with_rows!(to - from, values_tile::<BF16, true>(p, blocks, column, correction, o));
                } else {
                    with_rows!(to - from, values_tile::<BF16, false>(p, blocks, column, correction, o));
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn values_tile<const R: usize, const BF16: bool, const AHEAD: bool>(
    p: *const f32,
    blocks: &Blocks,
    column: usize,
    correction: *const f32,
    o: *mut f32,
) {
    let head_dim = blocks.head_dim;
    let (steps, line) = if BF16 { (BLOCK_TOKENS / 2, 4 * head_dim) } else { (BLOCK_TOKENS, 4 * head_dim) };
    let mut tile = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: R rows of p and o; V blocks have `steps` lines of head_dim elements (pairs).
    unsafe {
        for (r, tile) in tile.iter_mut().enumerate() {
            let correction = _mm256_broadcast_ss(&*correction.add(r));
            tile[0] = _mm256_mul_ps(_mm256_loadu_ps(o.add(r * head_dim)), correction);
            tile[1] = _mm256_mul_ps(_mm256_loadu_ps(o.add(r * head_dim + 8)), correction);
        }
        for block in 0..blocks.count {
            let v = blocks.at[block].add(4 * column);
            // Null where the next chunk is shorter: prefetching nothing, or a wild address, is harmless.
            let ahead = blocks.ahead[block].wrapping_add(4 * column);
            accumulate::<R, BF16, AHEAD>(&mut tile, p.add(block * BLOCK_TOKENS), CHUNK, v, line, steps, ahead);
        }
        for (r, tile) in tile.iter().enumerate() {
            _mm256_storeu_ps(o.add(r * head_dim), tile[0]);
            _mm256_storeu_ps(o.add(r * head_dim + 8), tile[1]);
        }
    }
}

/// `2^x` for x <= 0 (0 far below): a polynomial on [-0.5, 0.5] with `2^0 = 1` exactly, relative error 1.1e-7.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn exp2(x: __m256) -> __m256 {
    // The operand order keeps a NaN: maxps returns its second operand then.
    let x = _mm256_max_ps(_mm256_set1_ps(-127.0), x);
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    let magic = _mm256_set1_ps(12_582_912.0);
    let shifted = _mm256_add_ps(x, magic);
    let f = _mm256_sub_ps(x, _mm256_sub_ps(shifted, magic));
    let exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
    let mut p = _mm256_set1_ps(crate::reference::attention::EXP2[4]);
    for c in [3, 2, 1, 0] {
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(crate::reference::attention::EXP2[c]));
    }
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0));
    _mm256_mul_ps(p, power)
}

/// Largest lane.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn reduce_max(x: __m256) -> f32 {
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

/// Sum of the lanes: i + (i + 4), then i + (i + 2), then i + (i + 1).
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(crate) fn reduce_add(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
}

#[target_feature(enable = "avx2,fma")]
unsafe fn softmax(rows: usize, blocks: usize, s: *const f32, p: *mut u8, state: &SoftmaxRows) {
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for row in 0..rows {
        // SAFETY: the caller's arrays have `rows` entries; rows of s and p hold CHUNK floats.
        unsafe {
            let (s, p) = (s.add(row * CHUNK), p.cast::<f32>().add(row * CHUNK));
            let valid = *state.valid.add(row) as usize;
            let (full, vectors) = (valid / 8, blocks * BLOCK_TOKENS / 8);
            let partial = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((valid % 8) as i32), lanes));
            let nothing = _mm256_set1_ps(NO_SCORE);
            let mut max = [nothing; 2];
            for v in 0..full {
                max[v % 2] = _mm256_max_ps(_mm256_loadu_ps(s.add(8 * v)), max[v % 2]);
            }
            if !valid.is_multiple_of(8) {
                let last = _mm256_blendv_ps(nothing, _mm256_loadu_ps(s.add(8 * full)), partial);
                max[0] = _mm256_max_ps(last, max[0]);
            }
            let before = *state.max.add(row);
            let found = reduce_max(_mm256_max_ps(max[0], max[1]));
            let max = if found > before { found } else { before };
            let m = _mm256_set1_ps(max);
            let mut sums = [_mm256_setzero_ps(); 2];
            for v in 0..full {
                let x = exp2(_mm256_sub_ps(_mm256_loadu_ps(s.add(8 * v)), m));
                _mm256_storeu_ps(p.add(8 * v), x);
                sums[v % 2] = _mm256_add_ps(sums[v % 2], x);
            }
            if full < vectors {
                let x = exp2(_mm256_sub_ps(_mm256_loadu_ps(s.add(8 * full)), m));
                let x = _mm256_and_ps(x, partial);
                _mm256_storeu_ps(p.add(8 * full), x);
                sums[full % 2] = _mm256_add_ps(sums[full % 2], x);
                for v in full + 1..vectors {
                    _mm256_storeu_ps(p.add(8 * v), _mm256_setzero_ps());
                }
            }
            let correction = _mm256_cvtss_f32(exp2(_mm256_set1_ps(before - max)));
            *state.max.add(row) = max;
            *state.correction.add(row) = correction;
            *state.sum.add(row) = *state.sum.add(row) * correction + reduce_add(_mm256_add_ps(sums[0], sums[1]));
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn rotate(x: &[f32], cos_sin: &[f32], scale: f32, out: &mut [f32]) {
    let scale = _mm256_set1_ps(scale);
    for ((x, cs), out) in x.chunks_exact(8).zip(cos_sin.chunks_exact(8)).zip(out.chunks_exact_mut(8)) {
        // SAFETY: all three are 8 long.
        unsafe {
            let (x, cs) = (_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(cs.as_ptr()));
            let (cos, sin) = (_mm256_moveldup_ps(cs), _mm256_movehdup_ps(cs));
            let swapped = _mm256_permute_ps::<0b1011_0001>(x);
            // Even lanes: x0 cos - x1 sin; odd lanes: x1 cos + x0 sin.
            let rotated = _mm256_fmaddsub_ps(x, cos, _mm256_mul_ps(swapped, sin));
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_mul_ps(rotated, scale));
        }
    }
}

#[target_feature(enable = "avx2,fma")]
unsafe fn append_block_f32(head_dim: usize, k: &[f32], v: &[f32], v_stride: usize, to_k: *mut u8, to_v: *mut u8) {
    // SAFETY: handed on.
    unsafe { pack_block_f32(head_dim, k, v, v_stride, to_k, to_v) };
}

#[target_feature(enable = "avx2,fma")]
unsafe fn append_block_bf16(head_dim: usize, k: &[f32], v: &[f32], v_stride: usize, to_k: *mut u8, to_v: *mut u8) {
    // SAFETY: handed on.
    unsafe { pack_block_bf16(head_dim, k, v, v_stride, to_k, to_v) };
}
