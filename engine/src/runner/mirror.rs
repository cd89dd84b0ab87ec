//! A runner that computes nothing and checks everything.
//!
//! Each KV slot holds the *(token, position)* that was written to it. Every step reads each sequence's history back through
//! its block table, compares, and answers with logits made from a hash of it. So a block that was freed too early, shared
//! while written to, copied wrongly or swapped to the wrong place changes an answer or is refused at once; and an answer
//! depends on the sequence's tokens alone, as the real model promises.

use super::{BatchSequence, ModelRunner, Row, RunnerError, RunnerLimits, StepBatch, Want};

/// Things that go wrong on purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Logits of a history that ends with this token are not finite.
    pub not_finite_after: Option<u32>,
    /// Every so many steps one fails, and leaves rubbish behind.
    pub fail_every: Option<u64>,
}

#[derive(Debug)]
pub struct MirrorRunner {
    limits: RunnerLimits,
    faults: Faults,
    slots: Vec<Slot>,
    /// Who reads and who writes each block in this step.
    blocks: Vec<BlockUse>,
    rows: Vec<(u64, Want, bool)>,
    logits: Vec<f32>,
    steps: u64,
    tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    token: u32,
    position: u32,
}

/// What nothing was written to; and what a failed step leaves.
const EMPTY: Slot = Slot { token: u32::MAX, position: u32::MAX };

#[derive(Debug, Clone, Copy, Default)]
struct BlockUse {
    readers: u32,
    written: bool,
}

impl MirrorRunner {
    pub fn new(limits: RunnerLimits) -> Self {
        Self::with_faults(limits, Faults::default())
    }

    pub fn with_faults(limits: RunnerLimits, faults: Faults) -> Self {
        let slots = limits.num_blocks as usize * limits.block_size as usize;
        Self {
            limits,
            faults,
            slots: vec![EMPTY; slots],
            blocks: vec![BlockUse::default(); limits.num_blocks as usize],
            rows: Vec::new(),
            logits: vec![0.0; limits.vocab_size as usize],
            steps: 0,
            tokens: 0,
        }
    }

