//! What one step computes, flat: everything a runner needs and nothing it has to look up.

use super::RunnerLimits;

/// One step's work. Sequences lie one after the other in `tokens`; there is no prefill and no decode, a sequence just has
/// one or more new tokens on top of what its blocks already hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// New token ids of all sequences, concatenated.
    pub tokens: Vec<u32>,
    /// Position of each new token in its sequence.
    pub positions: Vec<u32>,
    /// KV slot of each new token: `block * block_size + offset`.
    pub slots: Vec<u32>,
    pub sequences: Vec<BatchSequence>,
    /// Block tables of all sequences, concatenated; enough blocks to cover each context.
    pub block_tables: Vec<u32>,
    /// Tokens whose logits are wanted, ascending, each once; at most `RunnerLimits::max_num_seqs` of them.
    pub sample_rows: Vec<SampleRow>,
    /// Whole-block KV copies `(from, to)` to do before anything else and in this order (copy-on-write).
    pub copies: Vec<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSequence {
    /// First of this sequence's tokens in `StepBatch::tokens`.
    pub token_start: u32,
    pub token_len: u32,
    /// Tokens in the KV cache after this step: the last new token's position + 1.
    pub context_len: u32,
    /// First entry of this sequence in `StepBatch::block_tables`.
    pub table_start: u32,
    pub table_len: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleRow {
    /// Index into `StepBatch::tokens`.
    pub token: u32,
    pub want: Want,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// Only the most likely token: the runner need not write logits out.
    Greedy,
    /// All logits.
    Logits,
}

impl StepBatch {
    /// An empty batch with memory for the largest that a runner takes (block tables that share more than half of their blocks
    /// may still make it grow).
    pub fn with_capacity(limits: &RunnerLimits) -> Self {
        let tokens = limits.max_num_batched_tokens as usize;
        let sequences = limits.max_num_seqs as usize;
        Self {
            tokens: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            slots: Vec::with_capacity(tokens),
            sequences: Vec::with_capacity(sequences),
            block_tables: Vec::with_capacity(2 * limits.num_blocks as usize),
            sample_rows: Vec::with_capacity(sequences),
            copies: Vec::with_capacity(sequences),
        }
    }

    /// Empties it and keeps the memory.
    pub fn clear(&mut self) {
        let Self { tokens, positions, slots, sequences, block_tables, sample_rows, copies } = self;
        tokens.clear();
        positions.clear();
        slots.clear();
        sequences.clear();
        block_tables.clear();
        sample_rows.clear();
        copies.clear();
    }
}
