//! What does verifying cost a load, and what does preparing save?
//!
//! `bench_load DIR [PREPARED] [--rounds 5] [--cold] [--threads N]`: loads a sealed folder, and its prepared form, with and
//! without comparing digests, in turns; prints the fastest, the median and the ratio of the fastest, and what one SHA-256 stream of the largest file takes.
//! `--cold` drops the files from the page cache before each load (`posix_fadvise`); the file system's own caches stay.
//! A load here is `CpuRunner::load` with a small KV cache: open, read, pack or map, hash, allocate, warm up.

use ernie_engine::model::Manifest;
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::LoadOptions;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn main() {
    let mut folders = Vec::new();
    let (mut rounds, mut cold, mut threads) = (5, false, 0);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|n| n.parse().ok()).expect("a number follows");
        match word.as_str() {
            "--rounds" => rounds = number(),
            "--threads" => threads = number(),
            "--cold" => cold = true,
            _ => folders.push(PathBuf::from(word)),
        }
    }
    assert!(!folders.is_empty(), "bench_load DIR [PREPARED] [--rounds N] [--cold] [--threads N]");
    let cases: Vec<(String, LoadOptions)> = folders
        .iter()
        .flat_map(|dir| {
            let options = LoadOptions {
                kv_cache_bytes: Some(64 << 20),
                max_model_len: Some(1024),
                max_num_batched_tokens: 256,
                max_num_seqs: 8,
                memory_bytes: 16 << 30,
                threads,
                ..LoadOptions::new(dir)
            };
            let verified = LoadOptions { verify: Some(manifest(dir)), ..options.clone() };
            let name = dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            [(format!("{name}, unverified"), options), (format!("{name}, verified"), verified)]
        })
        .collect();
    let mut times = vec![Vec::new(); cases.len()];
    let mut streams = Vec::new();
    for round in 0..=rounds {
        for (i, (_, options)) in cases.iter().enumerate() {
            let taken = load(options, cold);
            // The first round warms caches and is not counted.
            if round > 0 {
                times[i].push(taken);
            }
        }
        if round > 0 {
            streams.push(stream(&folders[0], cold));
        }
    }
    println!(
        "{rounds} rounds in turns, {} page cache, {} threads asked for",
        if cold { "cold" } else { "warm" },
        threads
    );
    println!("{:<40} {:>9} {:>9}", "", "fastest", "median");
    let sorted: Vec<Vec<f64>> = times.into_iter().map(sorted).collect();
    for (i, (name, _)) in cases.iter().enumerate() {
        // Each verified load against the unverified one of the same folder.
        let ratio = sorted[i][0] / sorted[i / 2 * 2][0];
        println!("{name:<40} {:7.3} s {:7.3} s   {ratio:5.2} x", sorted[i][0], middle(&sorted[i]));
    }
    let streams = self::sorted(streams);
    println!("{:<40} {:7.3} s {:7.3} s", "one SHA-256 stream of the largest file", streams[0], middle(&streams));
}

fn load(options: &LoadOptions, cold: bool) -> Duration {
    if cold {
        drop_cache(&options.model_dir);
    }
    let began = Instant::now();
    let runner = CpuRunner::load(options, &mut |_| {}).expect("the model loads");
    let taken = began.elapsed();
    drop(runner);
    taken
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a folder");
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.sort_by_key(|path| std::cmp::Reverse(path.metadata().map_or(0, |m| m.len())));
    files
}

fn drop_cache(dir: &Path) {
    for path in files(dir) {
        let file = std::fs::File::open(path).expect("readable");
        // Only clean pages can be dropped.
        file.sync_all().expect("synced");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
    }
}

fn stream(dir: &Path, cold: bool) -> Duration {
    if cold {
        drop_cache(dir);
    }
    let mut file = std::fs::File::open(&files(dir)[0]).expect("readable");
    let (mut buffer, mut hash) = (vec![0; 256 << 10], Sha256::new());
    let began = Instant::now();
    loop {
        match file.read(&mut buffer).expect("readable") {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    std::hint::black_box(hash.finalize());
    began.elapsed()
}

fn manifest(dir: &Path) -> Manifest {
    let text = std::fs::read_to_string(dir.join("SHA256SUMS")).expect("a sealed folder: `ernie-ctl model seal DIR`");
    let digests = text.lines().filter_map(|line| {
        let (digest, name) = line.split_once("  ")?;
        let byte = |i: usize| u8::from_str_radix(&digest[2 * i..2 * i + 2], 16).expect("hex");
        Some((name.to_owned(), std::array::from_fn(byte)))
    });
    Manifest { digests: digests.collect() }
}

fn sorted(mut times: Vec<Duration>) -> Vec<f64> {
    times.sort();
    times.iter().map(Duration::as_secs_f64).collect()
}

fn middle(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
}
