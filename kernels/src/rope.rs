//! Rotary position embedding (interleaved pairs) and the append of K and V to the cache.
//!
//! [`rope_append`] takes the fused q|k|v rows of a step, rotates q and k, writes k and v into their slots and leaves q in the
//! scratch in the form the attention kernels read. The arithmetic of a row depends on its position alone.

use crate::attention::AttentionScratch;
use crate::attention::int8;
use crate::attention::kernels::AttentionKernels;
use crate::isa::Isa;
use crate::kv::{BLOCK_TOKENS, KvCache, KvKind, LaneMut};
use crate::reference::attention::bf16_bits;
use crate::threads::{Pool, SharedMut};

/// Tokens that one job of [`rope_append`] takes; a job ends where a block ends.
const JOB_TOKENS: usize = 16;

/// Cosines and sines of every position, computed once.
#[derive(Debug)]
pub struct RopeTable {
    head_dim: usize,
    max_positions: usize,
    /// `[position][head_dim / 2][cos, sin]`
    cos_sin: Vec<f32>,
}

impl RopeTable {
    /// `angle = position * theta^(-2i / head_dim)`, rounded to f32 at each step as torch does, so that long positions agree.
    ///
    /// # Panics
    /// If `head_dim` is odd.
    pub fn new(head_dim: usize, theta: f32, max_positions: usize) -> Self {
        assert!(head_dim.is_multiple_of(2), "head_dim must be even, not {head_dim}");
        let frequencies: Vec<f32> = (0..head_dim / 2)
            .map(|i| 1.0 / f64::from(theta).powf(f64::from((2 * i) as f32 / head_dim as f32)) as f32)
            .collect();
        let mut cos_sin = Vec::with_capacity(max_positions * head_dim);
        for position in 0..max_positions {
            for frequency in &frequencies {
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                cos_sin.extend([cos as f32, sin as f32]);
            }
        }
        RopeTable { head_dim, max_positions, cos_sin }
    }

    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    pub fn bytes(&self) -> usize {
        self.cos_sin.len() * 4
    }

    /// Pairs (cos, sin) of one position, `head_dim` values.
    pub(crate) fn at(&self, position: u32) -> &[f32] {
        &self.cos_sin[position as usize * self.head_dim..][..self.head_dim]
    }
}

/// Rotates q and k of every token, appends k and v at its slot (`block * 16 + offset`), keeps q for
/// [`attention`](crate::attention::attention).
///
/// `qkv` is `[tokens][(heads + 2 * kv_heads) * head_dim]`, q first. Tokens of a sequence must be in ascending order. The first
/// token of a block clears the block, so that nothing an earlier owner left (a NaN, say) can be multiplied by a masked zero.
///
/// # Panics
/// If lengths disagree, a slot or a position is out of range, or the scratch was made for another shape.
#[allow(clippy::too_many_arguments)]
pub fn rope_append(
    pool: &Pool,
    kv: &mut KvCache,
    layer: usize,
    qkv: &[f32],
    positions: &[u32],
    slots: &[u32],
    rope: &RopeTable,
    scratch: &mut AttentionScratch,
    heads: usize,
) {
    rope_append_with(Isa::selected(), pool, kv, layer, qkv, positions, slots, rope, scratch, heads);
}

/// [`rope_append`] at a given level.
#[allow(clippy::too_many_arguments)]
pub fn rope_append_with(
    isa: Isa,
    pool: &Pool,
    kv: &mut KvCache,
    layer: usize,
    qkv: &[f32],
    positions: &[u32],
    slots: &[u32],
    rope: &RopeTable,
    scratch: &mut AttentionScratch,
    heads: usize,
) {
    let kernels = AttentionKernels::get(isa, kv.kind());
    rope_append_on(kernels, pool, kv, layer, qkv, positions, slots, rope, scratch, heads);
}

