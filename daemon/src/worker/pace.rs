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

/// Prompt tokens that take about [`TARGET`], at least one granule, at most what a step holds.
pub(super) fn prefill_chunk(runner: &mut impl ModelRunner) -> Result<u32, RunnerError> {
    let limits = runner.limits();
    let tokens = PROBE_TOKENS.min(limits.max_num_batched_tokens).min(limits.max_model_len);
    let tokens = tokens.min(limits.num_blocks * limits.block_size);
    let batch = probe(tokens, limits.block_size);
    let mut took = time(runner, &batch)?;
    if took < AGAIN_BELOW {
        took = took.min(time(runner, &batch)?);
    }
    Ok(chunk(tokens, took).clamp(GRANULE.min(tokens), limits.max_num_batched_tokens))
}

fn chunk(tokens: u32, took: Duration) -> u32 {
    let fitting = f64::from(tokens) * TARGET.as_secs_f64() / took.as_secs_f64().max(1e-6);
    (fitting as u32) / GRANULE * GRANULE
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
        assert_eq!(chunk(64, Duration::from_millis(20)), 160);
        assert_eq!(chunk(64, Duration::from_millis(300)), 0, "the caller raises it to one granule");
        assert_eq!(chunk(64, Duration::ZERO), 3_200_000);
        assert_eq!(chunk(64, Duration::from_millis(23)) % GRANULE, 0);
    }

    #[test]
    fn the_probe_is_a_batch_that_a_runner_takes() {
        let batch = probe(40, 16);
        assert_eq!((batch.tokens.len(), batch.block_tables.len()), (40, 3));
        assert_eq!(batch.sample_rows[0].token, 39);
    }
}
