//! Causal grouped-query attention over the paged cache, decode and prefill in one driver.
//!
//! A *tile* is a few tokens of one span times the query heads of one KV head: a decoding sequence is a tile of one token, a
//! prefill chunk is cut into tiles of about 48 rows (64 with AMX). Every tile walks the same chunks of 128 keys, aligned to absolute
//! positions, in ascending order. Every 1024 keys (a *segment*) the running softmax starts anew and the segments' results are
//! merged in order, **always**: so a long context can be split over threads when there are few sequences, and the result
//! does not depend on whether it was. A token's result depends on its q, the keys up to its position and the level, on
//! nothing else: not on the batch, the chunking of its prefill, the block numbers or the threads.

pub(crate) mod int8;
pub(crate) mod kernels;
pub(crate) mod vector;

use crate::isa::Isa;
use crate::kv::{BLOCK_TOKENS, KvCache, KvKind, Lane};
use crate::memory::AlignedBuf;
pub use crate::rope::{RopeTable, rope_append, rope_append_with};
use crate::threads::{Pool, SharedMut};
use int8::Widen;
use kernels::{AttentionKernels, Blocks, CHUNK, CHUNK_BLOCKS, NO_SCORE, SoftmaxRows, TILE_ROWS_MAX};

/// Keys after which the running softmax starts anew; results of segments are merged in order.
const SEGMENT: usize = 1024;
/// With at least this many tiles per thread, contexts are not split over threads.
const TILES_PER_THREAD: usize = 4;
/// Segments of decoding tiles that can be in flight in a split step.
const PARTIALS_MAX: usize = 256;

/// New tokens of one sequence and where its context lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First of the new tokens in the step's rows.
    pub token_start: u32,
    pub token_len: u32,
    /// Tokens in the cache including the new ones: the last new token's position + 1.
    pub context_len: u32,
    /// First entry of the sequence in the step's block tables.
    pub table_start: u32,
    pub table_len: u32,
}

/// Rotated q of a step and the threads' working memory, sized once.
#[derive(Debug)]
pub struct AttentionScratch {
    threads: usize,
    max_tokens: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Tokens of the step that [`rope_append`] filled `q` for.
    pub(crate) tokens: usize,
    /// `[kv_head][token][group][head_dim]`, f32 or bf16 as the kernels take it.
    pub(crate) q: AlignedBuf<f32>,
    /// Per thread: scores, P, two accumulators, row states and a chunk of widened K or V.
    work: AlignedBuf<f32>,
    partials: AlignedBuf<f32>,
    partial_rows: usize,
    tiles: Vec<Tile>,
    merges: Vec<Tile>,
}

/// One piece of work: some rows of one KV head over a range of segments.
#[derive(Debug, Clone, Copy)]
struct Tile {
    /// First token (row of the step) and how many.
    token: u32,
    tokens: u32,
    kv_head: u32,
    /// Position of the first token.
    position: u32,
    table_start: u32,
    segments: (u32, u32),
    /// Row of `partials` where the first segment's result goes; `WHOLE`: straight to the output.
    partial: u32,
}

const WHOLE: u32 = u32::MAX;

impl Tile {
    /// Keys that the last token sees.
    fn keys(&self) -> usize {
        (self.position + self.tokens) as usize
    }

    fn cost(&self) -> usize {
        let (start, end) = (self.segments.0 as usize * SEGMENT, (self.segments.1 as usize * SEGMENT).min(self.keys()));
        // A tile of one token still streams its keys: count some rows for that.
        (end - start) * (self.tokens as usize + 1)
    }
}

impl AttentionScratch {
    /// Room for `max_tokens` tokens a step on `threads` threads.
    ///
    /// # Panics
    /// If `heads` is not a multiple of `kv_heads`, or `head_dim` not a multiple of 16 up to 256.
    pub fn new(threads: usize, max_tokens: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads do not divide over {kv_heads} KV heads");
        assert!(
            head_dim.is_multiple_of(16) && (16..=crate::rope::MAX_HEAD_DIM).contains(&head_dim),
            "head_dim must be a multiple of 16 up to {}, not {head_dim}",
            crate::rope::MAX_HEAD_DIM
        );
        let group = heads / kv_heads;
        let threads = threads.max(1);
        let partial_rows = if threads > 1 { PARTIALS_MAX * group } else { 0 };
        AttentionScratch {
            threads,
            max_tokens,
            heads,
            kv_heads,
            head_dim,
            tokens: 0,
            q: AlignedBuf::zeroed(max_tokens * heads * head_dim),
            work: AlignedBuf::zeroed(threads * Work::floats(tile_tokens(TILE_ROWS_MAX, group) * group, head_dim)),
            partials: AlignedBuf::zeroed(partial_rows * (head_dim + 2)),
            partial_rows,
            tiles: Vec::with_capacity(max_tokens * kv_heads + PARTIALS_MAX),
            merges: Vec::with_capacity(PARTIALS_MAX),
        }
    }

