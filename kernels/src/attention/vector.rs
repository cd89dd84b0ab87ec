//! The attention kernels, written once for all vector levels.
//!
//! A register tile is `MR` rows times `NV` vectors: 16 keys (scores) or 16 columns of V (values) are one 64-byte *line*, which is
//! `16 / LANES` vectors. Every element is one chain of fused multiply-adds (or dot products) in ascending order of d or of
//! keys, whatever the tile.

// Plain index loops: closures inside iterator adapters do not inherit a function's target features.
#![allow(clippy::needless_range_loop)]

use super::kernels::{Blocks, CHUNK, NO_SCORE, SoftmaxRows};
use crate::kv::BLOCK_TOKENS;
use crate::lanes::Lanes;
use crate::simd::{Bf16Dot, Simd};

/// Bytes of 16 f32 or 16 pairs of bf16.
const LINE: usize = 64;

/// How one line of K or V meets its operand.
pub(crate) trait Product<S: Simd> {
    /// Bytes of q or P that one line takes.
    const OPERAND: usize;
    /// Elements of one d (or key) that one line holds: 1, or 2 for pairs.
    const DEPTH: usize;

    /// Adds one line.
    ///
    /// # Safety
    /// `a` has MR rows of `OPERAND` bytes, `stride` apart; each of `b` is one vector.
    unsafe fn add<const MR: usize, const NV: usize>(
        tile: &mut [[S::F; NV]; MR],
        a: *const u8,
        stride: usize,
        b: [*const u8; NV],
    );
}

/// f32 times f32.
pub(crate) struct Float;

impl<S: Simd> Product<S> for Float {
    const OPERAND: usize = 4;
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn add<const MR: usize, const NV: usize>(
        tile: &mut [[S::F; NV]; MR],
        a: *const u8,
        stride: usize,
        b: [*const u8; NV],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut w = [S::zero(); NV];
            for v in 0..NV {
                w[v] = S::load(b[v].cast());
            }
            for r in 0..MR {
                let x = S::splat(*a.add(r * stride).cast::<f32>());
                for v in 0..NV {
                    tile[r][v] = S::fma(x, w[v], tile[r][v]);
                }
            }
        }
    }
}

/// f32 times bf16, widened in registers.
pub(crate) struct Widened;

impl<S: Simd> Product<S> for Widened {
    const OPERAND: usize = 8;
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn add<const MR: usize, const NV: usize>(
        tile: &mut [[S::F; NV]; MR],
        a: *const u8,
        stride: usize,
        b: [*const u8; NV],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            if MR <= 2 {
                // Few rows: each vector is widened and used up, which leaves registers for long chains.
                for v in 0..NV {
                    let pairs = S::load_i(b[v]);
                    let (low, high) = (S::bf16_low(pairs), S::bf16_high(pairs));
                    for r in 0..MR {
                        let x = a.add(r * stride).cast::<f32>();
                        tile[r][v] = S::fma(S::splat(*x), low, tile[r][v]);
                        tile[r][v] = S::fma(S::splat(*x.add(1)), high, tile[r][v]);
                    }
                }
                return;
            }
            let mut pairs = [S::splat_i(0); NV];
            for v in 0..NV {
                pairs[v] = S::load_i(b[v]);
            }
            for half in 0..2 {
                let mut w = [S::zero(); NV];
                for v in 0..NV {
                    w[v] = if half == 0 { S::bf16_low(pairs[v]) } else { S::bf16_high(pairs[v]) };
                }
                for r in 0..MR {
                    let x = S::splat(*a.add(r * stride + 4 * half).cast::<f32>());
                    for v in 0..NV {
                        tile[r][v] = S::fma(x, w[v], tile[r][v]);
                    }
                }
            }
        }
    }
}

/// bf16 times bf16.
pub(crate) struct Dotted;

impl<S: Bf16Dot> Product<S> for Dotted {
    const OPERAND: usize = 4;
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn add<const MR: usize, const NV: usize>(
        tile: &mut [[S::F; NV]; MR],
        a: *const u8,
        stride: usize,
        b: [*const u8; NV],
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let mut w = [S::splat_i(0); NV];
            for v in 0..NV {
                w[v] = S::load_i(b[v]);
            }
            for r in 0..MR {
                let x = S::splat_i(*a.add(r * stride).cast::<i32>());
                for v in 0..NV {
                    tile[r][v] = S::dot_bf16(tile[r][v], w[v], x);
                }
            }
        }
    }
}

