//! What the kernels reach on this machine: each operation's rate and its share of the roof, which is measured in the same
//! run (arithmetic peak of the level, and plain reading by all threads). `ernied bench-kernels` and the example print it.
//!
//! Weights are walked over many distinct matrices, as a model does, so that no cache flatters a rate.

mod attention;
mod scan;

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::act::Acts;
use crate::gemm::{Out, gemm};
use crate::isa::Isa;
use crate::matrix::{Arrange, Matrix, RowSource, WeightKind};
use crate::memory::AlignedBuf;
use crate::table::KernelTable;
use crate::threads::Pool;

/// Bytes of weights that a benchmark walks: several times any cache.
const WALK_BYTES: usize = 192 << 20;
/// Time spent on each figure.
const TIME_EACH: Duration = Duration::from_millis(250);

/// Shapes of the 0.3B model: name, N, K.
const SHAPES: [(&str, usize, usize, Arrange); 5] = [
    ("l2", 128, 1024, Arrange::Concat),
    ("qkv", 2560, 1024, Arrange::Concat),
    ("gate_up", 6144, 1024, Arrange::GateUp),
    ("down", 1024, 3072, Arrange::Concat),
    ("o", 1024, 2048, Arrange::Concat),
];
const KINDS: [(&str, WeightKind); 7] = [
    ("f32", WeightKind::F32),
    ("bf16", WeightKind::Bf16),
    ("int8", WeightKind::Int8),
    ("int8-g128", WeightKind::Int8Group { group: 128 }),
    ("int4-g128", WeightKind::Int4 { group: 128, zero_point: false }),
    ("int4-g32", WeightKind::Int4 { group: 32, zero_point: false }),
    ("int4-g128-zp", WeightKind::Int4 { group: 128, zero_point: true }),
];
const ROWS: [usize; 8] = [1, 4, 8, 16, 32, 64, 128, 256];

/// Measures every operation that all words of `filter` name (part of "kind shape", or `m` and the rows, or with `=` the whole
/// of one of these), and returns the table. The word `cached` uses one matrix only: the kernels without memory.
pub fn run(filter: &str) -> String {
    run_with(&Pool::new(0, true), Isa::selected(), filter)
}

/// The same with a pool and a level of choice. Panics when the CPU lacks the level.
pub fn run_with(pool: &Pool, isa: Isa, filter: &str) -> String {
    let mut words: Vec<&str> = filter.split_whitespace().collect();
    let cached = words.contains(&"cached");
    words.retain(|&word| word != "cached");
    let mut text = String::new();
    let peaks = Peaks::measure(pool, isa);
    let _ = writeln!(text, "level {isa}, {} threads; plain read {:.1} GB/s before", pool.threads(), peaks.read);
    let _ = writeln!(
        text,
        "arithmetic peak: f32 {:.0} GFLOP/s, bf16 {:.0}, int8 {:.0} GOP/s, int4 {:.0}",
        peaks.f32, peaks.bf16, peaks.int8, peaks.int4
    );
    let _ = writeln!(
        text,
        "{:<13} {:<8} {:>5} {:>10} {:>9} {:>8} {:>7} {:>10}",
        "weights", "shape", "rows", "us", "GOP/s", "GB/s", "of roof", "convert us"
    );
    for (kind_name, kind) in KINDS {
        for (shape, n, k, arrange) in SHAPES {
            let wanted = |rows: usize| {
                let (line, rows) = (format!("{kind_name} {shape}"), format!("m{rows}"));
                words.iter().all(|word| {
                    let exact = word.strip_prefix('=');
                    exact.map_or_else(
                        || line.contains(word) || rows == *word,
                        |exact| kind_name == exact || shape == exact || rows == exact,
                    )
                })
            };
            if !ROWS.into_iter().any(wanted) {
                continue;
            }
            let walk = Walk::new(pool, kind, n, k, arrange, cached);
            for rows in ROWS.into_iter().filter(|&rows| wanted(rows)) {
                let found = walk.measure(pool, isa, rows);
                let operations = 2.0 * (rows * n * k) as f64;
                let bytes = walk.matrices[0].bytes() as f64;
                let roof = f64::max(operations / (peaks.of(kind) * 1e9), bytes / (peaks.read * 1e9));
                let _ = writeln!(
                    text,
                    "{kind_name:<13} {shape:<8} {rows:>5} {:>10.1} {:>9.0} {:>8.1} {:>6.0}% {:>10.1}",
                    found.gemm * 1e6,
                    operations / found.gemm / 1e9,
                    bytes / found.gemm / 1e9,
                    100.0 * roof / found.gemm,
                    found.convert * 1e6,
                );
            }
        }
    }
    text.push_str(&attention::run(pool, isa, &peaks, &words, cached));
    text.push_str(&scan::run(pool, isa, &peaks, &words));
    let _ = writeln!(text, "plain read {:.1} GB/s after", read_rate(pool));
    text
}

struct Walk {
    matrices: Vec<Matrix>,
}

struct Found {
    gemm: f64,
    convert: f64,
}