    pub fn bytes(&self) -> usize {
        (self.q.len() + self.work.len() + self.partials.len()) * 4
            + (self.tiles.capacity() + self.merges.capacity()) * size_of::<Tile>()
    }

    pub(crate) fn expect_shape(&self, tokens: usize, heads: usize, kv_heads: usize, head_dim: usize) {
        assert!(tokens <= self.max_tokens, "{tokens} tokens in a step, the scratch has room for {}", self.max_tokens);
        assert_eq!(
            (heads, kv_heads, head_dim),
            (self.heads, self.kv_heads, self.head_dim),
            "the scratch was made for another shape (heads, kv_heads, head_dim)"
        );
    }

    /// Cuts the step into tiles, longest first.
    fn plan(&mut self, spans: &[Span], threads: usize, tile_rows: usize) {
        self.tiles.clear();
        self.merges.clear();
        let step = tile_tokens(tile_rows, self.heads / self.kv_heads) as u32;
        for span in spans {
            for kv_head in 0..self.kv_heads as u32 {
                for token in (0..span.token_len).step_by(step as usize) {
                    let tokens = step.min(span.token_len - token);
                    let position = span.context_len - span.token_len + token;
                    let segments = (0, (position + tokens).div_ceil(SEGMENT as u32));
                    let token = span.token_start + token;
                    let table_start = span.table_start;
                    self.tiles.push(Tile { token, tokens, kv_head, position, table_start, segments, partial: WHOLE });
                }
            }
        }
        if threads > 1 && self.tiles.len() < threads * TILES_PER_THREAD {
            self.split();
        }
        self.tiles.sort_unstable_by_key(|tile| std::cmp::Reverse(tile.cost()));
    }

    /// Makes one tile per segment of every tile that has several, as far as the room for partial results goes.
    fn split(&mut self) {
        let group = (self.heads / self.kv_heads) as u32;
        let mut row = 0;
        for index in 0..self.tiles.len() {
            let tile = self.tiles[index];
            let (rows, count) = (tile.tokens * group, tile.segments.1);
            let fits = (row + rows * count) as usize <= self.partial_rows
                && self.tiles.len() + count as usize <= self.tiles.capacity()
                && self.merges.len() < self.merges.capacity();
            if count < 2 || !fits {
                continue;
            }
            self.merges.push(Tile { partial: row, ..tile });
            for segment in 0..count {
                let part = Tile { segments: (segment, segment + 1), partial: row, ..tile };
                row += rows;
                if segment == 0 {
                    self.tiles[index] = part;
                } else {
                    self.tiles.push(part);
                }
            }
        }
    }
}

/// Tokens of one tile of about `rows` rows.
fn tile_tokens(rows: usize, group: usize) -> usize {
    (rows / group).max(1)
}

/// Causal attention of all spans over their blocks, for the q that [`rope_append`] left in the scratch.
///
/// `out` is `[tokens][heads * head_dim]`; rows of tokens in no span are left as they are.
///
/// # Panics
/// If a span lies outside the step or its block table, or a block outside the cache.
pub fn attention(
    pool: &Pool,
    kv: &KvCache,
    layer: usize,
    spans: &[Span],
    block_tables: &[u32],
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    attention_with(Isa::selected(), pool, kv, layer, spans, block_tables, scratch, out);
}

/// [`attention`] at a given level; [`rope_append_with`] must have run at the same one.
#[allow(clippy::too_many_arguments)]
pub fn attention_with(
    isa: Isa,
    pool: &Pool,
    kv: &KvCache,
    layer: usize,
    spans: &[Span],
    block_tables: &[u32],
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    attention_on(AttentionKernels::get(isa, kv.kind()), pool, kv, layer, spans, block_tables, scratch, out);
}