/// [`rope_append`] with kernels of choice.
#[allow(clippy::too_many_arguments)]
pub(crate) fn rope_append_on(
    kernels: &'static AttentionKernels,
    pool: &Pool,
    kv: &mut KvCache,
    layer: usize,
    qkv: &[f32],
    positions: &[u32],
    slots: &[u32],
    rope: &RopeTable,
    scratch: &mut AttentionScratch,
    heads: usize,
) {
    let tokens = positions.len();
    let (kv_heads, head_dim) = (kv.kv_heads(), kv.head_dim());
    let width = (heads + 2 * kv_heads) * head_dim;
    assert_eq!(qkv.len(), tokens * width, "qkv must be [tokens][(heads + 2 * kv_heads) * head_dim]");
    assert_eq!(slots.len(), tokens, "one slot per token");
    assert_eq!(rope.head_dim, head_dim, "the rope table is for another head_dim");
    assert!(positions.iter().all(|&p| (p as usize) < rope.max_positions), "a position is beyond the rope table");
    let slot_count = kv.num_blocks() * BLOCK_TOKENS;
    assert!(slots.iter().all(|&s| (s as usize) < slot_count), "a slot is beyond the cache");
    scratch.expect_shape(tokens, heads, kv_heads, head_dim);
    scratch.tokens = tokens;

    let job = AppendJob {
        kernels,
        kind: kv.kind(),
        heads,
        kv_heads,
        head_dim,
        tokens,
        lane: kv.lane_mut(layer, 0),
        lane_bytes: kv.lane_mut(layer, 0).stride * kv.num_blocks(),
        q: SharedMut::new(&mut scratch.q),
    };
    let jobs = tokens.div_ceil(JOB_TOKENS);
    pool.run(jobs, &|index, _| {
        let start = block_boundary(slots, index * JOB_TOKENS);
        let end = block_boundary(slots, ((index + 1) * JOB_TOKENS).min(tokens));
        job.run(start..end, qkv, positions, slots, rope);
    });
}

/// The first token at or after `at` that does not continue its predecessor's block: two jobs never write one block.
fn block_boundary(slots: &[u32], at: usize) -> usize {
    let block = |i: usize| slots[i] as usize / BLOCK_TOKENS;
    let mut at = at;
    while at > 0 && at < slots.len() && block(at) == block(at - 1) {
        at += 1;
    }
    at
}

struct AppendJob {
    kernels: &'static AttentionKernels,
    kind: KvKind,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    /// The layer's first head; the others follow `lane_bytes` apart.
    lane: LaneMut,
    lane_bytes: usize,
    q: SharedMut<f32>,
}

// SAFETY: jobs write different blocks and different rows of q.
unsafe impl Sync for AppendJob {}

impl AppendJob {
    fn run(&self, tokens: std::ops::Range<usize>, qkv: &[f32], positions: &[u32], slots: &[u32], rope: &RopeTable) {
        let mut token = tokens.start;
        while token < tokens.end {
            let block = slots[token] as usize / BLOCK_TOKENS;
            let mut end = token + 1;
            while end < tokens.end && slots[end] as usize / BLOCK_TOKENS == block {
                end += 1;
            }
            self.run_block(token..end, qkv, positions, slots, rope);
            token = end;
        }
    }