    /// Tokens computed since the start, in all steps.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    fn check_bounds(&self, batch: &StepBatch) -> Result<(), String> {
        let RunnerLimits { max_num_batched_tokens, max_num_seqs, .. } = self.limits;
        at_most("tokens", batch.tokens.len(), max_num_batched_tokens)?;
        at_most("sequences", batch.sequences.len(), max_num_seqs)?;
        at_most("sample rows", batch.sample_rows.len(), max_num_seqs)?;
        same("positions", batch.positions.len(), batch.tokens.len())?;
        same("slots", batch.slots.len(), batch.tokens.len())?;
        let mut end = 0;
        for sequence in &batch.sequences {
            same("a sequence's first token", sequence.token_start as usize, end)?;
            end += sequence.token_len as usize;
        }
        same("tokens of all sequences", end, batch.tokens.len())?;
        let ascending = batch.sample_rows.windows(2).all(|pair| pair[0].token < pair[1].token);
        let inside = batch.sample_rows.last().is_none_or(|row| (row.token as usize) < batch.tokens.len());
        if ascending && inside { Ok(()) } else { Err("sample rows are not ascending tokens of the batch".into()) }
    }

    fn check_sequence(&self, batch: &StepBatch, sequence: &BatchSequence) -> Result<(), String> {
        let RunnerLimits { block_size, num_blocks, max_model_len, vocab_size, .. } = self.limits;
        if sequence.token_len == 0 || sequence.context_len > max_model_len {
            return Err(format!("{sequence:?} is empty or longer than the model allows"));
        }
        let table = table(batch, sequence);
        if table.len() < sequence.context_len.div_ceil(block_size) as usize {
            return Err(format!("{} blocks do not cover {} tokens", table.len(), sequence.context_len));
        }
        for (index, &block) in table.iter().enumerate() {
            if block >= num_blocks || table[..index].contains(&block) {
                return Err(format!("block {block} is unknown or twice in {table:?}"));
            }
        }
        let first = sequence.context_len - sequence.token_len;
        for (token, position) in new_tokens(sequence).zip(first..) {
            same("a position", batch.positions[token] as usize, position as usize)?;
            let slot = table[(position / block_size) as usize] * block_size + position % block_size;
            same("a slot", batch.slots[token] as usize, slot as usize)?;
            if batch.tokens[token] >= vocab_size {
                return Err(format!("token {} is not in the vocabulary", batch.tokens[token]));
            }
        }
        Ok(())
    }

    /// A block that one sequence writes to must be in no other's table.
    fn check_sharing(&mut self, batch: &StepBatch) -> Result<(), String> {
        self.blocks.fill(BlockUse::default());
        for sequence in &batch.sequences {
            for &block in table(batch, sequence) {
                self.blocks[block as usize].readers += 1;
            }
        }
        for &slot in &batch.slots {
            self.blocks[(slot / self.limits.block_size) as usize].written = true;
        }
        match self.blocks.iter().position(|block| block.written && block.readers != 1) {
            None => Ok(()),
            Some(block) => Err(format!(
                "block {block} is written to and in the tables of {} sequences",
                self.blocks[block].readers
            )),
        }
    }

    fn copy(&mut self, batch: &StepBatch) -> Result<(), String> {
        for &(from, to) in &batch.copies {
            at_most("blocks", from.max(to) as usize + 1, self.limits.num_blocks)?;
            let size = self.limits.block_size as usize;
            let from = from as usize * size;
            self.slots.copy_within(from..from + size, to as usize * size);
        }
        Ok(())
    }

    fn write(&mut self, batch: &StepBatch) {
        for ((&token, &position), &slot) in batch.tokens.iter().zip(&batch.positions).zip(&batch.slots) {
            self.slots[slot as usize] = Slot { token, position };
        }
        self.tokens += batch.tokens.len() as u64;
    }

    /// Reads a sequence's history back and answers its sample rows.
    fn read_back(&mut self, batch: &StepBatch, sequence: &BatchSequence, next_row: &mut usize) -> Result<(), String> {
        let table = table(batch, sequence);
        let size = self.limits.block_size;
        let first = sequence.context_len - sequence.token_len;
        let mut hash = 0x5eed;
        for position in 0..sequence.context_len {
            let block = table[(position / size) as usize];
            let slot = self.slots[(block * size + position % size) as usize];
            if slot.position != position {
                return Err(format!(
                    "position {position} of a sequence is in block {block}, which holds {slot:?} there"
                ));
            }
            hash = mix(hash ^ u64::from(slot.token));
            if position >= first
                && let Some(row) = batch.sample_rows.get(*next_row)
                && row.token == sequence.token_start + position - first
            {
                self.rows.push((hash, row.want, self.faults.not_finite_after == Some(slot.token)));
                *next_row += 1;
            }
        }
        Ok(())
    }

    fn run(&mut self, batch: &StepBatch) -> Result<(), String> {
        self.rows.clear();
        self.check_bounds(batch)?;
        for sequence in &batch.sequences {
            self.check_sequence(batch, sequence)?;
        }
        self.check_sharing(batch)?;
        self.copy(batch)?;
        self.write(batch);
        let mut next_row = 0;
        for sequence in &batch.sequences {
            self.read_back(batch, sequence, &mut next_row)?;
        }
        same("answered rows", next_row, batch.sample_rows.len())
    }
}

impl ModelRunner for MirrorRunner {
    fn limits(&self) -> RunnerLimits {
        self.limits
    }

    fn execute(&mut self, batch: &StepBatch) -> Result<(), RunnerError> {
        self.steps += 1;
        if self.faults.fail_every.is_some_and(|every| self.steps.is_multiple_of(every)) {
            for &slot in &batch.slots {
                self.slots[slot as usize] = EMPTY;
            }
            return Err(RunnerError(FAILED_ON_PURPOSE.into()));
        }
        self.run(batch).map_err(RunnerError)
    }

    fn row(&mut self, i: usize) -> Row<'_> {
        let (hash, want, not_finite) = self.rows[i];
        for (logit, token) in self.logits.iter_mut().zip(0u64..) {
            *logit = logit_of(hash, token);
        }
        if not_finite {
            self.logits[0] = f32::NAN;
        }
        if want == Want::Logits {
            return Row::Logits(&self.logits);
        }
        let mut best = (0, self.logits[0]);
        for (token, &logit) in (0..).zip(&self.logits) {
            if logit > best.1 {
                best = (token, logit);
            }
        }
        Row::Greedy { token: best.0, logit: if not_finite { f32::NAN } else { best.1 } }
    }

    fn block_bytes(&self) -> usize {
        self.limits.block_size as usize * 8
    }

    fn export_block(&self, block: u32, out: &mut [u8]) {
        let size = self.limits.block_size as usize;
        let slots = &self.slots[block as usize * size..][..size];
        for (slot, out) in slots.iter().zip(out.chunks_exact_mut(8)) {
            out[..4].copy_from_slice(&slot.token.to_le_bytes());
            out[4..].copy_from_slice(&slot.position.to_le_bytes());
        }
    }

    fn import_block(&mut self, block: u32, from: &[u8]) {
        let size = self.limits.block_size as usize;
        let slots = &mut self.slots[block as usize * size..][..size];
        for (slot, from) in slots.iter_mut().zip(from.chunks_exact(8)) {
            let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte));
            *slot = Slot { token: number(&from[..4]), position: number(&from[4..]) };
        }
    }
}