/// [`attention`] with kernels of choice.
#[allow(clippy::too_many_arguments)]
fn attention_on(
    kernels: &'static AttentionKernels,
    pool: &Pool,
    kv: &KvCache,
    layer: usize,
    spans: &[Span],
    block_tables: &[u32],
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let (heads, kv_heads, head_dim) = (scratch.heads, kv.kv_heads(), kv.head_dim());
    scratch.expect_shape(scratch.tokens, heads, kv_heads, head_dim);
    assert_eq!(out.len(), scratch.tokens * heads * head_dim, "out must be [tokens][heads * head_dim]");
    assert!(pool.threads() <= scratch.threads, "the scratch was made for fewer threads");
    for span in spans {
        assert!(
            (span.token_start + span.token_len) as usize <= scratch.tokens,
            "a span lies outside the step: {span:?}"
        );
        assert!(span.token_len <= span.context_len, "a span has more new tokens than context: {span:?}");
        let table = &block_tables[span.table_start as usize..][..span.table_len as usize];
        let used = (span.context_len as usize).div_ceil(BLOCK_TOKENS);
        assert!(used <= table.len(), "a span's block table is too short: {span:?}");
        assert!(table[..used].iter().all(|&b| (b as usize) < kv.num_blocks()), "a block is not in the cache: {span:?}");
    }
    scratch.plan(spans, pool.threads(), kernels.tile_rows);
    let group = heads / kv_heads;
    let (rows_max, tokens) = (tile_tokens(TILE_ROWS_MAX, group) * group, scratch.tokens);
    let work = SharedMut::new(&mut scratch.work);
    let partials = SharedMut::new(&mut scratch.partials);
    let driver = Driver {
        kernels,
        widen: (kv.kind() == KvKind::Int8).then(|| Widen::get(Isa::selected())),
        kv,
        layer,
        block_tables,
        q: scratch.q.as_ptr().cast::<u8>(),
        out: SharedMut::new(out),
        partials,
        tokens,
        heads,
        group,
        head_dim,
    };
    let driver = &driver;
    let (tiles, threads) = (&scratch.tiles, pool.threads());
    let work_of = move |thread: usize| {
        // SAFETY: thread < pool.threads() <= scratch.threads, and the pool never runs a thread's jobs at once.
        unsafe { Work::new(work.get().add(thread * Work::floats(rows_max, head_dim)), rows_max, head_dim) }
    };
    pool.run(tiles.len(), &|index, thread| {
        // With tiles of one length, this is what the thread will most likely get next.
        driver.run(&tiles[index], tiles.get(index + threads), &work_of(thread));
    });
    let merges = &scratch.merges;
    pool.run(merges.len(), &|index, thread| driver.merge(&merges[index], &work_of(thread)));
}

/// Sums of some rows: `o / sum` is the attention's result.
#[derive(Debug, Clone, Copy)]
struct Sums {
    max: *mut f32,
    sum: *mut f32,
    o: *mut f32,
}

/// One thread's working memory.
#[derive(Debug)]
struct Work {
    scores: *mut f32,
    p: *mut u8,
    correction: *mut f32,
    valid: *mut u32,
    /// K or V of a chunk in bf16, where the cache has 8 bits.
    widened: *mut u8,
    /// Segments merged so far, and the one being computed.
    merged: Sums,
    segment: Sums,
}

impl Work {
    /// Row states are padded to a cache line, so that threads share none.
    fn padded(rows: usize) -> usize {
        rows.next_multiple_of(16)
    }

    fn floats(rows: usize, head_dim: usize) -> usize {
        rows * CHUNK * 2 + 2 * rows * head_dim + 6 * Self::padded(rows) + CHUNK * head_dim / 2
    }

    /// # Safety
    /// `at` starts `floats(rows, head_dim)` floats that only this thread uses.
    unsafe fn new(at: *mut f32, rows: usize, head_dim: usize) -> Work {
        let mut next = at;
        let mut take = |floats: usize| {
            let start = next;
            // SAFETY: the parts add up to `floats`.
            next = unsafe { next.add(floats) };
            start
        };
        let state = Self::padded(rows);
        Work {
            scores: take(rows * CHUNK),
            p: take(rows * CHUNK).cast(),
            merged: Sums { o: take(rows * head_dim), max: take(state), sum: take(state) },
            segment: Sums { o: take(rows * head_dim), max: take(state), sum: take(state) },
            correction: take(state),
            valid: take(state).cast(),
            widened: take(CHUNK * head_dim / 2).cast(),
        }
    }
}

