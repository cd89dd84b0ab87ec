//! Attention in plain loops: the definition the other levels are tested against, and the level for CPUs without one of theirs.

use crate::attention::kernels::{AttentionKernels, Blocks, CHUNK, Operand, SoftmaxRows, TILE_ROWS};
use crate::kv::BLOCK_TOKENS;

pub(crate) static F32: AttentionKernels = AttentionKernels {
    operand: Operand::F32,
    tile_rows: TILE_ROWS,
    around: None,
    scores: scores::<false>,
    softmax,
    values: values::<false>,
    rotate,
    rotate_q,
    append_block: append_block_f32,
};

pub(crate) static BF16: AttentionKernels = AttentionKernels {
    operand: Operand::F32,
    tile_rows: TILE_ROWS,
    around: None,
    scores: scores::<true>,
    softmax,
    values: values::<true>,
    rotate,
    rotate_q,
    append_block: append_block_bf16,
};

fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

unsafe fn scores<const BF16: bool>(rows: usize, q: *const u8, blocks: &Blocks, s: *mut f32) {
    let head_dim = blocks.head_dim;
    for row in 0..rows {
        for block in 0..blocks.count {
            let mut sums = [0f32; BLOCK_TOKENS];
            for d in 0..head_dim {
                // SAFETY: q has `rows` rows of head_dim f32; a block has 16 keys of head_dim elements.
                unsafe {
                    let x = *q.cast::<f32>().add(row * head_dim + d);
                    for (token, sum) in sums.iter_mut().enumerate() {
                        let k = if BF16 {
                            let at = (d / 2 * BLOCK_TOKENS + token) * 2 + d % 2;
                            widen(*blocks.at[block].cast::<u16>().add(at))
                        } else {
                            *blocks.at[block].cast::<f32>().add(d * BLOCK_TOKENS + token)
                        };
                        *sum += x * k;
                    }
                }
            }
            // SAFETY: s has `rows` rows of CHUNK scores, block < CHUNK / 16.
            unsafe { s.add(row * CHUNK + block * BLOCK_TOKENS).cast::<[f32; BLOCK_TOKENS]>().write(sums) };
        }
    }
}

unsafe fn softmax(rows: usize, blocks: usize, s: *const f32, p: *mut u8, state: &SoftmaxRows) {
    for row in 0..rows {
        // SAFETY: the caller's arrays have `rows` entries, s and p rows of CHUNK values.
        unsafe {
            let s = std::slice::from_raw_parts(s.add(row * CHUNK), blocks * BLOCK_TOKENS);
            let p = std::slice::from_raw_parts_mut(p.cast::<f32>().add(row * CHUNK), s.len());
            let valid = *state.valid.add(row) as usize;
            let before = *state.max.add(row);
            let max = s[..valid].iter().fold(before, |max, &x| max.max(x));
            let correction = (before - max).exp2();
            let mut sum = *state.sum.add(row) * correction;
            for (key, (p, &s)) in p.iter_mut().zip(s).enumerate() {
                *p = if key < valid { (s - max).exp2() } else { 0.0 };
                sum += *p;
            }
            *state.max.add(row) = max;
            *state.sum.add(row) = sum;
            *state.correction.add(row) = correction;
        }
    }
}

unsafe fn values<const BF16: bool>(rows: usize, p: *const u8, blocks: &Blocks, correction: *const f32, o: *mut f32) {
    let head_dim = blocks.head_dim;
    for row in 0..rows {
        // SAFETY: o has `rows` rows of head_dim, p rows of CHUNK f32, correction `rows` entries; V blocks have 16 rows of
        // head_dim elements.
        unsafe {
            let o = std::slice::from_raw_parts_mut(o.add(row * head_dim), head_dim);
            let correction = *correction.add(row);
            o.iter_mut().for_each(|o| *o *= correction);
            for key in 0..blocks.count * BLOCK_TOKENS {
                let p = *p.cast::<f32>().add(row * CHUNK + key);
                let (block, token) = (blocks.at[key / BLOCK_TOKENS], key % BLOCK_TOKENS);
                for (d, o) in o.iter_mut().enumerate() {
                    let v = if BF16 {
                        widen(*block.cast::<u16>().add((token / 2 * head_dim + d) * 2 + token % 2))
                    } else {
                        *block.cast::<f32>().add(token * head_dim + d)
                    };
                    *o += p * v;
                }
            }
        }
    }
}

