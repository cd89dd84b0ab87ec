//! Attention in AMX tiles, for a bf16 cache and heads of a multiple of 32: a block of K, and two neighbouring blocks of V, are
//! second operands as they lie in the cache. Softmax and rotation are those of AVX-512.
//!
//! Scores add up 32 elements of a head per product, values 32 keys (two blocks, counted from the chunk's first); where a chunk
//! ends with one block, zeros stand for the second, so that the order of a sum does not depend on what follows.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{TileShapes, configure, release};
use crate::attention::kernels::{Around, AttentionKernels, Blocks, CHUNK, CHUNK_BLOCKS, SoftmaxRows};
use crate::kv::BLOCK_TOKENS;
use crate::rope::MAX_HEAD_DIM;
use crate::x86_64::avx512::attention::BF16 as VECTORS;

/// Rows of one tile register.
const TILE_ROWS: usize = 16;
/// Elements of a head, or keys, in one product.
const DEPTH: usize = 32;
/// Bytes of a line of K or V: 16 pairs.
const LINE: usize = 64;

pub(crate) static BF16: AttentionKernels = AttentionKernels {
    tile_rows: 64,
    around: Some(Around { enter, leave: release }),
    scores,
    softmax,
    values,
    ..VECTORS
};

/// Shapes the tile registers for the full tiles of `rows` rows.
unsafe fn enter(rows: usize) {
    // SAFETY: the level is available.
    unsafe { configure(TileShapes { rows: rows.min(TILE_ROWS), depth: 64 }) };
}

macro_rules! load {
    ($tile:literal, $from:expr, $stride:expr) => {
        asm!(
            concat!("tileloadd tmm", $tile, ", [{from} + {stride}*1]"),
            from = in(reg) $from,
            stride = in(reg) $stride,
            options(nostack, preserves_flags, readonly)
        )
    };
}

/// Past L1: for K and V, which a chunk reads once or twice (3-4 % of prefill; the same for rows of q and P loses as much).
macro_rules! load_once {
    ($tile:literal, $from:expr, $stride:expr) => {
        asm!(
            concat!("tileloaddt1 tmm", $tile, ", [{from} + {stride}*1]"),
            from = in(reg) $from,
            stride = in(reg) $stride,
            options(nostack, preserves_flags, readonly)
        )
    };
}

macro_rules! store {
    ($tile:literal, $to:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{to} + {stride}*1], tmm", $tile),
            to = in(reg) $to,
            stride = in(reg) $stride,
            options(nostack, preserves_flags)
        )
    };
}

macro_rules! zero {
    ($($tile:literal),*) => {
        asm!($(concat!("tilezero tmm", $tile)),*, options(nostack, nomem, preserves_flags))
    };
}

macro_rules! dot {
    ($sum:literal, $first:literal, $second:literal) => {
        asm!(
            concat!("tdpbf16ps tmm", $sum, ", tmm", $first, ", tmm", $second),
            options(nostack, nomem, preserves_flags)
        )
    };
}

/// Calls `f(row, rows, two)` for slices of 32 rows, then of 16, then for what is left, with tiles of that many rows.
#[inline(always)]
unsafe fn slices(rows: usize, mut f: impl FnMut(usize, bool)) {
    let mut row = 0;
    while row < rows {
        let left = rows - row;
        let two = left >= 2 * TILE_ROWS;
        let odd = left < TILE_ROWS && rows > TILE_ROWS;
        if odd {
            // SAFETY: the level is available.
            unsafe { configure(TileShapes { rows: left, depth: 64 }) };
        }
        f(row, two);
        if odd {
            // SAFETY: as above.
            unsafe { enter(rows) };
        }
        row += if two { 2 * TILE_ROWS } else { TILE_ROWS };
    }
}

/// Prefetches the blocks that are wanted next, evenly over the products of a walk.
struct Ahead<'a> {
    blocks: &'a Blocks,
    lines: usize,
    block: usize,
    line: usize,
    per_step: usize,
}

impl Ahead<'_> {
    fn new(blocks: &Blocks, steps: usize) -> Ahead<'_> {
        let lines = blocks.head_dim * BLOCK_TOKENS * 2 / LINE;
        let wanted = blocks.ahead[..blocks.count].iter().take_while(|block| !block.is_null()).count();
        let per_step = (wanted * lines).div_ceil(steps);
        Ahead { blocks, lines, block: 0, line: 0, per_step }
    }

    #[inline(always)]
    fn step(&mut self) {
        for _ in 0..self.per_step {
            if self.block >= self.blocks.count || self.blocks.ahead[self.block].is_null() {
                return;
            }
            let at = self.blocks.ahead[self.block].wrapping_add(self.line * LINE);
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
            self.line += 1;
            if self.line == self.lines {
                (self.line, self.block) = (0, self.block + 1);
            }
        }
    }
}

