//! How fast is the engine alone? Like llama-batched-bench: every sequence gets random tokens of the same number, all prefill, then
//! all decode greedily for a number of steps.
//!
//! `bench_runner MODEL [--kind bf16] [--batch 1,8,16,32] [--prompt 128] [--new 64] [--threads N] [--ops]`, the kind as
//! `WeightPlan::parse` reads it, prints load time, resident memory, prefill and decode tokens/s, and with `--ops` where the
//! time of a step goes.

use ernie_engine::model::{Observer, Op, WeightPlan};
use ernie_engine::runner::cpu::{CpuRunner, LoadPhase};
use ernie_engine::runner::options::LoadOptions;
use ernie_engine::runner::{BatchSequence, ModelRunner, Row, SampleRow, StepBatch, Want};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

struct Arguments {
    options: LoadOptions,
    batches: Vec<usize>,
    prompt: usize,
    new: usize,
    ops: bool,
}

fn arguments() -> Result<Arguments, String> {
    let mut given = std::env::args().skip(1);
    let model = given.next().ok_or("which model folder?")?;
    let mut a = Arguments {
        options: LoadOptions { memory_bytes: 20 << 30, pin: false, ..LoadOptions::new(model) },
        batches: vec![1, 8, 16, 32],
        prompt: 128,
        new: 64,
        ops: false,
    };
    while let Some(flag) = given.next() {
        if flag == "--ops" {
            a.ops = true;
            continue;
        }
        let value = given.next().ok_or_else(|| format!("{flag} needs a value"))?;
        let number = || value.parse::<usize>().map_err(|e| format!("{flag} {value}: {e}"));
        match (flag.as_str(), value.as_str()) {
            ("--kind", name) => {
                let plan = WeightPlan::parse(name).ok_or_else(|| format!("{name} is no weight kind"))?;
                a.options.plan = Some(plan);
            }
            ("--batch", list) => {
                a.batches =
                    list.split(',').map(|b| b.parse().map_err(|e| format!("{b}: {e}"))).collect::<Result<_, _>>()?;
            }
            ("--prompt", _) => a.prompt = number()?,
            ("--new", _) => a.new = number()?,
            ("--threads", _) => a.options.threads = number()?,
            _ => return Err(format!("{flag} {value} is not known")),
        }
    }
    Ok(a)
}

/// Time per operation.
struct Times {
    last: Instant,
    spent: BTreeMap<Op, Duration>,
}

impl Observer for Times {
    fn after(&mut self, op: Op) {
        let now = Instant::now();
        *self.spent.entry(op).or_default() += now - self.last;
        self.last = now;
    }
}

fn resident_mib() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        let line = status.lines().find(|l| l.starts_with(name)).unwrap_or("0");
        line.split_whitespace().find_map(|w| w.parse::<u64>().ok()).unwrap_or(0) / 1024
    };
    (field("VmRSS:"), field("VmHWM:"))
}

/// GB/s of all threads reading memory together: the ceiling of a decode step at this moment.
fn bandwidth(threads: usize) -> f64 {
    let bytes = 256 << 20;
    let buffers: Vec<Vec<u64>> = (0..threads).map(|t| vec![t as u64 + 1; bytes / 8]).collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for buffer in &buffers {
            scope.spawn(move || std::hint::black_box(buffer.iter().fold(0u64, |a, b| a ^ b)));
        }
    });
    (threads * bytes) as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn main() -> Result<(), String> {
    let mut a = arguments()?;
    let most = a.batches.iter().copied().max().unwrap_or(1);
    let blocks = most * (a.prompt + a.new).div_ceil(16);
    a.options.max_model_len = Some((a.prompt + a.new) as u32);
    a.options.max_num_seqs = most as u32;
    a.options.max_num_batched_tokens = a.options.max_num_batched_tokens.max(a.prompt as u32);
    let start = Instant::now();
    let mut phases = Vec::new();
    let mut runner = CpuRunner::load(&a.options, &mut |p| {
        if phases.last().is_none_or(|(phase, _)| *phase != p.phase) {
            phases.push((p.phase, start.elapsed()));
        }
    })
    .map_err(|e| e.to_string())?;
    let loaded = start.elapsed();
    let packed = phases.iter().find(|p| p.0 == LoadPhase::Allocate).map_or(loaded, |p| p.1);
    let (now, peak) = resident_mib();
    let r = runner.report();
    println!(
        "{} {} on {} with {} threads: loaded in {:.2} s (weights {:.2} s); weights {} MiB, workspace {} MiB, kv {} MiB; \
         resident {now} MiB, peak {peak} MiB",
        r.config.architecture,
        r.weights,
        r.isa,
        r.threads,
        loaded.as_secs_f64(),
        packed.as_secs_f64(),
        r.weights_bytes >> 20,
        r.workspace_bytes >> 20,
        r.kv_bytes >> 20
    );
    if (runner.limits().num_blocks as usize) < blocks {
        return Err(format!("{} KV blocks, {blocks} are needed", runner.limits().num_blocks));
    }
    let threads = runner.report().threads;
    println!("memory read before: {:.1} GB/s", bandwidth(threads));
    for &batch in &a.batches {
        measure(&mut runner, &a, batch)?;
    }
    println!("memory read after: {:.1} GB/s", bandwidth(threads));
    Ok(())
}