unsafe fn rotate(x: &[f32], cos_sin: &[f32], out: &mut [f32]) {
    for ((x, cs), out) in x.chunks_exact(2).zip(cos_sin.chunks_exact(2)).zip(out.chunks_exact_mut(2)) {
        out[0] = x[0] * cs[0] - x[1] * cs[1];
        out[1] = x[1] * cs[0] + x[0] * cs[1];
    }
}

unsafe fn rotate_q(x: &[f32], cos_sin: &[f32], scale: f32, out: *mut u8) {
    // SAFETY: out has room for as many f32 as x.
    unsafe {
        let out = std::slice::from_raw_parts_mut(out.cast::<f32>(), x.len());
        rotate(x, cos_sin, out);
        out.iter_mut().for_each(|x| *x *= scale);
    }
}

unsafe fn append_block_f32(head_dim: usize, k: &[f32], v: &[f32], v_stride: usize, to_k: *mut u8, to_v: *mut u8) {
    // SAFETY: handed on.
    unsafe { pack_block_f32(head_dim, k, v, v_stride, to_k, to_v) };
}

unsafe fn append_block_bf16(head_dim: usize, k: &[f32], v: &[f32], v_stride: usize, to_k: *mut u8, to_v: *mut u8) {
    // SAFETY: handed on.
    unsafe { pack_block_bf16(head_dim, k, v, v_stride, to_k, to_v) };
}

/// Rounds to nearest even; a NaN stays one.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1))) >> 16;
    if x.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

/// Body of [`AttentionKernels::append_block`] for f32, compiled anew inside each level.
///
/// # Safety
/// The destinations are whole blocks.
#[inline(always)]
pub(crate) unsafe fn pack_block_f32(
    head_dim: usize,
    k: &[f32],
    v: &[f32],
    v_stride: usize,
    to_k: *mut u8,
    to_v: *mut u8,
) {
    // SAFETY: the caller hands over whole blocks of 16 * head_dim floats.
    let (to_k, to_v) = unsafe {
        let floats = BLOCK_TOKENS * head_dim;
        (
            std::slice::from_raw_parts_mut(to_k.cast::<f32>(), floats),
            std::slice::from_raw_parts_mut(to_v.cast(), floats),
        )
    };
    for (d, line) in to_k.as_chunks_mut::<BLOCK_TOKENS>().0.iter_mut().enumerate() {
        for (token, to) in line.iter_mut().enumerate() {
            *to = k[token * head_dim + d];
        }
    }
    for (token, row) in to_v.chunks_exact_mut(head_dim).enumerate() {
        row.copy_from_slice(&v[token * v_stride..][..head_dim]);
    }
}

/// Body of [`AttentionKernels::append_block`] for bf16, compiled anew inside each level.
///
/// # Safety
/// The destinations are whole blocks.
#[inline(always)]
pub(crate) unsafe fn pack_block_bf16(
    head_dim: usize,
    k: &[f32],
    v: &[f32],
    v_stride: usize,
    to_k: *mut u8,
    to_v: *mut u8,
) {
    // SAFETY: the caller hands over whole blocks of 8 * head_dim pairs.
    let (to_k, to_v) = unsafe {
        let pairs = BLOCK_TOKENS / 2 * head_dim;
        (std::slice::from_raw_parts_mut(to_k.cast::<u32>(), pairs), std::slice::from_raw_parts_mut(to_v.cast(), pairs))
    };
    for (pair, line) in to_k.as_chunks_mut::<BLOCK_TOKENS>().0.iter_mut().enumerate() {
        for (token, to) in line.iter_mut().enumerate() {
            let at = token * head_dim + 2 * pair;
            *to = bf16_bits(k[at]) | bf16_bits(k[at + 1]) << 16;
        }
    }
    for (pair, row) in to_v.chunks_exact_mut(head_dim).enumerate() {
        let even = &v[2 * pair * v_stride..][..head_dim];
        let odd = &v[(2 * pair + 1) * v_stride..][..head_dim];
        for ((to, even), odd) in row.iter_mut().zip(even).zip(odd) {
            *to = bf16_bits(*even) | bf16_bits(*odd) << 16;
        }
    }
}