/// Arguments of a scores tile.
#[derive(Debug)]
pub(crate) struct ScoresTile {
    q: *const u8,
    head_dim: usize,
    /// K blocks of the tile's lines, and what to fetch meanwhile.
    keys: *const *const u8,
    ahead: *const *const u8,
    fetch: Fetch,
    s: *mut f32,
}

/// What a tile fetches for later. The tiles over one line's rows share it evenly, so that memory is busy all the time and
/// never so busy that the tile's own loads wait: fetching everything at the first tile's pace, memory and arithmetic took turns.
#[derive(Debug, Clone, Copy)]
struct Fetch {
    /// Byte where this tile's share begins.
    from: usize,
    /// Bytes from step to step; below 64 a line is asked for several times, which costs nothing.
    step: usize,
}

/// Arguments of a values tile.
#[derive(Debug)]
pub(crate) struct ValuesTile {
    p: *const u8,
    blocks: *const Blocks,
    /// Byte offset of the tile's columns in a line of V.
    at: usize,
    /// Steps of a block. It is a constant, but the loop should stay one.
    steps: usize,
    fetch: Fetch,
    correction: *const f32,
    o: *mut f32,
}

/// A tile of a fixed number of rows and lines.
pub(crate) type TileFn<T> = unsafe fn(&T);

/// Rows of one register tile: the first of them, and its place among the tiles over the same lines.
#[derive(Debug, Clone, Copy)]
struct Share {
    from: usize,
    tile: usize,
    tiles: usize,
}