    /// All tokens of one block.
    fn run_block(
        &self,
        tokens: std::ops::Range<usize>,
        qkv: &[f32],
        positions: &[u32],
        slots: &[u32],
        rope: &RopeTable,
    ) {
        let (head_dim, group) = (self.head_dim, self.heads / self.kv_heads);
        let width = (self.heads + 2 * self.kv_heads) * head_dim;
        let block = slots[tokens.start] as usize / BLOCK_TOKENS;
        let fresh = (slots[tokens.start] as usize).is_multiple_of(BLOCK_TOKENS) && tokens.len() < BLOCK_TOKENS;
        let mut rotated = [0f32; BLOCK_TOKENS * MAX_HEAD_DIM];
        for head in 0..self.kv_heads {
            let (at, stride) = (head * self.lane_bytes + block * self.lane.stride, self.lane.stride);
            // SAFETY: layer, head and block are in range (checked by the caller); no other job writes this block.
            let lane = unsafe { LaneMut { k: self.lane.k.add(at), v: self.lane.v.add(at), stride } };
            if fresh {
                // SAFETY: as above; a block is `block_bytes` long in both pools.
                unsafe {
                    std::ptr::write_bytes(lane.k, 0, lane.stride);
                    std::ptr::write_bytes(lane.v, 0, lane.stride);
                }
            }
            // A span may visit a block's tokens out of a single run only when two sequences share it, which the engine
            // forbids; runs of at most 16 tokens are what the buffer holds.
            for run in chunk(tokens.clone(), BLOCK_TOKENS) {
                let count = run.len();
                for (i, token) in run.clone().enumerate() {
                    let row = &qkv[token * width..][..width];
                    let k = &row[(self.heads + head) * head_dim..][..head_dim];
                    let out = &mut rotated[i * head_dim..][..head_dim];
                    // SAFETY: all three are head_dim long; the level is one this CPU has.
                    unsafe { (self.kernels.rotate)(k, rope.at(positions[token]), out) };
                }
                let v = &qkv[run.start * width + (self.heads + self.kv_heads + head) * head_dim..];
                let offsets = slots[run.start] as usize % BLOCK_TOKENS;
                // A whole block is packed at once; codes are made token by token in any case.
                let whole = count == BLOCK_TOKENS && offsets == 0 && consecutive(&slots[run.clone()]);
                if whole && self.kind != KvKind::Int8 {
                    // SAFETY: a whole block; 16 rows of K lie in `rotated`, 16 rows of V in qkv `width` apart.
                    unsafe { (self.kernels.append_block)(head_dim, &rotated, v, width, lane.k, lane.v) };
                } else {
                    for (i, token) in run.enumerate() {
                        let offset = slots[token] as usize % BLOCK_TOKENS;
                        let k = &rotated[i * head_dim..][..head_dim];
                        // SAFETY: offset < 16, inside the block.
                        unsafe { append_token(self.kind, offset, k, &v[i * width..][..head_dim], lane) };
                    }
                }
            }
        }
        // 1/sqrt(head_dim) and log2(e) are folded into q: the softmax works with powers of two.
        let scale = (std::f64::consts::LOG2_E / (head_dim as f64).sqrt()) as f32;
        for token in tokens {
            let row = &qkv[token * width..][..width];
            for head in 0..self.heads {
                let at = ((head / group * self.tokens + token) * group + head % group) * head_dim;
                let q = &row[head * head_dim..][..head_dim];
                // SAFETY: `q` holds tokens * heads * head_dim operands; every (token, head) is written once; the level is one
                // this CPU has.
                unsafe {
                    let out = self.q.get().cast::<u8>().add(at * self.kernels.operand.bytes());
                    (self.kernels.rotate_q)(q, rope.at(positions[token]), scale, out);
                }
            }
        }
    }
}

/// Largest head_dim that [`rope_append`] has room for.
pub(crate) const MAX_HEAD_DIM: usize = 256;

fn chunk(range: std::ops::Range<usize>, size: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    range.clone().step_by(size).map(move |start| start..(start + size).min(range.end))
}

fn consecutive(slots: &[u32]) -> bool {
    slots.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

/// Writes one token of one head.
///
/// # Safety
/// `lane` points at a block of `head_dim` elements per token of this kind, which nobody else touches; `offset < 16`.
unsafe fn append_token(kind: KvKind, offset: usize, k: &[f32], v: &[f32], lane: LaneMut) {
    let head_dim = k.len();
    match kind {
        // SAFETY: handed on.
        KvKind::Int8 => unsafe { int8::append_token(offset, k, v, lane.k, lane.v) },
        KvKind::F32 => {
            let (to_k, to_v) = (lane.k.cast::<f32>(), lane.v.cast::<f32>());
            for d in 0..head_dim {
                // SAFETY: d < head_dim and offset < 16: inside the block.
                unsafe {
                    to_k.add(d * BLOCK_TOKENS + offset).write(k[d]);
                    to_v.add(offset * head_dim + d).write(v[d]);
                }
            }
        }
        KvKind::Bf16 => {
            let (to_k, to_v) = (lane.k.cast::<u32>(), lane.v.cast::<u16>());
            for pair in 0..head_dim / 2 {
                let low = bf16_bits(k[2 * pair]);
                let high = bf16_bits(k[2 * pair + 1]);
                // SAFETY: pair < head_dim / 2 and offset < 16: inside the block.
                unsafe { to_k.add(pair * BLOCK_TOKENS + offset).write(low | high << 16) };
            }
            for d in 0..head_dim {
                // SAFETY: as above.
                unsafe {
                    to_v.add((offset / 2 * head_dim + d) * 2 + offset % 2).write(bf16_bits(v[d]) as u16);
                }
            }
        }
    }
}