/// The message of a step that [`Faults::fail_every`] let fail.
pub const FAILED_ON_PURPOSE: &str = "this step fails on purpose";

fn table<'a>(batch: &'a StepBatch, sequence: &BatchSequence) -> &'a [u32] {
    let start = sequence.table_start as usize;
    &batch.block_tables[start..start + sequence.table_len as usize]
}

fn new_tokens(sequence: &BatchSequence) -> std::ops::Range<usize> {
    sequence.token_start as usize..(sequence.token_start + sequence.token_len) as usize
}

fn at_most(what: &str, count: usize, limit: u32) -> Result<(), String> {
    if count <= limit as usize { Ok(()) } else { Err(format!("{count} {what}, but at most {limit} are allowed")) }
}

fn same(what: &str, found: usize, expected: usize) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found} instead of {expected}")) }
}

/// Between -4 and 4, in steps coarse enough that ties happen.
fn logit_of(hash: u64, token: u64) -> f32 {
    let step = mix(hash.wrapping_add(token.wrapping_mul(0x9e37_79b9_7f4a_7c15))) % 512;
    step as f32 / 64.0 - 4.0
}

/// SplitMix64's finaliser.
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::SampleRow;
    use super::*;

    fn runner() -> MirrorRunner {
        MirrorRunner::new(RunnerLimits {
            vocab_size: 50,
            block_size: 2,
            num_blocks: 4,
            max_num_batched_tokens: 8,
            max_num_seqs: 2,
            max_model_len: 8,
        })
    }

    fn batch(tokens: &[u32], from: u32, table: &[u32]) -> StepBatch {
        let len = u32::try_from(tokens.len()).unwrap();
        let positions: Vec<u32> = (from..from + len).collect();
        let table_len = u32::try_from(table.len()).unwrap();
        StepBatch {
            tokens: tokens.to_vec(),
            slots: positions.iter().map(|p| table[(p / 2) as usize] * 2 + p % 2).collect(),
            positions,
            sequences: vec![BatchSequence {
                token_start: 0,
                token_len: len,
                context_len: from + len,
                table_start: 0,
                table_len,
            }],
            block_tables: table.to_vec(),
            sample_rows: vec![SampleRow { token: len - 1, want: Want::Logits }],
            copies: Vec::new(),
        }
    }

    fn logits(runner: &mut MirrorRunner) -> Vec<f32> {
        match runner.row(0) {
            Row::Logits(logits) => logits.to_vec(),
            Row::Greedy { .. } => panic!("logits were wanted"),
        }
    }

    #[test]
    fn an_answer_depends_on_the_tokens_and_not_on_the_blocks_or_the_steps() {
        let mut whole = runner();
        whole.execute(&batch(&[5, 6, 7], 0, &[0, 1])).unwrap();
        let mut parts = runner();
        parts.execute(&batch(&[5, 6], 0, &[3])).unwrap();
        parts.execute(&batch(&[7], 2, &[3, 2])).unwrap();
        assert_eq!(logits(&mut whole), logits(&mut parts));
        let mut other = runner();
        other.execute(&batch(&[5, 8, 7], 0, &[0, 1])).unwrap();
        assert_ne!(logits(&mut whole), logits(&mut other));
    }

    #[test]
    fn a_history_that_was_overwritten_is_noticed() {
        let mut runner = runner();
        runner.execute(&batch(&[5, 6], 0, &[0])).unwrap();
        let refusal = runner.execute(&batch(&[7], 2, &[1, 2])).unwrap_err();
        assert!(refusal.0.contains("position 0 of a sequence is in block 1"), "{refusal}");
    }

    #[test]
    fn a_block_survives_its_way_to_the_host_and_back() {
        let mut runner = runner();
        runner.execute(&batch(&[5, 6], 0, &[0])).unwrap();
        let mut copy = vec![0; runner.block_bytes()];
        runner.export_block(0, &mut copy);
        runner.import_block(3, &copy);
        runner.execute(&batch(&[7], 2, &[3, 1])).unwrap();
    }
}
