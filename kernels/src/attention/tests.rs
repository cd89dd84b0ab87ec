//! Every level against a naive f64 softmax, and the promise of batch invariance bit by bit.

use super::*;
use crate::kv::KvKind;
use crate::rope::rope_append_on;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// A model shape.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Shape {
    fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn out_width(&self) -> usize {
        self.heads * self.head_dim
    }
}

const LAYERS: usize = 2;
const LAYER: usize = 1;

/// Kernels under test and what to call them.
struct Level {
    name: String,
    kernels: &'static AttentionKernels,
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

/// Multiply-adds that a case may take in emulation, where each is a call.
const EMULATED_WORK: usize = 1 << 22;

/// What this CPU has, and on x86-64 the 512-bit kernels in emulation unless that takes too long.
fn levels(kind: KvKind, shape: Shape, lengths: &[usize]) -> Vec<Level> {
    let pairs: usize = lengths.iter().map(|l| l * l).sum();
    let emulate = pairs * shape.out_width() <= EMULATED_WORK;
    let native = Isa::all_available().map(|isa| (isa.to_string(), AttentionKernels::get(isa, kind)));
    #[cfg(target_arch = "x86_64")]
    let wide: &[(&str, &'static AttentionKernels)] = match kind {
        KvKind::F32 => &[("emulated", &emulated::F32)],
        KvKind::Bf16 | KvKind::Int8 => &[("emulated", &emulated::WIDENED), ("emulated bf16", &emulated::BF16)],
    };
    #[cfg(not(target_arch = "x86_64"))]
    let wide: &[(&str, &'static AttentionKernels)] = &[];
    let wide = wide.iter().filter(|_| emulate).map(|(name, kernels)| (name.to_string(), *kernels));
    native.chain(wide).map(|(name, kernels)| Level { name, kernels }).collect()
}

/// The 512-bit kernels' code with vectors in plain arrays, and fewer tile sizes: they take long to compile.
#[cfg(target_arch = "x86_64")]
mod emulated {
    use crate::attention::kernels::{AttentionKernels, Operand};
    use crate::attention::vector::{Dotted, Float, Widened, attention_level};
    use crate::emulated::Wide;

    attention_level!(F32, F32Level, , Wide, Float, F32, pack_block_f32, tiles: [1 => [4, 2, 1], 2 => [2, 1], 3 => [1]]);
    attention_level!(WIDENED, WidenedLevel, , Wide, Widened, F32, pack_block_bf16, tiles: [1 => [2, 1], 2 => [1]]);
    attention_level!(
        BF16, Bf16Level, , Wide, Dotted, Bf16, pack_block_bf16,
        tiles: [1 => [8, 2, 1], 2 => [2, 1], 3 => [2, 1]]
    );
}

/// Sequences' q|k|v rows by token, made up once.
fn rows(shape: Shape, tokens: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    (0..tokens * shape.width()).map(|_| rng.random_range(-1.5f32..1.5)).collect()
}

/// Runs sequences through the cache in given portions and collects each token's output.
struct Bench {
    kernels: &'static AttentionKernels,
    shape: Shape,
    pool: Pool,
    rope: RopeTable,
    kv: KvCache,
    scratch: AttentionScratch,
    tables: Vec<Vec<u32>>,
    done: Vec<usize>,
    outputs: Vec<Vec<f32>>,
}

impl Bench {
    /// Blocks are handed out in random order, and hold rubbish from earlier owners.
    fn new(
        level: &Level,
        kind: KvKind,
        shape: Shape,
        lengths: &[usize],
        threads: usize,
        rng: &mut ChaCha8Rng,
    ) -> Bench {
        let needed: usize = lengths.iter().map(|l| l.div_ceil(BLOCK_TOKENS)).sum();
        let mut kv = KvCache::new(kind, LAYERS, shape.kv_heads, shape.head_dim, needed + 3);
        let rubbish = vec![0xff; KvCache::bytes_per_block(kind, LAYERS, shape.kv_heads, shape.head_dim)];
        (0..kv.num_blocks() as u32).for_each(|block| kv.import_block(block, &rubbish));
        let mut blocks: Vec<u32> = (0..kv.num_blocks() as u32).collect();
        blocks.shuffle(rng);
        let tables = lengths.iter().map(|l| blocks.drain(..l.div_ceil(BLOCK_TOKENS)).collect()).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let total = lengths.iter().sum();
        Bench {
            kernels: level.kernels,
            shape,
            pool: Pool::new(threads, false),
            rope: RopeTable::new(shape.head_dim, 500_000.0, longest),
            kv,
            scratch: AttentionScratch::new(threads, total, shape.heads, shape.kv_heads, shape.head_dim),
            tables,
            done: vec![0; lengths.len()],
            outputs: vec![Vec::new(); lengths.len()],
        }
    }

    /// One step: `portion[i]` next tokens of sequence i.
    fn step(&mut self, sequences: &[Vec<f32>], portions: &[(usize, usize)]) {
        let (mut qkv, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut spans, mut tables) = (Vec::new(), Vec::new());
        for &(sequence, count) in portions {
            let done = self.done[sequence];
            let width = self.shape.width();
            spans.push(Span {
                token_start: positions.len() as u32,
                token_len: count as u32,
                context_len: (done + count) as u32,
                table_start: tables.len() as u32,
                table_len: self.tables[sequence].len() as u32,
            });
            qkv.extend_from_slice(&sequences[sequence][done * width..(done + count) * width]);
            for position in done..done + count {
                positions.push(position as u32);
                let block = self.tables[sequence][position / BLOCK_TOKENS];
                slots.push(block * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32);
            }
            tables.extend_from_slice(&self.tables[sequence]);
            self.done[sequence] += count;
        }
        let mut out = vec![f32::NAN; positions.len() * self.shape.out_width()];
        rope_append_on(
            self.kernels,
            &self.pool,
            &mut self.kv,
            LAYER,
            &qkv,
            &positions,
            &slots,
            &self.rope,
            &mut self.scratch,
            self.shape.heads,
        );
        attention_on(self.kernels, &self.pool, &self.kv, LAYER, &spans, &tables, &mut self.scratch, &mut out);
        for (span, &(sequence, count)) in spans.iter().zip(portions) {
            let width = self.shape.out_width();
            self.outputs[sequence].extend_from_slice(&out[span.token_start as usize * width..][..count * width]);
        }
    }

    /// A whole sequence alone in one step.
    fn whole(mut self, sequences: &[Vec<f32>]) -> Vec<Vec<f32>> {
        for sequence in 0..sequences.len() {
            let tokens = sequences[sequence].len() / self.shape.width();
            self.step(sequences, &[(sequence, tokens)]);
        }
        self.outputs
    }
}

/// Rotation as the reference model writes it, in f64.
fn rotated(row: &[f32], position: usize) -> Vec<f64> {
    let head_dim = row.len();
    let mut out = vec![0.0; head_dim];
    for i in 0..head_dim / 2 {
        let angle = position as f64 * 500_000f64.powf(-2.0 * i as f64 / head_dim as f64);
        let (x, y) = (f64::from(row[2 * i]), f64::from(row[2 * i + 1]));
        out[2 * i] = x * angle.cos() - y * angle.sin();
        out[2 * i + 1] = y * angle.cos() + x * angle.sin();
    }
    out
}

/// Attention of a whole sequence by the book.
fn oracle(shape: Shape, qkv: &[f32]) -> Vec<f64> {
    let Shape { heads, kv_heads, head_dim } = shape;
    let tokens = qkv.len() / shape.width();
    let part = |token: usize, index: usize| &qkv[token * shape.width() + index * head_dim..][..head_dim];
    let mut out = Vec::new();
    let keys: Vec<Vec<Vec<f64>>> =
        (0..kv_heads).map(|h| (0..tokens).map(|t| rotated(part(t, heads + h), t)).collect()).collect();
    for token in 0..tokens {
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let q = rotated(part(token, head), token);
            let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (head_dim as f64).sqrt();
            let scores: Vec<f64> = keys[kv_head][..=token].iter().map(|k| dot(k)).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = p.iter().sum();
            for d in 0..head_dim {
                let value: f64 =
                    p.iter().enumerate().map(|(t, p)| p * f64::from(part(t, heads + kv_heads + kv_head)[d])).sum();
                out.push(value / sum);
            }
        }
    }
    out
}

fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    let size: f64 = want.iter().map(|w| w * w).sum();
    (error / size).sqrt()
}

fn bits(outputs: &[Vec<f32>]) -> Vec<Vec<u32>> {
    outputs.iter().map(|o| o.iter().map(|x| x.to_bits()).collect()).collect()
}

const KINDS: [KvKind; 3] = [KvKind::F32, KvKind::Bf16, KvKind::Int8];

/// How far from exact a kind may be.
fn bound(kind: KvKind) -> f64 {
    match kind {
        KvKind::F32 => 2e-6,
        KvKind::Bf16 => 6e-3,
        KvKind::Int8 => 1.2e-2,
    }
}

#[test]
fn every_level_agrees_with_a_plain_softmax() {
    let shapes = [(2, 1, 16), (4, 2, 64), (16, 2, 128), (5, 1, 128), (3, 3, 32), (7, 1, 64), (6, 1, 96), (20, 4, 128)];
    for (heads, kv_heads, head_dim) in shapes {
        let shape = Shape { heads, kv_heads, head_dim };
        for tokens in [1, 15, 17, 130, 275] {
            let mut rng = ChaCha8Rng::seed_from_u64(tokens as u64);
            let sequences = [rows(shape, tokens, &mut rng)];
            let want = oracle(shape, &sequences[0]);
            for kind in KINDS {
                for isa in levels(kind, shape, &[tokens]) {
                    let bench = Bench::new(&isa, kind, shape, &[tokens], 1, &mut rng);
                    let got = bench.whole(&sequences);
                    let error = relative_error(&got[0], &want);
                    assert!(error < bound(kind), "{isa} {kind:?} {shape:?} {tokens} tokens: relative error {error:e}");
                }
            }
        }
    }
}

#[test]
fn a_long_context_is_the_same_split_over_threads_or_not() {
    let shape = Shape { heads: 4, kv_heads: 1, head_dim: 16 };
    let tokens = 2 * SEGMENT + 77;
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let sequences = [rows(shape, tokens, &mut rng)];
    for kind in KINDS {
        for isa in levels(kind, shape, &[tokens]) {
            let mut alone = Bench::new(&isa, kind, shape, &[tokens], 1, &mut rng);
            alone.step(&sequences, &[(0, tokens - 40)]);
            alone.step(&sequences, &[(0, 40)]);
            for threads in [2, 3] {
                let mut split = Bench::new(&isa, kind, shape, &[tokens], threads, &mut rng);
                split.step(&sequences, &[(0, tokens - 40)]);
                for _ in 0..39 {
                    split.step(&sequences, &[(0, 1)]);
                    assert!(!split.scratch.merges.is_empty(), "a single long sequence is split");
                }
                split.step(&sequences, &[(0, 1)]);
                assert_eq!(bits(&alone.outputs), bits(&split.outputs), "{isa} {kind:?} {threads} threads");
            }
            let want = oracle(shape, &sequences[0]);
            let error = relative_error(&alone.outputs[0], &want);
            assert!(error < bound(kind), "{isa} {kind:?}: {error:e}");
        }
    }
}

#[test]
fn keys_of_an_earlier_owner_do_not_reach_the_result() {
    // Bench fills all blocks with NaN patterns first; one token per step leaves most of a block untouched.
    let shape = Shape { heads: 2, kv_heads: 1, head_dim: 64 };
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let sequences = [rows(shape, 20, &mut rng)];
    for kind in KINDS {
        for isa in levels(kind, shape, &[20]) {
            let mut bench = Bench::new(&isa, kind, shape, &[20], 1, &mut rng);
            for _ in 0..20 {
                bench.step(&sequences, &[(0, 1)]);
            }
            assert!(bench.outputs[0].iter().all(|x| x.is_finite()), "{isa} {kind:?}");
        }
    }
}

#[test]
fn rows_of_zeros_give_the_mean_of_v_and_broken_rows_stay_their_own() {
    let shape = Shape { heads: 4, kv_heads: 2, head_dim: 64 };
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let tokens = 40;
    let mut clean = rows(shape, tokens, &mut rng);
    // Token 7 asks nothing: all keys weigh the same.
    clean[7 * shape.width()..][..shape.out_width()].fill(0.0);
    let mut broken = clean.clone();
    broken[9 * shape.width()..][..shape.out_width()].fill(f32::NAN);
    for kind in KINDS {
        for isa in levels(kind, shape, &[tokens]) {
            let good = Bench::new(&isa, kind, shape, &[tokens], 1, &mut rng).whole(std::slice::from_ref(&clean));
            let bad = Bench::new(&isa, kind, shape, &[tokens], 1, &mut rng).whole(std::slice::from_ref(&broken));
            assert!(relative_error(&good[0], &oracle(shape, &clean)) < bound(kind).max(6e-3), "{isa} {kind:?}");
            for (token, (g, b)) in good[0].chunks(shape.out_width()).zip(bad[0].chunks(shape.out_width())).enumerate() {
                if token == 9 {
                    assert!(b.iter().all(|x| x.is_nan()), "{isa} {kind:?}: a NaN query is not hidden");
                } else {
                    assert_eq!(g, b, "{isa} {kind:?} token {token}");
                }
            }
        }
    }
}

#[test]
fn q_and_k_are_rotated_in_neighbouring_pairs() {
    let rope = RopeTable::new(4, 500_000.0, 10);
    let mut out = [0f32; 4];
    // SAFETY: all three are 4 long.
    unsafe { (AttentionKernels::get(Isa::Scalar, KvKind::F32).rotate)(&[1.0, 0.0, 0.0, 2.0], rope.at(3), &mut out) };
    let slow = 3.0 * 500_000f64.powf(-0.5);
    let want = [3f64.cos(), 3f64.sin(), -2.0 * slow.sin(), 2.0 * slow.cos()];
    for (got, want) in out.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() < 1e-6, "{out:?} {want:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random sequences, portions, companies and block tables: every token's bits are those of its sequence alone.
    #[test]
    fn a_tokens_bits_do_not_depend_on_chunking_company_or_blocks(
        seed in any::<u64>(),
        shape in prop_oneof![
            Just((2usize, 1usize, 16usize)), Just((8, 1, 128)), Just((16, 2, 64)), Just((5, 1, 64)), Just((3, 1, 16)),
            Just((4, 4, 32)), Just((6, 1, 128)), Just((7, 1, 16)), Just((10, 1, 64)),
        ],
        lengths in prop::collection::vec(1usize..300, 1..4),
        threads in 1usize..3,
    ) {
        let shape = Shape { heads: shape.0, kv_heads: shape.1, head_dim: shape.2 };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let sequences: Vec<Vec<f32>> = lengths.iter().map(|&l| rows(shape, l, &mut rng)).collect();
        for kind in KINDS {
            for isa in levels(kind, shape, &lengths) {
                let alone = Bench::new(&isa, kind, shape, &lengths, 1, &mut rng).whole(&sequences);
                let mut mixed = Bench::new(&isa, kind, shape, &lengths, threads, &mut rng);
                while mixed.done != lengths {
                    let mut portions: Vec<(usize, usize)> = (0..lengths.len())
                        .filter_map(|i| {
                            let left = lengths[i] - mixed.done[i];
                            if left == 0 || rng.random_bool(0.2) {
                                return None;
                            }
                            let most = if rng.random_bool(0.3) { 1 } else { 150 };
                            Some((i, rng.random_range(1..=most.min(left))))
                        })
                        .collect();
                    portions.shuffle(&mut rng);
                    if !portions.is_empty() {
                        mixed.step(&sequences, &portions);
                    }
                }
                prop_assert_eq!(bits(&alone), bits(&mixed.outputs), "{} {:?}", isa, kind);
            }
        }
    }
}
