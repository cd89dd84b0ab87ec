//! How much prompt a step may carry beside running answers, from what this machine does.
//!
//! A fixed number of tokens is a blink on one machine and a second of silence on another. Tokens do not depend on how a
//! prompt is cut, so the cut may follow a measurement.

use ernie_engine::runner::{BatchSequence, ModelRunner, RunnerError, SampleRow, StepBatch, Want};
use std::time::{Duration, Instant};

/// What the prompt tokens of a shared step should cost the answers that wait for it.
const TARGET: Duration = Duration::from_millis(50);
/// Tokens of the measured step: enough for the products to be computed as in a real one.
const PROBE_TOKENS: u32 = 64;
/// A second measurement, for want of a warm cache, is worth this much.
const AGAIN_BELOW: Duration = Duration::from_millis(250);
/// Chunks are whole numbers of KV blocks, so that none of them ends inside one.
const GRANULE: u32 = 16;

/// Share that a new observation has in the rate: steps differ in context length, and one may have been disturbed.
const WEIGHT: f64 = 1.0 / 16.0;

/// Prompt tokens for steps that carry answers as well, about [`TARGET`] of work.
#[derive(Debug)]
pub(super) struct Pace {
    /// `None`: the operator chose.
    tokens_per_second: Option<f64>,
    chunk: u32,
    largest: u32,
}

impl Pace {
    pub(super) fn fixed(chunk: u32) -> Self {
        Self { tokens_per_second: None, chunk, largest: chunk }
    }

    /// Times a step on blocks that nobody owns yet. A worker may load beside another that serves, so this is where the
    /// rate begins, not where it stays.
    pub(super) fn measure(runner: &mut impl ModelRunner) -> Result<Self, RunnerError> {
        let limits = runner.limits();
        let tokens = PROBE_TOKENS.min(limits.max_num_batched_tokens).min(limits.max_model_len);
        let tokens = tokens.min(limits.num_blocks * limits.block_size);
        let batch = probe(tokens, limits.block_size);
        let mut took = time(runner, &batch)?;
        if took < AGAIN_BELOW {
            took = took.min(time(runner, &batch)?);
        }
        Ok(Self::begin(rate(tokens, took), limits.max_num_batched_tokens))
    }

    fn begin(tokens_per_second: f64, largest: u32) -> Self {
        let mut pace = Self { tokens_per_second: Some(tokens_per_second), chunk: 0, largest };
        pace.settle(tokens_per_second);
        pace
    }

    pub(super) fn chunk(&self) -> u32 {
        self.chunk
    }

    /// A step of `tokens`, `prefill_tokens` of them prompt, took this long. The chunk, if that changes it.
    pub(super) fn observe(&mut self, tokens: u32, prefill_tokens: u32, took: Duration) -> Option<u32> {
        // A step of answers alone reads the same weights for few tokens and says nothing of prompts.
        let before = self.tokens_per_second.filter(|_| prefill_tokens >= GRANULE)?;
        let now = before + WEIGHT * (rate(tokens, took) - before);
        self.tokens_per_second = Some(now);
        let chunk = self.chunk;
        self.settle(now);
        (self.chunk != chunk).then_some(self.chunk)
    }

    fn settle(&mut self, tokens_per_second: f64) {
        let fitting = (tokens_per_second * TARGET.as_secs_f64()) as u32 / GRANULE * GRANULE;
        self.chunk = fitting.min(self.largest).max(GRANULE);
    }
}

fn rate(tokens: u32, took: Duration) -> f64 {
    f64::from(tokens) / took.as_secs_f64().max(1e-6)
}

/// One prompt in the first blocks, which nobody owns yet.
fn probe(tokens: u32, block_size: u32) -> StepBatch {
    let blocks = tokens.div_ceil(block_size);
    let mut batch = StepBatch::default();
    // Different tokens, so that a model with experts uses more than a few of them.
    batch.tokens.extend(0..tokens);
    batch.positions.extend(0..tokens);
    batch.slots.extend(0..tokens);
    batch.block_tables.extend(0..blocks);
    batch.sequences.push(BatchSequence {
        token_start: 0,
        token_len: tokens,
        context_len: tokens,
        table_start: 0,
        table_len: blocks,
    });
    batch.sample_rows.push(SampleRow { token: tokens - 1, want: Want::Greedy });
    batch
}

fn time(runner: &mut impl ModelRunner, batch: &StepBatch) -> Result<Duration, RunnerError> {
    let began = Instant::now();
    runner.execute(batch)?;
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_machine_takes_long_chunks_and_a_slow_one_short_ones() {
        assert_eq!(Pace::begin(2600.0, 2048).chunk(), 128);
        assert_eq!(Pace::begin(200.0, 2048).chunk(), GRANULE, "never less than a block");
        assert_eq!(Pace::begin(1e9, 2048).chunk(), 2048, "never more than a step");
    }

    #[test]
    fn a_rate_measured_beside_other_work_recovers() {
        let mut pace = Pace::begin(650.0, 2048);
        assert_eq!(pace.chunk(), 32);
        assert_eq!(pace.observe(16, 0, Duration::from_millis(12)), None, "answers alone say nothing");
        for _ in 0..80 {
            pace.observe(144, 128, Duration::from_millis(55));
        }
        assert_eq!(pace.chunk(), 128);
        let mut chosen = Pace::fixed(48);
        assert_eq!((chosen.observe(144, 128, Duration::from_millis(55)), chosen.chunk()), (None, 48));
    }

    #[test]
    fn the_probe_is_a_batch_that_a_runner_takes() {
        let batch = probe(40, 16);
        assert_eq!((batch.tokens.len(), batch.block_tables.len()), (40, 3));
        assert_eq!(batch.sample_rows[0].token, 39);
    }
}
