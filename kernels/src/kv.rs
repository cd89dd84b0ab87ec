//! The paged KV cache: where K and V of every layer, head and token lie.
//!
//! A block holds 16 tokens of one layer and KV head. K and V have a pool each, `[layer][kv_head][block]`, so that a sequence
//! with consecutive blocks is one sequential stream per head. Inside a block (kernels.md §5):
//!
//! | kind | K | V |
//! |---|---|---|
//! | `F32`  | `[head_dim][16 tokens]`        | `[16 tokens][head_dim]` |
//! | `Bf16` | `[head_dim / 2][16 tokens][2]` | `[8 token pairs][head_dim][2]` |
//! | `Int8` | as `Bf16`, a byte each, then 16 f32 scales, one per token | as `Bf16`, then 16 scales |
//!
//! Wide ones are rows of 64-byte lines that a kernel multiplies with one broadcast 32-bit operand. Which block belongs to whom is
//! not known here: the engine's block pool decides that.

use crate::attention::int8;
use crate::memory::AlignedBuf;

/// Tokens in one KV block.
pub const BLOCK_TOKENS: usize = 16;

/// How K and V are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvKind {
    F32,
    Bf16,
    /// Codes with a scale per token and head; computed with as bf16.
    Int8,
}

impl KvKind {
    /// Bytes of one K or V element, without scales.
    pub fn element_bytes(self) -> usize {
        match self {
            KvKind::F32 => 4,
            KvKind::Bf16 => 2,
            KvKind::Int8 => 1,
        }
    }

    /// `f32`, `bf16`, `int8`.
    pub fn name(self) -> &'static str {
        match self {
            KvKind::F32 => "f32",
            KvKind::Bf16 => "bf16",
            KvKind::Int8 => "int8",
        }
    }

    /// Bytes of the K (or V) of one block, layer and head.
    fn part_bytes(self, head_dim: usize) -> usize {
        let scales = if self == KvKind::Int8 { int8::SCALE_BYTES } else { 0 };
        BLOCK_TOKENS * head_dim * self.element_bytes() + scales
    }
}

/// K and V of all layers; one per runner.
#[derive(Debug)]
pub struct KvCache {
    kind: KvKind,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    num_blocks: usize,
    part_bytes: usize,
    k: AlignedBuf<u8>,
    v: AlignedBuf<u8>,
}

impl KvCache {
    /// Reserves the pools. The pages are zero and become resident when they are first written.
    ///
    /// # Panics
    /// If `head_dim` is not a multiple of 16.
    pub fn new(kind: KvKind, layers: usize, kv_heads: usize, head_dim: usize, num_blocks: usize) -> KvCache {
        assert!(head_dim > 0 && head_dim.is_multiple_of(16), "head_dim must be a multiple of 16, not {head_dim}");
        let part_bytes = kind.part_bytes(head_dim);
        let bytes = layers * kv_heads * num_blocks * part_bytes;
        let k = AlignedBuf::zeroed(bytes);
        let v = AlignedBuf::zeroed(bytes);
        KvCache { kind, layers, kv_heads, head_dim, num_blocks, part_bytes, k, v }
    }

    /// Bytes of one block over all layers and heads, K and V together.
    pub fn bytes_per_block(kind: KvKind, layers: usize, kv_heads: usize, head_dim: usize) -> usize {
        2 * layers * kv_heads * kind.part_bytes(head_dim)
    }

    pub fn kind(&self) -> KvKind {
        self.kind
    }

    pub fn layers(&self) -> usize {
        self.layers
    }

    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of both pools.
    pub fn bytes(&self) -> usize {
        self.k.len() + self.v.len()
    }

    /// Copies a whole block, every layer and head (copy-on-write).
    pub fn copy_block(&mut self, from: u32, to: u32) {
        let (part, num_blocks) = (self.part_bytes, self.num_blocks);
        let (from, to) = (self.checked(from), self.checked(to));
        for lane in 0..self.layers * self.kv_heads {
            let lane = lane * num_blocks;
            let source = (lane + from) * part..(lane + from + 1) * part;
            self.k.copy_within(source.clone(), (lane + to) * part);
            self.v.copy_within(source, (lane + to) * part);
        }
    }