impl Walk {
    fn new(pool: &Pool, kind: WeightKind, n: usize, k: usize, arrange: Arrange, cached: bool) -> Walk {
        let mut state = 0x9e37_79b9_u32;
        let bytes: Vec<u8> = (0..n * k)
            .flat_map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                half::bf16::from_f32((state >> 8) as f32 / 16_777_216.0 - 0.5).to_le_bytes()
            })
            .collect();
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let parts = match arrange {
            Arrange::Concat => vec![RowSource::Bf16(&bytes)],
            Arrange::GateUp => vec![RowSource::Bf16(first), RowSource::Bf16(second)],
        };
        let pack = || Matrix::pack(pool, kind, k, &parts, arrange).expect("benchmark shapes can be packed");
        let first = pack();
        let count = if cached { 1 } else { (WALK_BYTES / first.bytes()).clamp(4, 64) };
        let mut matrices = vec![first];
        for _ in 1..count {
            let copy = matrices[0].copied();
            matrices.push(copy);
        }
        Walk { matrices }
    }

    /// Median seconds of one product and of one conversion.
    fn measure(&self, pool: &Pool, isa: Isa, rows: usize) -> Found {
        let (n, k, kind) = (self.matrices[0].n(), self.matrices[0].k(), self.matrices[0].act_kind());
        let mut acts = Acts::with_isa(isa, rows, k);
        let mut next = Acts::with_isa(isa, rows, n);
        let src: Vec<f32> = (0..rows * k).map(|i| ((i % 251) as f32 - 125.0) / 125.0).collect();
        let mut out = vec![0f32; rows * n];
        let (mut gemms, mut converts) = (Vec::new(), Vec::new());
        pool.step_begin();
        let begin = Instant::now();
        while begin.elapsed() < TIME_EACH || gemms.len() < 3 {
            for w in &self.matrices {
                let start = Instant::now();
                acts.convert(pool, kind, rows, k, &src);
                let converted = Instant::now();
                match w.arrange() {
                    Arrange::Concat => gemm(pool, &acts, w, Out::Store(&mut out)),
                    Arrange::GateUp => gemm(pool, &acts, w, Out::SiluMul { acts: &mut next, kind, turn: None }),
                }
                converts.push((converted - start).as_secs_f64());
                gemms.push(converted.elapsed().as_secs_f64());
            }
        }
        pool.step_end();
        black_box(&out);
        Found { gemm: median(&mut gemms), convert: median(&mut converts) }
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The roofs of this moment.
#[derive(Clone, Copy, Debug)]
pub struct Peaks {
    /// Fused multiply-adds in f32, GFLOP/s over all threads.
    pub f32: f64,
    /// Products of bf16 weights in the level's own way.
    pub bf16: f64,
    /// Products of 8-bit codes.
    pub int8: f64,
    /// Products of 4-bit codes.
    pub int4: f64,
    /// Plain sequential reading of memory, GB/s over all threads.
    pub read: f64,
}

impl Peaks {
    /// Measures the level's arithmetic out of registers, and reading.
    pub fn measure(pool: &Pool, isa: Isa) -> Peaks {
        let peaks = KernelTable::of(isa).peaks;
        let rate = |run: crate::table::PeakFn| {
            let per_thread = std::sync::Mutex::new(0f64);
            pool.step_begin();
            pool.run(pool.threads(), &|_, _| {
                let mut best = 0f64;
                for _ in 0..12 {
                    let start = Instant::now();
                    // SAFETY: the level is available, or `of` would have refused.
                    let operations = unsafe { run() };
                    best = best.max(operations / start.elapsed().as_secs_f64());
                }
                *per_thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += best / 1e9;
            });
            pool.step_end();
            per_thread.into_inner().unwrap_or_default()
        };
        Peaks {
            f32: rate(peaks.f32),
            bf16: rate(peaks.bf16),
            int8: rate(peaks.int8),
            int4: rate(peaks.int4),
            read: read_rate(pool),
        }
    }

    fn of(&self, kind: WeightKind) -> f64 {
        match kind {
            WeightKind::F32 => self.f32,
            WeightKind::Bf16 => self.bf16,
            WeightKind::Int8 | WeightKind::Int8Group { .. } => self.int8,
            WeightKind::Int4 { .. } => self.int4,
        }
    }
}

/// Plain reading by all threads, GB/s: the median of a few passes over a buffer beyond the caches.
pub fn read_rate(pool: &Pool) -> f64 {
    const CHUNK: usize = 4 << 20;
    let mut buf = AlignedBuf::<u64>::zeroed(WALK_BYTES / 8);
    buf.fill(1);
    let chunks = WALK_BYTES / CHUNK;
    let mut times: Vec<f64> = (0..7)
        .map(|_| {
            let start = Instant::now();
            pool.run(chunks, &|chunk, _| {
                let part = &buf[chunk * (CHUNK / 8)..(chunk + 1) * (CHUNK / 8)];
                let mut sums = [0u64; 16];
                for line in part.as_chunks::<16>().0 {
                    for (sum, &value) in sums.iter_mut().zip(line) {
                        *sum ^= value;
                    }
                }
                black_box(sums);
            });
            start.elapsed().as_secs_f64()
        })
        .collect();
    WALK_BYTES as f64 / median(&mut times) / 1e9
}
