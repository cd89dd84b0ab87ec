//! A step as planned, and the flat batch it becomes.

use crate::runner::{BatchSequence, SampleRow, StepBatch, Want};
use crate::sequence::{Key, Requests, Sequences};

/// What a step will compute.
#[derive(Debug, Default)]
pub struct StepPlan {
    pub entries: Vec<Planned>,
    pub tokens: usize,
    /// Logit rows that the entries will ask for.
    pub rows: usize,
}

/// One sequence's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    pub sequence: Key,
    /// New tokens, from `computed` on.
    pub tokens: usize,
    /// Block to copy before it is written to.
    pub copy: Option<(u32, u32)>,
    /// Rows for the log-probabilities of prompt tokens, the last ones before a row to sample from.
    pub prompt_rows: usize,
}

impl StepPlan {
    pub fn clear(&mut self) {
        self.entries.clear();
        (self.tokens, self.rows) = (0, 0);
    }

    pub fn push(&mut self, planned: Planned) {
        self.tokens += planned.tokens;
        self.rows += planned.prompt_rows + 1;
        self.entries.push(planned);
    }
}

/// What a sample row is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowUse {
    /// The next token of the sequence, and the first one of its forks: as many entries of the list of forks, from `forks` on.
    Sample { sequence: Key, forks: usize, count: usize },
    /// Log-probabilities of the prompt token behind this position.
    PromptLogprobs { sequence: Key, position: usize },
}

/// Writes the batch of a plan, and what each of its sample rows is for.
pub fn build_batch(
    plan: &StepPlan,
    sequences: &Sequences,
    requests: &Requests,
    block_size: usize,
    batch: &mut StepBatch,
    uses: &mut Vec<RowUse>,
) {
    batch.clear();
    uses.clear();
    for planned in &plan.entries {
        let sequence = &sequences[planned.sequence];
        let (from, to) = (sequence.computed, sequence.computed + planned.tokens);
        let first = batch.tokens.len();
        let table = &sequence.table.blocks()[..to.div_ceil(block_size)];
        batch.sequences.push(BatchSequence {
            token_start: number(first),
            token_len: number(planned.tokens),
            context_len: number(to),
            table_start: number(batch.block_tables.len()),
            table_len: number(table.len()),
        });
        batch.block_tables.extend_from_slice(table);
        batch.copies.extend(planned.copy);
        for position in from..to {
            batch.tokens.push(sequence.tokens().get(position));
            batch.positions.push(number(position));
            batch.slots.push(table[position / block_size] * number(block_size) + number(position % block_size));
        }
        let mut row = |position: usize, want, row_use| {
            batch.sample_rows.push(SampleRow { token: number(first + position - from), want });
            uses.push(row_use);
        };
        // The last prompt token has no successor whose probability could be asked for.
        let prompt_end = to.min(sequence.prompt.len() - 1);
        let wanted = requests[sequence.request].prompt_logprobs.as_ref().map_or(prompt_end, |known| known.len() - 1);
        for position in wanted.max(from)..prompt_end {
            row(position, Want::Logits, RowUse::PromptLogprobs { sequence: planned.sequence, position });
        }
        if to == sequence.len() {
            let want = sequence.sampler.want(&sequence.params, sequence.generated.len());
            row(to - 1, want, RowUse::Sample { sequence: planned.sequence, forks: 0, count: 0 });
        }
    }
}

/// Counts of a step fit: the runner's limits are `u32`.
fn number(count: usize) -> u32 {
    u32::try_from(count).expect("a step is bounded by the runner's limits")
}