    /// Writes a block's content to `out` (swap space): per layer and head K, then V.
    ///
    /// # Panics
    /// If `out` is not [`KvCache::bytes_per_block`] long.
    pub fn export_block(&self, block: u32, out: &mut [u8]) {
        let (part, block) = (self.part_bytes, self.checked(block));
        assert_eq!(out.len(), 2 * self.layers * self.kv_heads * part, "a block's export has another size");
        for (lane, out) in out.chunks_exact_mut(2 * part).enumerate() {
            let at = (lane * self.num_blocks + block) * part;
            out[..part].copy_from_slice(&self.k[at..at + part]);
            out[part..].copy_from_slice(&self.v[at..at + part]);
        }
    }

    /// Restores what [`KvCache::export_block`] wrote, into any block.
    ///
    /// # Panics
    /// If `from` is not [`KvCache::bytes_per_block`] long.
    pub fn import_block(&mut self, block: u32, from: &[u8]) {
        let (part, block, num_blocks) = (self.part_bytes, self.checked(block), self.num_blocks);
        assert_eq!(from.len(), 2 * self.layers * self.kv_heads * part, "a block's export has another size");
        for (lane, from) in from.chunks_exact(2 * part).enumerate() {
            let at = (lane * num_blocks + block) * part;
            self.k[at..at + part].copy_from_slice(&from[..part]);
            self.v[at..at + part].copy_from_slice(&from[part..]);
        }
    }

    fn checked(&self, block: u32) -> usize {
        assert!((block as usize) < self.num_blocks, "block {block} of {}", self.num_blocks);
        block as usize
    }

    /// The blocks of one layer and head.
    pub(crate) fn lane(&self, layer: usize, head: usize) -> Lane {
        let at = self.lane_start(layer, head);
        Lane { k: self.k[at..].as_ptr(), v: self.v[at..].as_ptr(), stride: self.part_bytes }
    }

    /// The blocks of one layer and head, to be written.
    pub(crate) fn lane_mut(&mut self, layer: usize, head: usize) -> LaneMut {
        let at = self.lane_start(layer, head);
        LaneMut { k: self.k[at..].as_mut_ptr(), v: self.v[at..].as_mut_ptr(), stride: self.part_bytes }
    }

    fn lane_start(&self, layer: usize, head: usize) -> usize {
        assert!(layer < self.layers && head < self.kv_heads, "layer {layer} head {head} is not in the cache");
        (layer * self.kv_heads + head) * self.num_blocks * self.part_bytes
    }
}

/// Raw view of one layer and head: block `b` starts at `b * stride` in both pools.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lane {
    pub(crate) k: *const u8,
    pub(crate) v: *const u8,
    pub(crate) stride: usize,
}

/// [`Lane`] for the writer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaneMut {
    pub(crate) k: *mut u8,
    pub(crate) v: *mut u8,
    pub(crate) stride: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(kind: KvKind) -> KvCache {
        let mut kv = KvCache::new(kind, 3, 2, 16, 5);
        let bytes = KvCache::bytes_per_block(kind, 3, 2, 16);
        for block in 0..5 {
            let content: Vec<u8> = (0..bytes).map(|i| (i * 7 + block * 31) as u8).collect();
            kv.import_block(block as u32, &content);
        }
        kv
    }

    #[test]
    fn a_copied_block_exports_the_same_bytes_and_leaves_the_others_alone() {
        for kind in [KvKind::F32, KvKind::Bf16, KvKind::Int8] {
            let mut kv = filled(kind);
            let before = filled(kind);
            kv.copy_block(1, 3);
            let bytes = KvCache::bytes_per_block(kind, 3, 2, 16);
            let (mut a, mut b) = (vec![0; bytes], vec![0; bytes]);
            for block in 0..5u32 {
                kv.export_block(block, &mut a);
                before.export_block(if block == 3 { 1 } else { block }, &mut b);
                assert_eq!(a, b, "block {block}");
            }
        }
    }

    #[test]
    fn the_pools_hold_what_a_block_is_said_to_cost() {
        let kv = KvCache::new(KvKind::Bf16, 18, 2, 128, 7);
        assert_eq!(kv.bytes(), 7 * KvCache::bytes_per_block(KvKind::Bf16, 18, 2, 128));
        assert_eq!(KvCache::bytes_per_block(KvKind::Bf16, 18, 2, 128), 16 * 18 * 2 * 128 * 2 * 2);
        let int8 = KvCache::new(KvKind::Int8, 18, 2, 128, 7);
        assert_eq!(int8.bytes(), 7 * 18 * 2 * 2 * (16 * 128 + 16 * 4), "codes, and a scale per token");
        assert!(int8.bytes() * 100 < kv.bytes() * 52, "8 bits take little more than half");
    }
}
