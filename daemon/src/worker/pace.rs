//! How much prompt a step may carry beside running answers, from what this machine does.
//!
//! A fixed number of tokens is a blink on one machine and a second of silence on another. Tokens do not depend on how a
//! prompt is cut, so the cut may follow a measurement.

use ernie_engine::runner::{BatchSequence, ModelRunner, RunnerError, SampleRow, StepBatch, Want};
use std::time::{Duration, Instant};

/// What a step with prompt tokens should take, so that the answers in it do not seem to halt.
const TARGET: Duration = Duration::from_millis(80);
/// The same as a multiple of a step without prompt, where that is longer: every step reads all weights once, and a step that
/// does little else wastes the machine.
const TARGET_STEPS: f64 = 3.0;
/// Tokens of the first measured step with a prompt; more are tried while they cost next to nothing.
const PROBE_TOKENS: u32 = 64;
const PROBE_TOKENS_MAX: u32 = 512;
/// A second measurement, for want of a warm cache, is worth this much.
const AGAIN_BELOW: Duration = Duration::from_millis(250);
/// Chunks are whole numbers of KV blocks, so that none of them ends inside one.
const GRANULE: u32 = 16;

/// Share that a new observation has: steps differ in context length, and one may have been disturbed.
const WEIGHT: f64 = 1.0 / 16.0;
/// A prompt token costs at least this share of what it seems to cost when the whole step is divided by its tokens: the step
/// without prompt is known from other moments.
const SHARE_MIN: f64 = 0.2;

/// Prompt tokens for steps that carry answers as well.
#[derive(Debug)]
pub(super) struct Pace {
    /// `None`: the operator chose.
    costs: Option<Costs>,
    chunk: u32,
    largest: u32,
}

/// Seconds of a step without prompt, and of each prompt token in addition.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Costs {
    step: f64,
    token: f64,
}

impl Pace {
    pub(super) fn fixed(chunk: u32) -> Self {
        Self { costs: None, chunk, largest: chunk }
    }

    /// Times steps on blocks that nobody owns yet. A worker may load beside another that serves, so this is where the
    /// costs begin, not where they stay.
    pub(super) fn measure(runner: &mut impl ModelRunner) -> Result<Self, RunnerError> {
        let limits = runner.limits();
        let room = limits.max_num_batched_tokens.min(limits.max_model_len).min(limits.num_blocks * limits.block_size);
        let few = GRANULE.min(room);
        let step = fastest(runner, &probe(few, limits.block_size))?;
        let mut tokens = PROBE_TOKENS.min(room);
        let mut took = fastest(runner, &probe(tokens, limits.block_size))?;
        while took < 2 * step && took < TARGET && 2 * tokens <= room.min(PROBE_TOKENS_MAX) {
            tokens *= 2;
            took = fastest(runner, &probe(tokens, limits.block_size))?;
        }
        let token = token_cost(step.as_secs_f64(), tokens, tokens.saturating_sub(few), took);
        Ok(Self::begin(Costs { step: step.as_secs_f64(), token }, limits.max_num_batched_tokens))
    }

    fn begin(costs: Costs, largest: u32) -> Self {
        let mut pace = Self { costs: Some(costs), chunk: 0, largest };
        pace.settle(costs);
        pace
    }

    pub(super) fn chunk(&self) -> u32 {
        self.chunk
    }

    /// A step of `tokens`, `prefill_tokens` of them prompt, took this long. The chunk, if that changes it.
    pub(super) fn observe(&mut self, tokens: u32, prefill_tokens: u32, took: Duration) -> Option<u32> {
        let mut costs = self.costs?;
        if prefill_tokens == 0 {
            costs.step += WEIGHT * (took.as_secs_f64() - costs.step);
        } else if prefill_tokens >= GRANULE {
            costs.token += WEIGHT * (token_cost(costs.step, tokens, prefill_tokens, took) - costs.token);
        } else {
            return None;
        }
        self.costs = Some(costs);
        let chunk = self.chunk;
        self.settle(costs);
        (self.chunk != chunk).then_some(self.chunk)
    }

    fn settle(&mut self, costs: Costs) {
        let target = TARGET.as_secs_f64().max(TARGET_STEPS * costs.step);
        let fitting = ((target - costs.step) / costs.token) as u32 / GRANULE * GRANULE;
        self.chunk = fitting.min(self.largest).max(GRANULE);
    }
}

/// What a prompt token adds to a step that would take `step` seconds without any.
fn token_cost(step: f64, tokens: u32, prefill_tokens: u32, took: Duration) -> f64 {
    let took = took.as_secs_f64().max(1e-6);
    let least = SHARE_MIN * took / f64::from(tokens.max(1));
    ((took - step) / f64::from(prefill_tokens.max(1))).max(least)
}

/// The faster of two runs, unless one takes so long that a second is not worth it.
fn fastest(runner: &mut impl ModelRunner, batch: &StepBatch) -> Result<Duration, RunnerError> {
    let took = time(runner, batch)?;
    if took >= AGAIN_BELOW {
        return Ok(took);
    }
    Ok(took.min(time(runner, batch)?))
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

    fn costs(step_ms: f64, token_us: f64) -> Costs {
        Costs { step: step_ms / 1e3, token: token_us / 1e6 }
    }

    #[test]
    fn a_fast_machine_takes_long_chunks_and_a_slow_one_short_ones() {
        assert_eq!(Pace::begin(costs(10.0, 300.0), 2048).chunk(), 224, "70 ms of prompt");
        assert_eq!(Pace::begin(costs(4.0, 5000.0), 2048).chunk(), GRANULE, "never less than a block");
        assert_eq!(Pace::begin(costs(0.1, 0.1), 2048).chunk(), 2048, "never more than a step");
        assert_eq!(Pace::begin(costs(32.0, 300.0), 2048).chunk(), 208, "64 ms beside a step that takes 32 by itself");
    }

    #[test]
    fn costs_measured_beside_other_work_recover() {
        let mut pace = Pace::begin(costs(20.0, 1200.0), 2048);
        assert_eq!(pace.chunk(), 48);
        for _ in 0..120 {
            pace.observe(16, 0, Duration::from_millis(10));
            pace.observe(144, 128, Duration::from_millis(48));
        }
        assert_eq!(pace.chunk(), 224);
        assert_eq!(pace.observe(20, 4, Duration::from_secs(1)), None, "a few tokens say nothing of prompts");
        let mut chosen = Pace::fixed(48);
        assert_eq!((chosen.observe(144, 128, Duration::from_millis(55)), chosen.chunk()), (None, 48));
    }

    #[test]
    fn a_token_never_seems_free() {
        // The step without prompt was measured in a bad moment.
        assert!(token_cost(0.060, 64, 64, Duration::from_millis(50)) >= 0.2 * 0.050 / 64.0);
    }

    #[test]
    fn the_probe_is_a_batch_that_a_runner_takes() {
        let batch = probe(40, 16);
        assert_eq!((batch.tokens.len(), batch.block_tables.len()), (40, 3));
        assert_eq!(batch.sample_rows[0].token, 39);
    }
}