/// [`AttentionKernels::scores`].
unsafe fn scores(rows: usize, q: *const u8, blocks: &Blocks, s: *mut f32) {
    let head_dim = blocks.head_dim;
    if !head_dim.is_multiple_of(DEPTH) {
        // SAFETY: the caller's contract is the same.
        return unsafe { (VECTORS.scores)(rows, q, blocks, s) };
    }
    let (q_stride, s_stride, steps) = (2 * head_dim, 4 * CHUNK, head_dim / DEPTH);
    let mut ahead = Ahead::new(blocks, steps * blocks.count);
    // SAFETY: rows of q and s and blocks of K are the caller's; tiles have at most the rows of the slice.
    unsafe {
        slices(rows, |row, two| {
            let q = q.add(row * q_stride);
            let s = s.add(row * CHUNK);
            let mut block = 0;
            while block < blocks.count {
                let left = blocks.count - block;
                let to = s.add(block * BLOCK_TOKENS);
                let key = |i: usize, step: usize| blocks.at[block + i].add(step * TILE_ROWS * LINE);
                if two && left >= 2 {
                    zero!(0, 1, 2, 3);
                    for step in 0..steps {
                        let q = q.add(step * LINE);
                        load!(4, q, q_stride);
                        load_once!(6, key(0, step), LINE);
                        dot!(0, 4, 6);
                        load_once!(7, key(1, step), LINE);
                        dot!(1, 4, 7);
                        load!(5, q.add(TILE_ROWS * q_stride), q_stride);
                        dot!(2, 5, 6);
                        dot!(3, 5, 7);
                        ahead.step();
                        ahead.step();
                    }
                    store!(0, to, s_stride);
                    store!(1, to.add(BLOCK_TOKENS), s_stride);
                    store!(2, to.add(TILE_ROWS * CHUNK), s_stride);
                    store!(3, to.add(TILE_ROWS * CHUNK + BLOCK_TOKENS), s_stride);
                    block += 2;
                } else if two {
                    zero!(0, 2);
                    for step in 0..steps {
                        let q = q.add(step * LINE);
                        load!(4, q, q_stride);
                        load_once!(6, key(0, step), LINE);
                        dot!(0, 4, 6);
                        load!(5, q.add(TILE_ROWS * q_stride), q_stride);
                        dot!(2, 5, 6);
                        ahead.step();
                    }
                    store!(0, to, s_stride);
                    store!(2, to.add(TILE_ROWS * CHUNK), s_stride);
                    block += 1;
                } else if left >= 4 {
                    zero!(0, 1, 2, 3);
                    for step in 0..steps {
                        load!(4, q.add(step * LINE), q_stride);
                        load_once!(6, key(0, step), LINE);
                        dot!(0, 4, 6);
                        load_once!(7, key(1, step), LINE);
                        dot!(1, 4, 7);
                        ahead.step();
                        ahead.step();
                        load_once!(6, key(2, step), LINE);
                        dot!(2, 4, 6);
                        load_once!(7, key(3, step), LINE);
                        dot!(3, 4, 7);
                        ahead.step();
                        ahead.step();
                    }
                    store!(0, to, s_stride);
                    store!(1, to.add(BLOCK_TOKENS), s_stride);
                    store!(2, to.add(2 * BLOCK_TOKENS), s_stride);
                    store!(3, to.add(3 * BLOCK_TOKENS), s_stride);
                    block += 4;
                } else {
                    zero!(0);
                    for step in 0..steps {
                        load!(4, q.add(step * LINE), q_stride);
                        load_once!(6, key(0, step), LINE);
                        dot!(0, 4, 6);
                        ahead.step();
                    }
                    store!(0, to, s_stride);
                    block += 1;
                }
            }
        });
    }
}

/// [`AttentionKernels::softmax`], with zeros for the second block of the last pair.
unsafe fn softmax(rows: usize, blocks: usize, s: *const f32, p: *mut u8, state: &SoftmaxRows) {
    // SAFETY: the caller's contract is the same; rows of P have room for CHUNK bf16.
    unsafe {
        (VECTORS.softmax)(rows, blocks, s, p, state);
        if !blocks.is_multiple_of(2) {
            for row in 0..rows {
                p.add((row * CHUNK + blocks * BLOCK_TOKENS) * 2).write_bytes(0, 2 * BLOCK_TOKENS);
            }
        }
    }
}

/// Pairs of V blocks that do not lie side by side.
#[repr(align(64))]
struct Pairs([MaybeUninit<u8>; CHUNK * MAX_HEAD_DIM * 2]);