/// A level's register tiles: for 1, 2, ... rows the numbers of lines that a tile takes at once, most first, down to one.
#[derive(Debug)]
pub(crate) struct Tiles<T: 'static>(pub(crate) &'static [&'static [(usize, TileFn<T>)]]);

impl<T> Tiles<T> {
    /// Calls `f(line, share, kernel)` for tiles that cover `rows` rows and `lines` lines, lines outermost: a line that was
    /// brought for the first rows is still near for the others. Rows are shared evenly: 8 are two of 4, not 5 and 3.
    #[inline(always)]
    fn walk(&self, rows: usize, lines: usize, mut f: impl FnMut(usize, Share, TileFn<T>)) {
        let tiles = rows.div_ceil(self.0.len());
        let widths = self.0[rows.div_ceil(tiles) - 1];
        let mut line = 0;
        while line < lines {
            let width = widths.iter().map(|option| option.0).find(|width| line + width <= lines).unwrap_or(1);
            for tile in 0..tiles {
                let (from, to) = (tile * rows / tiles, (tile + 1) * rows / tiles);
                let options = self.0[to - from - 1];
                let share = Share { from, tile, tiles };
                match options.iter().find(|option| option.0 == width) {
                    Some(option) => f(line, share, option.1),
                    // A share one row smaller whose tiles are cut otherwise.
                    None => (line..line + width).for_each(|line| f(line, share, options[options.len() - 1].1)),
                }
            }
            line += width;
        }
    }
}

/// What a level brings for one KV kind.
pub(crate) trait Level {
    /// Bytes of an element of q and P.
    const OPERAND: usize;
    /// Keys of one line of V.
    const DEPTH: usize;
    const SCORES: Tiles<ScoresTile>;
    const VALUES: Tiles<ValuesTile>;
}

/// [`AttentionKernels::scores`](super::kernels::AttentionKernels::scores).
///
/// # Safety
/// As there.
pub(crate) unsafe fn scores<L: Level>(rows: usize, q: *const u8, blocks: &Blocks, s: *mut f32) {
    let head_dim = blocks.head_dim;
    let steps = head_dim / L::DEPTH;
    L::SCORES.walk(rows, blocks.count, |block, share, kernel| {
        // SAFETY: the rows lie in q and s, the tile's blocks below `count`.
        unsafe {
            let keys = blocks.at.as_ptr().add(block);
            // Where nothing is to be fetched, a tile "fetches" what it reads.
            let ahead = if blocks.ahead[block].is_null() { keys } else { blocks.ahead.as_ptr().add(block) };
            let fetch = Fetch { from: share.tile * steps * LINE / share.tiles, step: LINE / share.tiles };
            let q = q.add(share.from * head_dim * L::OPERAND);
            let s = s.add(share.from * CHUNK + block * BLOCK_TOKENS);
            kernel(&ScoresTile { q, head_dim, keys, ahead, fetch, s });
        }
    });
}

/// [`AttentionKernels::values`](super::kernels::AttentionKernels::values).
///
/// # Safety
/// As there.
pub(crate) unsafe fn values<L: Level>(rows: usize, p: *const u8, blocks: &Blocks, correction: *const f32, o: *mut f32) {
    let head_dim = blocks.head_dim;
    let steps = BLOCK_TOKENS / L::DEPTH;
    L::VALUES.walk(rows, head_dim / 16, |line, share, kernel| {
        // SAFETY: the rows lie in p, o and the corrections, the columns below head_dim.
        unsafe {
            let p = p.add(share.from * CHUNK * L::OPERAND);
            let o = o.add(share.from * head_dim + 16 * line);
            let correction = correction.add(share.from);
            // Lines are walked by columns, what comes next is fetched in the order of its bytes.
            let place = line * share.tiles + share.tile;
            let fetch = Fetch { from: place * steps * LINE / share.tiles, step: LINE / share.tiles };
            kernel(&ValuesTile { p, blocks, at: line * LINE, steps, fetch, correction, o });
        }
    });
}

/// Scores of MR rows and `NV * LANES` keys.
///
/// # Safety
/// As [`scores`], inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn scores_tile<S: Lanes, P: Product<S>, const MR: usize, const NV: usize>(t: &ScoresTile) {
    let per_line = 16 / S::LANES;
    // SAFETY: MR rows of q and s, NV / per_line blocks.
    unsafe {
        let mut lines = [std::ptr::null::<u8>(); NV];
        for v in 0..NV {
            lines[v] = (*t.keys.add(v / per_line)).add(v % per_line * S::LANES * 4);
        }
        let mut tile = [[S::zero(); NV]; MR];
        let stride = t.head_dim * P::OPERAND / P::DEPTH;
        for step in 0..t.head_dim / P::DEPTH {
            let mut b = lines;
            for v in 0..NV {
                b[v] = lines[v].add(step * LINE);
            }
            for line in 0..NV / per_line {
                S::prefetch((*t.ahead.add(line)).wrapping_add(t.fetch.from + step * t.fetch.step));
            }
            P::add::<MR, NV>(&mut tile, t.q.add(step * P::OPERAND), stride, b);
        }
        for r in 0..MR {
            for v in 0..NV {
                S::store(t.s.add(r * CHUNK + v * S::LANES), tile[r][v]);
            }
        }
    }
}

/// Adds a chunk's values to MR rows and `NV * LANES` columns.
///
/// # Safety
/// As [`values`], inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn values_tile<S: Lanes, P: Product<S>, const MR: usize, const NV: usize>(t: &ValuesTile) {
    let per_line = 16 / S::LANES;
    // SAFETY: the blocks outlive the call.
    let blocks = unsafe { &*t.blocks };
    let head_dim = blocks.head_dim;
    let stride = CHUNK * P::OPERAND / P::DEPTH;
    // SAFETY: MR rows of p, o and the corrections; `count` blocks of 16 / DEPTH lines of head_dim (pairs of) elements.
    unsafe {
        let mut tile = [[S::zero(); NV]; MR];
        for r in 0..MR {
            let correction = S::splat(*t.correction.add(r));
            for v in 0..NV {
                tile[r][v] = S::mul(S::load(t.o.add(r * head_dim + v * S::LANES)), correction);
            }
        }
        let mut p = t.p;
        for block in 0..blocks.count {
            let from = blocks.at[block].add(t.at);
            let ahead = blocks.ahead[block];
            let ahead = if ahead.is_null() { blocks.at[block] } else { ahead }.wrapping_add(t.fetch.from);
            for step in 0..t.steps {
                let at = step * head_dim * 4;
                let mut b = [from; NV];
                for v in 0..NV {
                    b[v] = from.add(at + v * S::LANES * 4);
                }
                for line in 0..NV / per_line {
                    S::prefetch(ahead.wrapping_add(step * t.fetch.step + line * t.steps * LINE));
                }
                P::add::<MR, NV>(&mut tile, p, stride, b);
                p = p.add(P::OPERAND);
            }
        }
        for r in 0..MR {
            for v in 0..NV {
                S::store(t.o.add(r * head_dim + v * S::LANES), tile[r][v]);
            }
        }
    }
}

