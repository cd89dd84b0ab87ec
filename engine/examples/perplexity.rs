//! What does a weight kind cost in quality? Perplexity of a text, per weight kind, in windows of `--context` tokens.
//!
//! `perplexity MODEL IDS [--kinds bf16,bf16-kv8,int8-ag,...] [--context 512] [--tokens N] [--threads N]`, kinds as
//! `WeightPlan::parse` reads them. IDS is a file of token ids separated by
//! white space (the engine knows no text). The first token of each window is context only. Prints perplexity and its ratio
//! to the first kind of the list.

use ernie_engine::model::{Calibration, WeightPlan};
use ernie_engine::runner::cpu::CpuRunner;
use ernie_engine::runner::options::LoadOptions;
use ernie_engine::runner::{BatchSequence, ModelRunner, Row, SampleRow, StepBatch, Want};
use ernie_engine::self_text;
use ernie_kernels::sample::log_sum_exp;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `self:TOKENS`: what the model writes by itself; else a file of token ids, a sequence a line.
fn sample(model: &Path, source: &str) -> Result<Calibration, String> {
    let Some(tokens) = source.strip_prefix("self:") else {
        return Ok(Calibration::new(read_lines(Path::new(source))?));
    };
    let tokens = tokens.parse::<usize>().map_err(|e| format!("{source}: {e}"))?;
    let options = LoadOptions { max_model_len: Some(512), memory_bytes: 20 << 30, ..LoadOptions::new(model) };
    let runner = CpuRunner::load(&options, &mut |_| {}).map_err(|e| e.to_string())?;
    let start = std::time::Instant::now();
    let sample = self_text::sample(runner, tokens, 1, &mut |_| {}).map_err(|e| e.to_string())?;
    println!("{} tokens written by the model itself in {:.1} s", sample.tokens(), start.elapsed().as_secs_f64());
    Ok(sample)
}

fn read_ids(file: &Path) -> Result<Vec<u32>, String> {
    Ok(read_lines(file)?.concat())
}

fn read_lines(file: &Path) -> Result<Vec<Vec<u32>>, String> {
    let content = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let id = |word: &str| word.parse::<u32>().map_err(|e| format!("{word}: {e}"));
    content.lines().map(|line| line.split_whitespace().map(id).collect()).collect()
}

fn main() -> Result<(), String> {
    let mut given = std::env::args().skip(1);
    let model = PathBuf::from(given.next().ok_or("which model folder?")?);
    let text = PathBuf::from(given.next().ok_or("which file of token ids?")?);
    let (mut kinds, mut context, mut most, mut threads) = ("bf16,int8,int4g128".to_owned(), 512, usize::MAX, 0);
    let mut calibration = None;
    while let (Some(flag), Some(value)) = (given.next(), given.next()) {
        let number = || value.parse::<usize>().map_err(|e| format!("{flag} {value}: {e}"));
        match flag.as_str() {
            "--kinds" => kinds = value,
            "--context" => context = number()?,
            "--tokens" => most = number()?,
            "--calibrate" => calibration = Some(Arc::new(sample(&model, &value)?)),
            "--threads" => threads = number()?,
            _ => return Err(format!("{flag} is not known")),
        }
    }
    let mut ids = read_ids(&text)?;
    ids.truncate(most);
    println!("{} tokens of {} in windows of {context}", ids.len(), text.display());
    let mut first = None;
    for kind in kinds.split(',') {
        let plan = WeightPlan::parse(kind).ok_or_else(|| format!("{kind} is no weight kind"))?;
        let options = LoadOptions {
            plan: Some(plan),
            max_model_len: Some(context as u32),
            max_num_batched_tokens: context as u32,
            max_num_seqs: 32,
            memory_bytes: 20 << 30,
            threads,
            calibration: calibration.clone().filter(|_| plan.linear.is_quantized()),
            ..LoadOptions::new(&model)
        };
        let start = std::time::Instant::now();
        let mut runner = CpuRunner::load(&options, &mut |_| {}).map_err(|e| e.to_string())?;
        let loaded = start.elapsed().as_secs_f64();
        let weights = runner.report().weights_bytes >> 20;
        let perplexity = perplexity(&mut runner, &ids, context)?;
        let base = *first.get_or_insert(perplexity);
        println!(
            "{kind:>16}  {weights:>6} MiB  loaded in {loaded:>5.1} s  perplexity {perplexity:.4}  {:+.3} %",
            100.0 * (perplexity / base - 1.0)
        );
    }
    Ok(())
}

fn perplexity(runner: &mut CpuRunner, ids: &[u32], context: usize) -> Result<f64, String> {
    let (mut loss, mut count) = (0.0, 0);
    let table: Vec<u32> = (0..context.div_ceil(16) as u32).collect();
    for window in ids.chunks(context).filter(|w| w.len() > 1) {
        let len = window.len() as u32;
        let step = StepBatch {
            tokens: window.to_vec(),
            positions: (0..len).collect(),
            slots: (0..len).collect(),
            sequences: vec![BatchSequence {
                token_start: 0,
                token_len: len,
                context_len: len,
                table_start: 0,
                table_len: len.div_ceil(16),
            }],
            block_tables: table.clone(),
            sample_rows: (0..len - 1).map(|token| SampleRow { token, want: Want::Logits }).collect(),
            copies: Vec::new(),
        };
        runner.execute(&step).map_err(|e| e.to_string())?;
        for (i, &next) in window[1..].iter().enumerate() {
            let Row::Logits(row) = runner.row(i) else { return Err("logits were wanted".to_owned()) };
            loss += f64::from(log_sum_exp(row)) - f64::from(row[next as usize]);
            count += 1;
        }
    }
    Ok((loss / f64::from(count)).exp())
}
