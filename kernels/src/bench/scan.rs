//! Rates of sampling's scans and of the router, against plain reading of what they read.

use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};

use super::{Peaks, median};
use crate::isa::Isa;
use crate::moe::Routing;
use crate::ops::route_with;
use crate::sample::{argmax_with, log_sum_exp_with, top_k_with};
use crate::threads::Pool;

const VOCABULARY: usize = 103_424;
/// Rows of logits, walked in turn: a decoding batch's.
const ROWS: usize = 32;
const TIME_EACH: Duration = Duration::from_millis(150);

/// Measures every line that all words are part of, like "sample top-50" or "route 64x2560 m16".
pub(super) fn run(pool: &Pool, isa: Isa, roofs: &Peaks, words: &[&str]) -> String {
    let mut text = String::new();
    let wanted = |line: &str| words.iter().all(|word| line.contains(word));
    let mut logits = Vec::new();
    if SAMPLERS.iter().any(|(name, _)| wanted(name)) {
        logits = numbers(ROWS * VOCABULARY);
    }
    for (name, work) in SAMPLERS {
        if wanted(name) {
            let mut found = Vec::new();
            let seconds = timed(|| {
                logits.chunks_exact(VOCABULARY).for_each(|row| work(isa, row, &mut found));
            }) / ROWS as f64;
            let rate = VOCABULARY as f64 * 4.0 / seconds / 1e9;
            let _ = writeln!(text, "{name:<28} {:>8.1} us a row on one thread, {rate:>6.1} GB/s", seconds * 1e6);
        }
    }
    for (experts, hidden, top_k) in [(64, 2560, 6), (32, 1024, 4)] {
        for rows in [1, 16, 256] {
            let line = format!("route {experts}x{hidden} m{rows}");
            if wanted(&line) {
                let (x, gate, bias) = (numbers(rows * hidden), numbers(experts * hidden), vec![0.0; experts]);
                let mut routing = Routing { experts: Vec::new(), weights: Vec::new(), top_k };
                pool.step_begin();
                let seconds = timed(|| route_with(isa, pool, rows, &x, &gate, &bias, 1e-12, &mut routing));
                pool.step_end();
                let rate = 2.0 * (rows * experts * hidden) as f64 / seconds / 1e9;
                let share = 100.0 * rate / roofs.f32;
                let _ =
                    writeln!(text, "{line:<28} {:>8.1} us, {rate:>6.0} GFLOP/s, {share:.0}% of peak", seconds * 1e6);
            }
        }
    }
    text
}

type Sampler = fn(Isa, &[f32], &mut Vec<(u32, f32)>);

const SAMPLERS: [(&str, Sampler); 5] = [
    ("sample argmax", |isa, row, _| {
        black_box(argmax_with(isa, row));
    }),
    ("sample log-sum-exp", |isa, row, _| {
        black_box(log_sum_exp_with(isa, row));
    }),
    ("sample top-20", |isa, row, found| top_k_with(isa, row, 20, found)),
    ("sample top-50", |isa, row, found| top_k_with(isa, row, 50, found)),
    ("sample top-1000", |isa, row, found| top_k_with(isa, row, 1000, found)),
];

/// Sums of uniform numbers: about normal, like logits.
fn numbers(len: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / 16_777_216.0 - 0.5
    };
    (0..len).map(|_| 4.0 * (next() + next() + next() + next())).collect()
}

/// Median seconds of a call.
fn timed(mut work: impl FnMut()) -> f64 {
    let mut times = Vec::new();
    let begin = Instant::now();
    while begin.elapsed() < TIME_EACH || times.len() < 3 {
        let start = Instant::now();
        work();
        times.push(start.elapsed().as_secs_f64());
    }
    median(&mut times)
}