/// [`AttentionKernels::softmax`](super::kernels::AttentionKernels::softmax); P is f32, or bf16 with `BF16`.
///
/// # Safety
/// As there, inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Lanes, const BF16: bool>(
    rows: usize,
    blocks: usize,
    s: *const f32,
    p: *mut u8,
    state: &SoftmaxRows,
) {
    for row in 0..rows {
        // SAFETY: the arrays have `rows` entries, rows of s and p hold CHUNK values.
        unsafe {
            let s = s.add(row * CHUNK);
            let p = p.add(row * CHUNK * if BF16 { 2 } else { 4 });
            let valid = *state.valid.add(row) as usize;
            let nothing = S::splat(NO_SCORE);
            let full = valid / S::LANES;
            let mut maxima = [nothing; 2];
            for v in 0..full {
                maxima[v % 2] = S::max(S::load(s.add(v * S::LANES)), maxima[v % 2]);
            }
            if full * S::LANES < valid {
                let last = S::first(valid % S::LANES, S::load(s.add(full * S::LANES)), nothing);
                maxima[0] = S::max(last, maxima[0]);
            }
            let before = *state.max.add(row);
            let found = S::reduce_max(S::max(maxima[0], maxima[1]));
            let max = if found > before { found } else { before };
            let m = S::splat(max);
            let mut sums = [S::zero(); 2];
            let vectors = blocks * BLOCK_TOKENS / S::LANES;
            for v in 0..vectors {
                let x = if v < full {
                    S::exp2(S::sub(S::load(s.add(v * S::LANES)), m))
                } else if v * S::LANES < valid {
                    let x = S::exp2(S::sub(S::load(s.add(v * S::LANES)), m));
                    S::first(valid % S::LANES, x, S::zero())
                } else {
                    S::zero()
                };
                if BF16 {
                    S::store_bf16(p.cast::<u16>().add(v * S::LANES), x);
                } else {
                    S::store(p.cast::<f32>().add(v * S::LANES), x);
                }
                sums[v % 2] = S::add(sums[v % 2], x);
            }
            let mut correction = [0f32; 16];
            S::store(correction.as_mut_ptr(), S::exp2(S::splat(before - max)));
            let correction = correction[0];
            *state.max.add(row) = max;
            *state.correction.add(row) = correction;
            *state.sum.add(row) = *state.sum.add(row) * correction + S::reduce_add(S::add(sums[0], sums[1]));
        }
    }
}

/// [`AttentionKernels::rotate`](super::kernels::AttentionKernels::rotate).
///
/// # Safety
/// As there, inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn rotate<S: Lanes>(x: &[f32], cos_sin: &[f32], out: &mut [f32]) {
    let mut at = 0;
    // SAFETY: all three have the same length, a multiple of 16.
    unsafe {
        while at < x.len() {
            let turned = S::rotate(S::load(x.as_ptr().add(at)), S::load(cos_sin.as_ptr().add(at)));
            S::store(out.as_mut_ptr().add(at), turned);
            at += S::LANES;
        }
    }
}

/// [`AttentionKernels::rotate_q`](super::kernels::AttentionKernels::rotate_q).
///
/// # Safety
/// As there, inside a function with the level's features.
#[inline(always)]
pub(crate) unsafe fn rotate_q<S: Lanes, const BF16: bool>(x: &[f32], cos_sin: &[f32], scale: f32, out: *mut u8) {
    let mut at = 0;
    // SAFETY: all three have the same length, a multiple of 16.
    unsafe {
        let scale = S::splat(scale);
        while at < x.len() {
            let turned = S::rotate(S::load(x.as_ptr().add(at)), S::load(cos_sin.as_ptr().add(at)));
            let turned = S::mul(turned, scale);
            if BF16 {
                S::store_bf16(out.cast::<u16>().add(at), turned);
            } else {
                S::store(out.cast::<f32>().add(at), turned);
            }
            at += S::LANES;
        }
    }
}