/// What all tiles of one call share.
struct Driver<'a> {
    kernels: &'static AttentionKernels,
    /// For 8-bit blocks.
    widen: Option<Widen>,
    kv: &'a KvCache,
    layer: usize,
    block_tables: &'a [u32],
    q: *const u8,
    out: SharedMut<f32>,
    partials: SharedMut<f32>,
    tokens: usize,
    heads: usize,
    group: usize,
    head_dim: usize,
}

// SAFETY: `q` is only read; `out` and `partials` are written in parts that belong to one tile each.
unsafe impl Sync for Driver<'_> {}

impl Driver<'_> {
    /// Computes a tile: the whole of it into `out`, or one segment into the partial results. `then` is fetched at the end.
    fn run(&self, tile: &Tile, then: Option<&Tile>, work: &Work) {
        let rows = tile.tokens as usize * self.group;
        if let Some(around) = self.kernels.around {
            // SAFETY: the level is available.
            unsafe { (around.enter)(rows) };
        }
        self.segments(tile, rows, then, work);
        if let Some(around) = self.kernels.around {
            // SAFETY: as above.
            unsafe { (around.leave)() };
        }
    }

    fn segments(&self, tile: &Tile, rows: usize, then: Option<&Tile>, work: &Work) {
        if tile.partial != WHOLE {
            let sums = self.partial(tile.partial as usize, rows);
            self.segment(tile, tile.segments.0 as usize, then, work, sums);
            return;
        }
        self.segment(tile, 0, then, work, work.merged);
        for segment in 1..tile.segments.1 as usize {
            self.segment(tile, segment, then, work, work.segment);
            // SAFETY: both have `rows` rows and belong to this thread.
            unsafe { self.add(rows, work.merged, work.segment) };
        }
        self.finish(tile, work.merged);
    }

    /// Merges the segments of a split tile in order, exactly as [`Driver::run`] does.
    fn merge(&self, tile: &Tile, _: &Work) {
        let rows = tile.tokens as usize * self.group;
        let merged = self.partial(tile.partial as usize, rows);
        for segment in 1..tile.segments.1 as usize {
            let next = self.partial(tile.partial as usize + segment * rows, rows);
            // SAFETY: partial results of this tile, all computed; no other merge touches them.
            unsafe { self.add(rows, merged, next) };
        }
        self.finish(tile, merged);
    }

    fn partial(&self, row: usize, rows: usize) -> Sums {
        let start = self.partials.get();
        // SAFETY: `plan` handed out rows below `partial_rows`; each has head_dim + 2 floats.
        unsafe {
            let o = start.add(row * (self.head_dim + 2));
            let max = o.add(rows * self.head_dim);
            Sums { o, max, sum: max.add(rows) }
        }
    }

    /// The softmax and the sums over one segment's keys, from scratch.
    fn segment(&self, tile: &Tile, segment: usize, then: Option<&Tile>, work: &Work, sums: Sums) {
        let (group, head_dim, rows) = (self.group, self.head_dim, tile.tokens as usize * self.group);
        let lane = self.kv.lane(self.layer, tile.kv_head as usize);
        let table = &self.block_tables[tile.table_start as usize..];
        let first_row = (tile.kv_head as usize * self.tokens + tile.token as usize) * group;
        let operand = self.kernels.operand.bytes();
        // SAFETY: the tile's tokens lie inside the step, so its rows lie inside q; `sums` has `rows` rows.
        let q = unsafe {
            for row in 0..rows {
                sums.max.add(row).write(NO_SCORE);
                sums.sum.add(row).write(0.0);
            }
            std::slice::from_raw_parts_mut(sums.o, rows * head_dim).fill(0.0);
            self.q.add(first_row * head_dim * operand)
        };
        let end = tile.keys().min((segment + 1) * SEGMENT);
        for start in (segment * SEGMENT..end).step_by(CHUNK) {
            let count = (end - start).min(CHUNK).div_ceil(BLOCK_TOKENS);
            let (keys, mut values) = self.blocks(lane, table, start, count);
            let next = start + CHUNK;
            if next < tile.keys().min(tile.segments.1 as usize * SEGMENT) {
                self.fetch(tile, next, &mut values);
            } else if let Some(then) = then {
                self.fetch(then, then.segments.0 as usize * SEGMENT, &mut values);
            }
            // SAFETY: every array has `rows` rows; `count` blocks of each part are in the cache.
            unsafe {
                for row in 0..rows {
                    let seen = tile.position as usize + row / group + 1;
                    work.valid.add(row).write(seen.saturating_sub(start).min(CHUNK) as u32);
                }
                let keys = self.widen.map_or(keys, |widen| self.widened(widen.keys, &keys, work));
                (self.kernels.scores)(rows, q, &keys, work.scores);
                let (max, sum, correction, valid) = (sums.max, sums.sum, work.correction, work.valid);
                let state = SoftmaxRows { max, sum, correction, valid };
                (self.kernels.softmax)(rows, count, work.scores, work.p, &state);
                let values = self.widen.map_or(values, |widen| self.widened(widen.values, &values, work));
                (self.kernels.values)(rows, work.p, &values, correction, sums.o);
            }
        }
    }

    /// K and V blocks of the chunk at `start`; V is fetched while K is multiplied.
    fn blocks(&self, lane: Lane, table: &[u32], start: usize, count: usize) -> (Blocks, Blocks) {
        let none = [std::ptr::null(); CHUNK_BLOCKS];
        let mut keys = Blocks { count, head_dim: self.head_dim, at: none, ahead: none };
        let mut values = keys;
        for i in 0..count {
            let at = table[start / BLOCK_TOKENS + i] as usize * lane.stride;
            // SAFETY: the table's blocks are in the cache (checked by `attention`).
            unsafe {
                keys.at[i] = lane.k.add(at);
                values.at[i] = lane.v.add(at);
            }
            keys.ahead[i] = values.at[i];
        }
        (keys, values)
    }

    /// 8-bit blocks in bf16, in this thread's scratch, until the next call. What is to be fetched is fetched by this walk.
    ///
    /// # Safety
    /// The blocks are in the cache; `work` is this thread's.
    unsafe fn widened(&self, widen: int8::WidenFn, blocks: &Blocks, work: &Work) -> Blocks {
        let mut wide = Blocks { ahead: [std::ptr::null(); CHUNK_BLOCKS], ..*blocks };
        // SAFETY: the scratch has room for a chunk of bf16 blocks; the level is one this CPU has.
        unsafe {
            widen(blocks, work.widened);
            for index in 0..blocks.count {
                wide.at[index] = work.widened.add(index * BLOCK_TOKENS * self.head_dim * 2);
            }
        }
        wide
    }

    /// Has K of the chunk at `start` fetched while V is multiplied.
    fn fetch(&self, tile: &Tile, start: usize, values: &mut Blocks) {
        let lane = self.kv.lane(self.layer, tile.kv_head as usize);
        let count = (tile.keys() - start).min(CHUNK).div_ceil(BLOCK_TOKENS);
        let table = &self.block_tables[tile.table_start as usize + start / BLOCK_TOKENS..][..count];
        for (ahead, &block) in values.ahead.iter_mut().zip(table) {
            *ahead = lane.k.wrapping_add(block as usize * lane.stride);
        }
    }

    /// `a += b`, two results of consecutive key ranges.
    ///
    /// # Safety
    /// Both have `rows` rows and nobody else uses them.
    unsafe fn add(&self, rows: usize, a: Sums, b: Sums) {
        for row in 0..rows {
            // SAFETY: row < rows.
            unsafe {
                let (a_max, b_max) = (*a.max.add(row), *b.max.add(row));
                let max = a_max.max(b_max);
                let (a_scale, b_scale) = ((a_max - max).exp2(), (b_max - max).exp2());
                *a.max.add(row) = max;
                *a.sum.add(row) = *a.sum.add(row) * a_scale + *b.sum.add(row) * b_scale;
                let a = std::slice::from_raw_parts_mut(a.o.add(row * self.head_dim), self.head_dim);
                let b = std::slice::from_raw_parts(b.o.add(row * self.head_dim), self.head_dim);
                a.iter_mut().zip(b).for_each(|(a, b)| *a = *a * a_scale + b * b_scale);
            }
        }
    }

    /// Writes the rows' results.
    fn finish(&self, tile: &Tile, sums: Sums) {
        let head_dim = self.head_dim;
        for row in 0..tile.tokens as usize * self.group {
            let token = tile.token as usize + row / self.group;
            let head = tile.kv_head as usize * self.group + row % self.group;
            // SAFETY: the token is in the step; every (token, head) belongs to one tile.
            unsafe {
                let out = self.out.part((token * self.heads + head) * head_dim, head_dim);
                let o = std::slice::from_raw_parts(sums.o.add(row * head_dim), head_dim);
                let scale = 1.0 / *sums.sum.add(row);
                // `+ 0.0` makes one zero of two: a masked product may leave -0.0 where a shorter walk leaves 0.0.
                out.iter_mut().zip(o).for_each(|(out, o)| *out = o * scale + 0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests;