/// [`AttentionKernels::values`].
unsafe fn values(rows: usize, p: *const u8, blocks: &Blocks, correction: *const f32, o: *mut f32) {
    let head_dim = blocks.head_dim;
    if !head_dim.is_multiple_of(DEPTH) {
        // SAFETY: the caller's contract is the same.
        return unsafe { (VECTORS.values)(rows, p, blocks, correction, o) };
    }
    let block_bytes = head_dim * BLOCK_TOKENS * 2;
    let pairs = blocks.count.div_ceil(2);
    let mut copies = Pairs([MaybeUninit::uninit(); CHUNK * MAX_HEAD_DIM * 2]);
    let mut at = [std::ptr::null::<u8>(); CHUNK_BLOCKS / 2];
    // SAFETY: blocks of V are in the cache, `copies` has room for a chunk of the largest head; rows of p, o and
    // the corrections are the caller's; tiles have at most the rows of the slice.
    unsafe {
        for pair in 0..pairs {
            let first = blocks.at[2 * pair];
            let whole = 2 * pair + 1 < blocks.count;
            at[pair] = first;
            if !whole || blocks.at[2 * pair + 1] != first.wrapping_add(block_bytes) {
                let copy = copies.0.as_mut_ptr().cast::<u8>().add(pair * 2 * block_bytes);
                copy.copy_from_nonoverlapping(first, block_bytes);
                let second = copy.add(block_bytes);
                if whole {
                    second.copy_from_nonoverlapping(blocks.at[2 * pair + 1], block_bytes);
                } else {
                    second.write_bytes(0, block_bytes);
                }
                at[pair] = copy;
            }
        }
        scale(rows, head_dim, correction, o);
        let (p_stride, o_stride) = (2 * CHUNK, 4 * head_dim);
        let columns = head_dim / TILE_ROWS;
        let mut ahead = Ahead::new(blocks, columns * pairs);
        slices(rows, |row, two| {
            let p = p.add(row * p_stride);
            let mut column = 0;
            while column < columns {
                let to = o.add(row * head_dim + column * TILE_ROWS);
                let value = |i: usize, pair: usize| at[pair].add((column + i) * LINE);
                if two {
                    let to2 = to.add(TILE_ROWS * head_dim);
                    load!(0, to, o_stride);
                    load!(1, to.add(TILE_ROWS), o_stride);
                    load!(2, to2, o_stride);
                    load!(3, to2.add(TILE_ROWS), o_stride);
                    for pair in 0..pairs {
                        let p = p.add(pair * LINE);
                        load!(4, p, p_stride);
                        load_once!(6, value(0, pair), o_stride);
                        dot!(0, 4, 6);
                        load_once!(7, value(1, pair), o_stride);
                        dot!(1, 4, 7);
                        load!(5, p.add(TILE_ROWS * p_stride), p_stride);
                        dot!(2, 5, 6);
                        dot!(3, 5, 7);
                        ahead.step();
                        ahead.step();
                    }
                    store!(0, to, o_stride);
                    store!(1, to.add(TILE_ROWS), o_stride);
                    store!(2, to2, o_stride);
                    store!(3, to2.add(TILE_ROWS), o_stride);
                    column += 2;
                } else if columns - column >= 4 {
                    load!(0, to, o_stride);
                    load!(1, to.add(TILE_ROWS), o_stride);
                    load!(2, to.add(2 * TILE_ROWS), o_stride);
                    load!(3, to.add(3 * TILE_ROWS), o_stride);
                    for pair in 0..pairs {
                        load!(4, p.add(pair * LINE), p_stride);
                        load_once!(6, value(0, pair), o_stride);
                        dot!(0, 4, 6);
                        load_once!(7, value(1, pair), o_stride);
                        dot!(1, 4, 7);
                        ahead.step();
                        ahead.step();
                        load_once!(6, value(2, pair), o_stride);
                        dot!(2, 4, 6);
                        load_once!(7, value(3, pair), o_stride);
                        dot!(3, 4, 7);
                        ahead.step();
                        ahead.step();
                    }
                    store!(0, to, o_stride);
                    store!(1, to.add(TILE_ROWS), o_stride);
                    store!(2, to.add(2 * TILE_ROWS), o_stride);
                    store!(3, to.add(3 * TILE_ROWS), o_stride);
                    column += 4;
                } else {
                    load!(0, to, o_stride);
                    for pair in 0..pairs {
                        load!(4, p.add(pair * LINE), p_stride);
                        load_once!(6, value(0, pair), o_stride);
                        dot!(0, 4, 6);
                        ahead.step();
                    }
                    store!(0, to, o_stride);
                    column += 1;
                }
            }
        });
    }
}

/// Multiplies rows by their corrections. Most are 1: the largest score seldom changes after the first keys.
#[target_feature(enable = "avx512f")]
unsafe fn scale(rows: usize, head_dim: usize, correction: *const f32, o: *mut f32) {
    for row in 0..rows {
        // SAFETY: `rows` corrections and rows of head_dim floats, a multiple of 16.
        unsafe {
            let factor = *correction.add(row);
            if factor == 1.0 {
                continue;
            }
            let factor = _mm512_set1_ps(factor);
            let o = o.add(row * head_dim);
            for at in (0..head_dim).step_by(16) {
                _mm512_storeu_ps(o.add(at), _mm512_mul_ps(_mm512_loadu_ps(o.add(at)), factor));
            }
        }
    }
}