fn measure(runner: &mut CpuRunner, a: &Arguments, sequences: usize) -> Result<(), String> {
    let vocab = runner.limits().vocab_size;
    let per_sequence = (a.prompt + a.new).div_ceil(16);
    let budget = runner.limits().max_num_batched_tokens as usize;
    let mut step = StepBatch::default();
    let add = |step: &mut StepBatch, s: usize, from: usize, ids: &[u32], sample: bool| {
        let first = (s * per_sequence) as u32;
        step.sequences.push(BatchSequence {
            token_start: step.tokens.len() as u32,
            token_len: ids.len() as u32,
            context_len: (from + ids.len()) as u32,
            table_start: step.block_tables.len() as u32,
            table_len: per_sequence as u32,
        });
        step.block_tables.extend(first..first + per_sequence as u32);
        for (i, &id) in ids.iter().enumerate() {
            step.tokens.push(id);
            step.positions.push((from + i) as u32);
            step.slots.push(first * 16 + (from + i) as u32);
        }
        if sample {
            step.sample_rows.push(SampleRow { token: step.tokens.len() as u32 - 1, want: Want::Greedy });
        }
    };
    let mut times = Times { last: Instant::now(), spent: BTreeMap::new() };
    // Every sequence has a text of its own: with the same one, all would be sent to the same experts.
    let mut state = 0x2545_f491_u32;
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % vocab
    };
    let prompts: Vec<Vec<u32>> = (0..sequences).map(|_| (0..a.prompt).map(|_| token()).collect()).collect();
    let mut last = vec![0u32; sequences];
    let start = Instant::now();
    let per_step = (budget / a.prompt).max(1);
    for group in (0..sequences).collect::<Vec<_>>().chunks(per_step) {
        step.clear();
        group.iter().for_each(|&s| add(&mut step, s, 0, &prompts[s], true));
        times.last = Instant::now();
        runner.execute_observed(&step, &mut times).map_err(|e| e.to_string())?;
        for (i, &s) in group.iter().enumerate() {
            if let Row::Greedy { token, .. } = runner.row(i) {
                last[s] = token;
            }
        }
    }
    let prefill = start.elapsed();
    let prefill_ops = std::mem::take(&mut times.spent);
    let start = Instant::now();
    let mut best = Duration::MAX;
    for n in 0..a.new - 1 {
        step.clear();
        (0..sequences).for_each(|s| add(&mut step, s, a.prompt + n, &[last[s]], true));
        let begin = Instant::now();
        times.last = begin;
        runner.execute_observed(&step, &mut times).map_err(|e| e.to_string())?;
        for (s, last) in last.iter_mut().enumerate() {
            if let Row::Greedy { token, .. } = runner.row(s) {
                *last = token;
            }
        }
        best = best.min(begin.elapsed());
    }
    let decode = start.elapsed();
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
    println!(
        "batch {sequences:>3}: prefill {:>7.1} tok/s, decode {:>7.1} tok/s (best step {:>7.1}), both {:>7.1} tok/s of output",
        rate(sequences * a.prompt, prefill),
        rate(sequences * (a.new - 1), decode),
        rate(sequences, best),
        rate(sequences * a.new, prefill + decode)
    );
    if a.ops {
        show("prefill", &prefill_ops);
        show("decode", &times.spent);
    }
    Ok(())
}

fn show(what: &str, spent: &BTreeMap<Op, Duration>) {
    let total: Duration = spent.values().sum();
    let heavy = [Op::Qkv, Op::Attention, Op::AttentionOut, Op::Experts, Op::GateUp, Op::Down, Op::Head];
    let share = |d: Duration| 100.0 * d.as_secs_f64() / total.as_secs_f64().max(1e-9);
    let in_heavy: Duration = spent.iter().filter(|(op, _)| heavy.contains(op)).map(|(_, d)| *d).sum();
    print!("    {what}: GEMM and attention {:.1} %:", share(in_heavy));
    for (op, d) in spent {
        print!(" {op:?} {:.1}", share(*d));
    }
    println!();
}
