//! Attention's rates: decode against plain reading of the KV bytes, prefill against the arithmetic peak.

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use super::{Peaks, median};
use crate::attention::{AttentionScratch, RopeTable, Span, attention_with, rope_append_with};
use crate::isa::Isa;
use crate::kv::{BLOCK_TOKENS, KvCache, KvKind};
use crate::threads::Pool;

/// KV bytes that a decode benchmark walks, layer by layer: several times any cache.
const WALK_BYTES: usize = 200 << 20;
const TIME_EACH: Duration = Duration::from_millis(300);

/// Heads of a model: name, heads, KV heads, head_dim.
const SHAPES: [(&str, usize, usize, usize); 3] = [("0.3b", 16, 2, 128), ("21b", 20, 4, 128), ("135m", 9, 3, 64)];
/// Sequences and their context in a decode step.
const DECODES: [(usize, usize); 5] = [(1, 128), (1, 512), (1, 8192), (16, 512), (16, 4096)];
/// New tokens and context before them in a prefill step.
const PREFILLS: [(usize, usize); 4] = [(128, 0), (512, 0), (2048, 0), (512, 4096)];

/// Measures every line that all words are part of, like "attention decode 0.3b bf16 16x512 consecutive".
pub(super) fn run(pool: &Pool, isa: Isa, roofs: &Peaks, words: &[&str], cached: bool) -> String {
    let walk = if cached { 0 } else { WALK_BYTES };
    let mut text = String::new();
    let wanted = |line: &str| words.iter().all(|word| line.contains(word));
    for (name, heads, kv_heads, head_dim) in SHAPES {
        for (kind_name, kind, peak) in
            [("bf16", KvKind::Bf16, roofs.bf16), ("int8", KvKind::Int8, roofs.bf16), ("f32", KvKind::F32, roofs.f32)]
        {
            for (sequences, context) in DECODES {
                for (order, shuffled) in [("consecutive", false), ("random", true)] {
                    let line = format!("attention decode {name} {kind_name} {sequences}x{context} {order}");
                    if wanted(&line) {
                        let mut case =
                            Case::new(pool, walk, kind, (heads, kv_heads, head_dim), sequences, context, shuffled);
                        let seconds = case.measure(pool, isa, heads, 1);
                        let bytes = (sequences * context * kv_heads * head_dim * 2 * kind.element_bytes()) as f64;
                        let flops = (sequences * context * heads * head_dim * 4) as f64;
                        report(&mut text, &line, seconds, flops, bytes, peak, roofs.read);
                    }
                }
            }
            for (tokens, before) in PREFILLS {
                let line = format!("attention prefill {name} {kind_name} {tokens}+{before}");
                if wanted(&line) {
                    let mut case = Case::new(pool, walk, kind, (heads, kv_heads, head_dim), 1, before + tokens, false);
                    let seconds = case.measure(pool, isa, heads, tokens);
                    let pairs = tokens * before + tokens * (tokens + 1) / 2;
                    let bytes = ((before + tokens) * kv_heads * head_dim * 2 * kind.element_bytes()) as f64;
                    report(&mut text, &line, seconds, (pairs * heads * head_dim * 4) as f64, bytes, peak, roofs.read);
                }
            }
        }
    }
    text
}

fn report(text: &mut String, line: &str, seconds: (f64, f64), flops: f64, bytes: f64, peak: f64, read: f64) {
    let (attention, append) = seconds;
    let roof = (flops / (peak * 1e9)).max(bytes / (read * 1e9));
    let _ = writeln!(
        text,
        "{line:<52} {:>9.1} us {:>7.0} GFLOP/s {:>6.1} GB/s {:>4.0}% of roof; rope+append {:.1} us",
        attention * 1e6,
        flops / attention / 1e9,
        bytes / attention / 1e9,
        100.0 * roof / attention,
        append * 1e6
    );
}

/// A cache with sequences in it.
struct Case {
    kv: KvCache,
    scratch: AttentionScratch,
    rope: RopeTable,
    spans: Vec<Span>,
    tables: Vec<u32>,
    width: usize,
    context: usize,
}

impl Case {
    fn new(
        pool: &Pool,
        walk_bytes: usize,
        kind: KvKind,
        (heads, kv_heads, head_dim): (usize, usize, usize),
        sequences: usize,
        context: usize,
        shuffled: bool,
    ) -> Case {
        let per_sequence = context.div_ceil(BLOCK_TOKENS);
        let blocks = sequences * per_sequence;
        let layer_bytes = blocks * KvCache::bytes_per_block(kind, 1, kv_heads, head_dim);
        let layers = walk_bytes.div_ceil(layer_bytes).clamp(1, 64);
        let mut kv = KvCache::new(kind, layers, kv_heads, head_dim, blocks);
        let mut state = 0x2545_f491_u32;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        // Small numbers of both signs: 0x3c00 to 0x3cff in bf16; scales of 0x3c..3c...
        let mut block = vec![0u8; KvCache::bytes_per_block(kind, layers, kv_heads, head_dim)];
        block.iter_mut().enumerate().for_each(|(i, byte)| *byte = if i % 2 == 1 { 0x3c } else { next() as u8 });
        (0..blocks as u32).for_each(|b| kv.import_block(b, &block));
        let mut tables: Vec<u32> = (0..blocks as u32).collect();
        if shuffled {
            (1..blocks).rev().for_each(|i| tables.swap(i, next() as usize % (i + 1)));
        }
        let spans = (0..sequences)
            .map(|i| Span {
                token_start: 0,
                token_len: 0,
                context_len: context as u32,
                table_start: (i * per_sequence) as u32,
                table_len: per_sequence as u32,
            })
            .collect();
        let scratch = AttentionScratch::new(pool.threads(), sequences.max(context), heads, kv_heads, head_dim);
        let rope = RopeTable::new(head_dim, 500_000.0, context);
        Case { kv, scratch, rope, spans, tables, width: (heads + 2 * kv_heads) * head_dim, context }
    }

    /// Median seconds of (attention, rope and append) with `tokens` new tokens per sequence.
    fn measure(&mut self, pool: &Pool, isa: Isa, heads: usize, tokens: usize) -> (f64, f64) {
        let (mut positions, mut slots) = (Vec::new(), Vec::new());
        for span in &mut self.spans {
            (span.token_start, span.token_len) = (positions.len() as u32, tokens as u32);
            for position in self.context - tokens..self.context {
                let block = self.tables[span.table_start as usize + position / BLOCK_TOKENS];
                positions.push(position as u32);
                slots.push(block * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32);
            }
        }
        let qkv: Vec<f32> = (0..positions.len() * self.width).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
        let mut out = vec![0f32; positions.len() * heads * self.kv.head_dim()];
        let (mut attentions, mut appends) = (Vec::new(), Vec::new());
        pool.step_begin();
        let begin = Instant::now();
        while begin.elapsed() < TIME_EACH || attentions.len() < 3 {
            for layer in 0..self.kv.layers() {
                let start = Instant::now();
                let (kv, scratch) = (&mut self.kv, &mut self.scratch);
                rope_append_with(isa, pool, kv, layer, &qkv, &positions, &slots, &self.rope, scratch, heads);
                let appended = Instant::now();
                attention_with(isa, pool, kv, layer, &self.spans, &self.tables, scratch, &mut out);
                attentions.push(appended.elapsed().as_secs_f64());
                appends.push((appended - start).as_secs_f64());
            }
        }
        pool.step_end();
        black_box(&out);
        (median(&mut attentions), median(&mut appends))
    }
}