/// The static tables of one level and KV kind, and their functions: `$product` over `$simd`, compiled with the attribute.
macro_rules! attention_level {
    (
        $table:ident, $level:ident, $(#[$features:meta])?, $simd:ty, $product:ty, $operand:ident, $pack:ident,
        tiles: [$($rows:literal => [$($lines:literal),*]),*]
    ) => {
        struct $level;

        impl $level {
            $(#[$features])?
            unsafe fn scores_tile<const MR: usize, const NV: usize>(t: &$crate::attention::vector::ScoresTile) {
                // SAFETY: handed on; the features are here.
                unsafe { $crate::attention::vector::scores_tile::<$simd, $product, MR, NV>(t) }
            }

            $(#[$features])?
            unsafe fn values_tile<const MR: usize, const NV: usize>(t: &$crate::attention::vector::ValuesTile) {
                // SAFETY: handed on; the features are here.
                unsafe { $crate::attention::vector::values_tile::<$simd, $product, MR, NV>(t) }
            }

            $(#[$features])?
            unsafe fn softmax(
                rows: usize,
                blocks: usize,
                s: *const f32,
                p: *mut u8,
                state: &$crate::attention::kernels::SoftmaxRows,
            ) {
                const BF16: bool = matches!(Operand::$operand, Operand::Bf16);
                // SAFETY: handed on; the features are here.
                unsafe { $crate::attention::vector::softmax::<$simd, BF16>(rows, blocks, s, p, state) }
            }

            $(#[$features])?
            unsafe fn rotate(x: &[f32], cos_sin: &[f32], out: &mut [f32]) {
                // SAFETY: handed on; the features are here.
                unsafe { $crate::attention::vector::rotate::<$simd>(x, cos_sin, out) }
            }

            $(#[$features])?
            unsafe fn rotate_q(x: &[f32], cos_sin: &[f32], scale: f32, out: *mut u8) {
                const BF16: bool = matches!(Operand::$operand, Operand::Bf16);
                // SAFETY: handed on; the features are here.
                unsafe { $crate::attention::vector::rotate_q::<$simd, BF16>(x, cos_sin, scale, out) }
            }

            $(#[$features])?
            unsafe fn append_block(
                head_dim: usize,
                k: &[f32],
                v: &[f32],
                v_stride: usize,
                to_k: *mut u8,
                to_v: *mut u8,
            ) {
                // SAFETY: handed on; the features are here.
                unsafe { $crate::reference::attention::$pack(head_dim, k, v, v_stride, to_k, to_v) }
            }
        }

        impl $crate::attention::vector::Level for $level {
            const OPERAND: usize = match Operand::$operand {
                Operand::F32 => 4,
                Operand::Bf16 => 2,
            };
            const DEPTH: usize =
                <$product as $crate::attention::vector::Product<$simd>>::DEPTH;
            const SCORES: $crate::attention::vector::Tiles<$crate::attention::vector::ScoresTile> =
                $crate::attention::vector::Tiles(&[$(&[$((
                    $lines,
                    $level::scores_tile::<$rows, { $lines * 16 / <$simd as $crate::simd::Simd>::LANES }>,
                )),*]),*]);
            const VALUES: $crate::attention::vector::Tiles<$crate::attention::vector::ValuesTile> =
                $crate::attention::vector::Tiles(&[$(&[$((
                    $lines,
                    $level::values_tile::<$rows, { $lines * 16 / <$simd as $crate::simd::Simd>::LANES }>,
                )),*]),*]);
        }

        pub(crate) static $table: AttentionKernels = AttentionKernels {
            operand: Operand::$operand,
            tile_rows: $crate::attention::kernels::TILE_ROWS,
            around: None,
            scores: $crate::attention::vector::scores::<$level>,
            softmax: $level::softmax,
            values: $crate::attention::vector::values::<$level>,
            rotate: $level::rotate,
            rotate_q: $level::rotate_q,
            append_block: $level::append_block,
        };
    };
}
pub(crate) use attention_level;
